"""Local training: from a base state and the work of a round to a delta. Imports torch: only clients load this.

A result follows from the recipe, the seed, the partition, the round and the progress made in the rounds trained before,
bit for bit on one machine with one number of threads. A round that fails or is abandoned leaves no trace: trained again, it
gives what it would have given.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clients.devices import chosen
from clients.feed import Feed, Position, feed_of, moved
from clients.probe import release
from clients.seeding import Seeding
from clients.slice_feed import SharedData
from ravnest_fed.encoding import Deltas
from ravnest_fed.errors import RavnestError
from ravnest_fed.facts import WorkOrder
from ravnest_fed.model_state import TrainedDelta, finite, load_frozen, parameter_shifts, schema_of, write_state
from ravnest_fed.parameters import Float32, ModelState, Schema
from ravnest_fed.recipe import LoadedRecipe, Partition
from ravnest_fed.slices import Slice, size


class RoundAbandoned(RavnestError):
    """Training was told to stop before the round's last step."""


class RoundYielded(RavnestError):
    """The machine was needed before the round's first step; there is nothing to send for this round."""


class TrainingDiverged(RavnestError):
    """The loss or the parameters stopped being finite; there is nothing to send for this round."""


@dataclass(frozen=True)
class LocalWork:
    """What to train in one round; `committed_steps` is the number of steps of all committed rounds together.

    `proximal` is FedProx's mu: proximal / 2 * ||parameters - base||^2 is added to the loss of each optimiser step, and
    0 adds nothing at all. Li et al., "Federated optimization in heterogeneous networks" (2020).

    `slice` are the samples of shared data to train on, as many as the steps take; () where the client has its own data.
    """

    server_round: int
    micro_batch: int
    accumulation: int
    local_steps: int
    committed_steps: int
    proximal: float = 0.0
    slice: Slice = ()

    @classmethod
    def ordered(cls, order: WorkOrder, proximal: float, slice: Slice = ()) -> "LocalWork":
        """The work that `order` asks for, in a federation whose `strategy.proximal` is `proximal`.

        A `slice` with too few samples for every step makes the round as much shorter.
        """
        step = order.micro_batch * order.accumulation
        return cls(
            order.base_round + 1,
            order.micro_batch,
            order.accumulation,
            min(order.local_steps, size(slice) // step) if slice else order.local_steps,
            order.committed_steps,
            proximal,
            slice,
        )


@dataclass(frozen=True)
class LocalResult:
    """What one round of training gave.

    `delta` may be read from the trained model, and then holds until that is used for something else; `kept` makes it
    last. `num_examples` counts the examples that went through the model, repeats included. `local_steps` may be fewer
    than the work asked for. `metrics` holds the mean training `loss` over the examples. `seconds` is wall time.
    """

    delta: Deltas
    num_examples: int
    local_steps: int
    metrics: dict[str, float]
    seconds: float

    def kept(self, schema: Schema) -> "LocalResult":
        """The same with a delta of its own, a `ModelState`."""
        delta = ModelState.zeros(schema)
        for shard in schema.shards:
            delta.shard(shard)[...] = self.delta.shard(shard)
        return replace(self, delta=delta)


@dataclass(frozen=True)
class Progress:
    """What a client carries from one local round to the next; everything else follows from the seed and the round.

    `optimizer_state` is the local optimiser's `state_dict()`, or None where it does not outlive a round.
    """

    position: Position = field(default_factory=Position)
    optimizer_state: dict[str, Any] | None = field(default=None, repr=False)


class Trainer:
    """Holds the model on its device and trains it round by round.

    `device` is a torch device name, or "auto": a GPU where there is one. `seed` is the federation's. `initial` is the
    federation's initial model in safetensors: what is not federated is taken from there; without it, from the recipe.
    `samples` is how many samples the federation's shared data has, 0 where each client has its own.
    Raises RecipeError for a recipe that breaks its contract, SchemaMismatch for a model that is off `schema`, and
    UsageError for a device that is not there.
    """

    def __init__(
        self,
        loaded: LoadedRecipe,
        schema: Schema,
        partition: Partition,
        device: str = "auto",
        seed: int = 0,
        initial: Path | None = None,
        samples: int = 0,
    ) -> None:
        self.device = chosen(device)
        self._loaded = loaded
        self._schema = schema
        self._partition = partition
        self._seed = seed
        self._samples = samples
        model = loaded.build_model(seed)
        if initial is not None:
            load_frozen(model, schema, initial)
        schema.require_equal(schema_of(model, schema.shard_size), str(loaded.path))
        self._model = model.to(self.device)
        self._feed: Feed | None = None
        self._shared: SharedData | None = None
        self.progress = Progress()
        """Given another Trainer's progress, this one goes on as that one would."""

    def repartition(self, partition: Partition) -> None:
        """Train on another part of the data from the next round on; the same part again changes nothing."""
        if partition != self._partition:
            self._partition, self._feed = partition, None

    def load_data(self) -> None:
        """Ask the recipe for this client's data now instead of in the first round. Raises RecipeError and NoDataError."""
        if self._samples:
            self._shared_data()
        else:
            self._data()

    def warm_up(self) -> None:
        """Build an optimiser now: the first one in a process loads much of torch, which would make the first round seem
        slow. Raises RecipeError."""
        with self._seeding().seeded("warm up", 0):
            self._loaded.build_optimizer([one for one in self._model.parameters() if one.requires_grad])

    def local_round(self, work: LocalWork, base: ModelState, *more: Any, **named: Any) -> LocalResult:
        """`train`, with a delta that lasts."""
        return self.train(work, base, *more, **named).kept(self._schema)

    def train(
        self,
        work: LocalWork,
        base: ModelState,
        cancelled: Callable[[], bool] = lambda: False,
        goes_on: Callable[[], bool] = lambda: True,
        correction: Float32 | None = None,
    ) -> LocalResult:
        """Train `work` from `base`; `cancelled` is asked before each micro-batch and drops the round.

        `goes_on` is asked before each step. It may take its time; when it says no, the round is as long as it got.
        `correction` (float32, in the layout of the parameters) is added to the parameters after each step.
        Raises RoundAbandoned, RoundYielded, TrainingDiverged, NoDataError and RecipeError.
        """
        feed, position = self._source(work)
        started = time.perf_counter()
        write_state(self._model, self._schema, base)
        self._model.train()
        parameters = [one for one in self._model.parameters() if one.requires_grad]
        shifts = [] if correction is None else parameter_shifts(self._model, self._schema, correction)
        anchors = [one.detach().clone() for one in parameters] if work.proximal else []
        with self._seeding().seeded("round", work.server_round):
            optimizer = self._loaded.build_optimizer(parameters)
            if self.progress.optimizer_state is not None and self._loaded.recipe.keep_optimizer:
                optimizer.load_state_dict(copy.deepcopy(self.progress.optimizer_state))
            examples, loss_sum = 0, 0.0
            step = 0
            while step < work.local_steps and goes_on():
                batches = []
                for _ in range(work.accumulation):
                    batch, count, position = feed.draw(position, work.micro_batch)
                    batches.append((batch, count))
                loss = self._step(work, step, optimizer, parameters, anchors, batches, cancelled)
                with torch.no_grad():
                    for parameter, shift in shifts:
                        parameter.add_(shift)
                drawn = sum(count for _, count in batches)
                examples += drawn
                loss_sum += loss * drawn
                step += 1
        done = step
        if not done:
            raise RoundYielded(f"round {work.server_round} was not begun")
        if not finite(self._model, self._schema):
            raise _diverged("parameters", work, done)
        kept = optimizer.state_dict() if self._loaded.recipe.keep_optimizer else None
        self.progress = Progress(self.progress.position if work.slice else position, kept)
        return LocalResult(
            TrainedDelta(self._model, self._schema, base),
            # A loader's batches can be larger than the work order's; a client never claims more than was asked.
            min(examples, work.micro_batch * work.accumulation * done),
            done,
            {"loss": loss_sum / examples},
            time.perf_counter() - started,
        )

    def make_room(self) -> None:
        """Give the device's memory that no tensor holds back to the machine; the model stays."""
        release(self.device)

    def evaluate(self, state: ModelState) -> tuple[dict[str, float], int] | None:
        """Metrics of `state` by the recipe's `evaluate`, and how many examples they stand for; None if it has none."""
        write_state(self._model, self._schema, state)
        self._model.eval()
        with self._seeding().seeded("evaluate", 0), torch.no_grad():
            return self._loaded.evaluate(self._model)

    def _step(
        self,
        work: LocalWork,
        step: int,
        optimizer: torch.optim.Optimizer,
        parameters: list[torch.nn.Parameter],
        anchors: list[torch.Tensor],
        batches: list[tuple[Any, int]],
        cancelled: Callable[[], bool],
    ) -> float:
        """One step of the optimiser over `batches`, each weighted by its examples; returns their mean loss.

        `anchors` are the base's values of `parameters`, or empty without a proximal term, which the loss leaves out.
        """
        drawn = sum(count for _, count in batches)
        total = torch.zeros((), device=self.device)
        optimizer.zero_grad(set_to_none=True)
        for batch, count in batches:
            if cancelled():
                raise RoundAbandoned(f"round {work.server_round} was abandoned at step {step + 1}")
            loss = self._loaded.loss(self._model, moved(batch, self.device))
            scaled = loss if len(batches) == 1 else loss * (count / drawn)
            with self._loaded.calling("loss"):
                scaled.backward()  # type: ignore[no-untyped-call]
            total += scaled.detach()
        mean = float(total)
        if not np.isfinite(mean):
            raise _diverged("loss", work, step + 1)
        for parameter, anchor in zip(parameters, anchors, strict=bool(anchors)):
            # A parameter that no batch reached has not left its base either.
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - anchor, alpha=work.proximal)
        if self._loaded.recipe.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._loaded.recipe.max_grad_norm)
        self._loaded.schedule(optimizer, work.committed_steps + step)
        with self._loaded.calling("optimizer"):
            optimizer.step()
        return mean

    def _source(self, work: LocalWork) -> tuple[Feed, Position]:
        """Where the batches of a round come from, and the first one's position."""
        if work.slice:
            return self._shared_data().feed(work.slice), Position()
        return self._data(), self.progress.position

    def _shared_data(self) -> SharedData:
        if self._shared is None:
            with self._seeding().seeded("data", 0):
                self._shared = SharedData(self._loaded, self._samples, self._seed)
        return self._shared

    def _data(self) -> Feed:
        if self._feed is None:
            seeding = self._seeding()
            with seeding.seeded("data", 0):
                self._feed = feed_of(self._loaded, self._partition, self._seed, seeding)
        return self._feed

    def _seeding(self) -> Seeding:
        return Seeding(self._seed, self._partition.index, self.device)


def _diverged(what: str, work: LocalWork, step: int) -> TrainingDiverged:
    verb = "is" if what == "loss" else "are"
    return TrainingDiverged(
        f"the {what} {verb} not finite after step {step} of {work.local_steps} of round {work.server_round}",
        "lower the learning rate, set max_grad_norm, or look for bad samples",
    )
