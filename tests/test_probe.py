"""The probe of a real recipe: what it measures, what ends it, and that nothing of it stays."""

import gc
import random
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from clients import probe
from clients.probe import capability_of, climb, measure, out_of_memory
from clients.ramp import Climbed
from clients.remembered import FILE_NAME, MAX_ENTRIES, Key, RememberedProbes
from clients.trainer import LocalWork, Trainer
from ravnest_fed.capability import Speed
from ravnest_fed.errors import NoDataError, RecipeError
from ravnest_fed.model_state import read_state, schema_of
from ravnest_fed.parameters import BLOCK
from ravnest_fed.recipe import LoadedRecipe, Partition, load_recipe

torch.set_num_threads(1)
CPU = torch.device("cpu")
WHOLE = Partition(0, 1, 0)

RECIPE = """
import gc
import random
import numpy as np
import torch
import weakref
import ravnest_fed as rf

MADE = []

class Small(rf.Recipe):
    micro_batch = 2
    most = 1 << 40
    def model(self):
        made = torch.nn.Linear(3, 1)
        MADE.append(weakref.ref(made))
        return made
    def train_data(self, part):
        inputs = torch.arange(120.).reshape(40, 3) / 30
        return inputs, inputs.sum(1, keepdim=True)
    def loss(self, model, batch):
        random.random(), np.random.rand(), torch.rand(1)
        if len(batch[0]) > self.most:
            held = [model(batch[0])]
            held.append(held)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""


class Clock:
    """A clock that goes on by `step` at each look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def small(folder: Path, methods: str = "") -> LoadedRecipe:
    (folder / "recipe.py").write_text(RECIPE + "".join(f"    {line}\n" for line in methods.splitlines()))
    return load_recipe(folder / "recipe.py")


def models(loaded: LoadedRecipe) -> list[weakref.ref[torch.nn.Module]]:
    made: list[weakref.ref[torch.nn.Module]] = loaded.recipe.model.__globals__["MADE"]
    return made


def test_the_recipe_is_measured_up_to_its_data(tmp_path: Path) -> None:
    found = measure(small(tmp_path), WHOLE, CPU, 10.0, Clock(0.125))
    assert [speed.micro_batch for speed in found.speeds] == [1, 2, 4, 8, 16, 32, 40]
    assert found.ended == "the data gives no more than 40 at once"
    # The clock goes on by one look a step, so a step always takes 0.125 s.
    assert [speed.samples_per_second for speed in found.speeds] == [8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 320.0]


def test_memory_that_runs_out_is_the_bound_and_nothing_is_left_behind(tmp_path: Path) -> None:
    loaded = small(tmp_path)
    loaded.recipe.most = 8  # type: ignore[attr-defined]
    gc.collect()
    before = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
    found = measure(loaded, WHOLE, CPU, 10.0, Clock(0.125))
    assert (found.fits, found.micro_batch) == (8, 8)
    assert found.ended == "16 at once does not fit into memory; 8 does"
    assert [model() for model in models(loaded)] == [None]
    assert sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()) <= before


def test_a_cards_cache_is_given_back_after_its_holders_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [torch.zeros(1)]
    held.append(held)  # type: ignore[arg-type]
    tensor = weakref.ref(held[0])
    del held
    at_return: list[torch.Tensor | None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: at_return.append(tensor()))
    probe.release(torch.device("cuda"))
    assert at_return == [None]


def test_a_model_that_does_not_fit_is_told(tmp_path: Path) -> None:
    loaded = small(tmp_path, "def model(self):\n    raise RuntimeError('MPS backend out of memory')")
    found = measure(loaded, WHOLE, CPU, 1.0)
    assert (found.speeds, found.ended) == ((), "the model does not fit into memory")


@pytest.mark.parametrize(
    ("error", "says_so"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_told_from_other_failures(error: Exception, says_so: bool) -> None:
    assert out_of_memory(error) is says_so
    try:
        raise RecipeError("loss() failed") from error
    except RecipeError as wrapped:
        assert out_of_memory(wrapped) is says_so


def test_failures_of_the_recipe_are_its_own_errors(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="loss"):
        measure(small(tmp_path, "def loss(self, model, batch):\n    return 1 / 0"), WHOLE, CPU, 1.0)
    with pytest.raises(NoDataError):
        measure(small(tmp_path, "def train_data(self, part):\n    return []"), WHOLE, CPU, 1.0)


def test_random_states_and_training_are_as_if_there_had_been_no_probe(tmp_path: Path) -> None:
    loaded = small(tmp_path, "def optimizer(self, parameters):\n    return torch.optim.SGD(parameters, lr=0.05)")
    model = loaded.build_model(0)
    schema, base = schema_of(model, BLOCK), read_state(model, schema_of(model, BLOCK))
    work = LocalWork(1, 4, 1, 5, 0)
    expected = Trainer(loaded, schema, WHOLE, "cpu", 0).local_round(work, base).delta.vector.tobytes()
    trainer = Trainer(loaded, schema, WHOLE, "cpu", 0)
    states = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()  # type: ignore[union-attr]
    measure(loaded, WHOLE, CPU, 10.0, Clock(0.125))
    after = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()  # type: ignore[union-attr]
    assert after == states
    assert trainer.local_round(work, base).delta.vector.tobytes() == expected


def test_a_step_that_is_refused_holds_nothing_while_the_climb_goes_on() -> None:
    class Refusing:
        def __init__(self) -> None:
            self.held: weakref.ref[torch.Tensor] | None = None

        def step(self, micro_batch: int) -> int:
            batch = torch.zeros(micro_batch)
            self.held = weakref.ref(batch)
            raise torch.OutOfMemoryError("CUDA out of memory")

    steps = Refusing()
    assert climb(steps, 1.0, Clock(0.1)).speeds == ()
    assert steps.held is not None and steps.held() is None


def test_the_capability_gives_a_reason_for_every_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    hint = "Tesla T4 is not used: this torch has no CUDA; install the build for CUDA from pytorch.org"
    monkeypatch.setattr(probe, "overlooked_gpus", lambda device: hint)
    climbed = Climbed((Speed(1, 5.0), Speed(2, 9.0)), 2, "fastest", "4 at once does not fit into memory; 2 does", 2)
    found = capability_of(climbed, CPU)
    assert (found.device, found.micro_batch, found.max_micro_batch) == ("cpu", 2, 2)
    assert found.reasons["device"] == hint
    assert found.reasons["max_micro_batch"] == climbed.ended
    assert found.bandwidth_up is None and "bandwidth_up" in found.reasons
    assert found.devices and found.cores


KEY = Key("11" * 32, "this machine", "cpu", "0/1")
KNOWN = Climbed((Speed(1, 5.0), Speed(2, 9.0)), 2, "fastest", "flat", 2)


def test_a_probe_is_remembered_for_its_recipe_machine_device_and_data(tmp_path: Path) -> None:
    RememberedProbes(tmp_path / "new").keep(KEY, KNOWN)
    memory = RememberedProbes(tmp_path / "new")
    assert memory.find(KEY) == KNOWN
    others = [("recipe", "22" * 32), ("machine", "that one"), ("device", "cuda"), ("part", "0/2")]
    for field, value in others:
        parts = {name: getattr(KEY, name) for name in Key.__struct_fields__}
        assert memory.find(Key(**{**parts, field: value})) is None
    again = Climbed((Speed(1, 6.0),), 1, "fastest", "flat")
    memory.keep(KEY, again)
    assert memory.find(KEY) == again


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[" * 100000, b"null", b"\xff", b'{"format":2,"entries":[]}', b"9" * 2**21]
)
def test_a_damaged_memory_is_ignored_and_written_anew(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(damage)
    memory = RememberedProbes(tmp_path)
    assert memory.find(KEY) is None
    memory.keep(KEY, KNOWN)
    assert memory.find(KEY) == KNOWN


def test_a_memory_with_an_impossible_speed_is_ignored(tmp_path: Path) -> None:
    memory = RememberedProbes(tmp_path)
    memory.keep(KEY, KNOWN)
    file = tmp_path / FILE_NAME
    file.write_text(file.read_text().replace("9.0", "-9.0"))
    assert memory.find(KEY) is None


def test_the_memory_does_not_grow_without_bound_and_keeps_no_failure(tmp_path: Path) -> None:
    memory = RememberedProbes(tmp_path)
    keys = [Key(f"{number:064x}", "this machine", "cpu", "0/1") for number in range(MAX_ENTRIES + 2)]
    for key in keys:
        memory.keep(key, KNOWN)
    assert [memory.find(key) is not None for key in keys] == [False, False] + [True] * MAX_ENTRIES
    memory.keep(KEY, Climbed((), 1, "nothing could be measured", "no memory"))
    assert memory.find(KEY) is None
