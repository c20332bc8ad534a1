"""Measures what this machine can do with a recipe: the recipe's own training steps, on a model of the probe's own.

Nothing of it stays: random states are put back, and the model, its optimiser and its data are dropped. Imports torch.
"""

import gc
import time
from collections.abc import Callable
from typing import Protocol

import torch

from clients.devices import Host, host, overlooked_gpus, peak_memory, survey
from clients.feed import Position, feed_of, moved
from clients.ramp import SECONDS, Climbed, Ramp
from clients.seeding import Seeding
from ravnest_fed.capability import MAX_NAME, Capability, Device, clipped
from ravnest_fed.recipe import LoadedRecipe, Partition

Clock = Callable[[], float]
Free = Callable[[], int | None]
UNMEASURED = "measured on transfers of a federation only"


class Steps(Protocol):
    """Training steps to be timed."""

    def step(self, micro_batch: int) -> int:
        """Make one step; the number of examples in it."""
        ...


class TrainingSteps:
    """The recipe's training steps as a client makes them: draw, forward, backward, the optimiser's step.

    Raises RecipeError and NoDataError, and whatever torch raises where memory ends.
    """

    def __init__(self, loaded: LoadedRecipe, partition: Partition, device: torch.device) -> None:
        self._loaded = loaded
        self._device = device
        self._model = loaded.build_model(partition.seed).to(device).train()
        self._parameters = [one for one in self._model.parameters() if one.requires_grad]
        self._optimizer = loaded.build_optimizer(self._parameters)
        seeding = Seeding(partition.seed, partition.index, device)
        self._feed = feed_of(loaded, partition, partition.seed, seeding)
        self._position = Position()

    def step(self, micro_batch: int) -> int:
        """Make one step; the number of examples in it."""
        batch, count, self._position = self._feed.draw(self._position, micro_batch)
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loaded.loss(self._model, moved(batch, self._device))
        with self._loaded.calling("loss"):
            loss.backward()  # type: ignore[no-untyped-call]
        if self._loaded.recipe.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._loaded.recipe.max_grad_norm)
        with self._loaded.calling("optimizer"):
            self._optimizer.step()
        # Reading the loss waits for the device: work that was only queued takes no time.
        float(loss.detach())
        return count


def climb(
    steps: Steps,
    seconds: float,
    clock: Clock,
    least: int = 1,
    peak: Callable[[], int | None] = lambda: None,
    free: Free = lambda: None,
) -> Climbed:
    """Step with growing micro-batches for about `seconds`; what cannot be had for lack of memory ends it.

    `least` is as in `Ramp`; `peak` and `free` tell of memory as `Ramp.stepped` wants it.
    """
    ramp = Ramp(seconds, least)
    while (micro_batch := ramp.next()) is not None:
        began = clock()
        examples = _step(steps, micro_batch)
        if examples is None:
            ramp.refused()
        else:
            ramp.stepped(examples, clock() - began, peak(), free())
    return ramp.result()


def measure(
    loaded: LoadedRecipe,
    partition: Partition,
    device: torch.device,
    seconds: float = SECONDS,
    clock: Clock = time.perf_counter,
) -> Climbed:
    """The recipe's speeds on `device`, with `partition` of its data. Raises RecipeError and NoDataError.

    The time for the recipe to make its model and data is its own, and not among `seconds`.
    """
    seeding = Seeding(partition.seed, partition.index, device)
    # Where memory is refused in words, there is nothing to foresee.
    on_card = device.type == "cuda"
    try:
        with seeding.seeded("probe", 0):
            steps = _training_steps(loaded, partition, device)
            if steps is None:
                return Climbed((), 1, "nothing could be measured", "the model does not fit into memory")
            return climb(
                steps,
                seconds,
                clock,
                loaded.recipe.micro_batch,
                lambda: None if on_card else peak_memory(),
                lambda: None if on_card else host().memory_free,
            )
    finally:
        steps = None
        release(device)


def release(device: torch.device) -> None:
    """Give memory that nobody holds any more back to the machine."""
    # A traceback that was caught may hold a batch and its graph in a cycle.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def capability_of(
    climbed: Climbed, device: torch.device, devices: tuple[Device, ...] | None = None, around: Host | None = None
) -> Capability:
    """What was measured, with the machine as it is now unless `devices` and `around` tell of it."""
    devices, around = devices or survey(), around or host()
    hint = overlooked_gpus(device)
    reasons = {
        "device": hint
        or ("the GPU that torch finds" if device.type != "cpu" else "torch finds no GPU, or cpu was asked"),
        "micro_batch": climbed.chosen,
        "speeds": climbed.ended,
        "max_micro_batch": climbed.ended if climbed.fits else "memory refused none of those tried",
        "bandwidth_up": UNMEASURED,
        "bandwidth_down": UNMEASURED,
    }
    if around.battery is None:
        reasons["battery"] = "none, or the machine does not tell"
    return Capability(
        device=clipped(device, MAX_NAME),
        devices=devices,
        cores=around.cores,
        memory_total=around.memory_total,
        memory_free=around.memory_free,
        battery=around.battery,
        on_battery=around.on_battery,
        speeds=climbed.speeds,
        micro_batch=climbed.micro_batch,
        max_micro_batch=climbed.fits,
        reasons={name: clipped(reason) for name, reason in reasons.items()},
    )


def _training_steps(loaded: LoadedRecipe, partition: Partition, device: torch.device) -> TrainingSteps | None:
    try:
        return TrainingSteps(loaded, partition, device)
    except Exception as error:
        if not out_of_memory(error):
            raise
    return None


def _step(steps: Steps, micro_batch: int) -> int | None:
    """One step's examples; None where memory ran out, with nothing of the step held any more."""
    try:
        return steps.step(micro_batch)
    except Exception as error:
        if not out_of_memory(error):
            raise
    return None


def out_of_memory(error: BaseException | None) -> bool:
    """Whether `error`, or what it was raised from, says that memory was refused."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        # The CPU's allocator and Apple's have no class of their own.
        words = ("can't allocate memory", "not enough memory", "out of memory")
        if isinstance(error, RuntimeError) and any(word in str(error) for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False
