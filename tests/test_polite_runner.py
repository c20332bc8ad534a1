"""How the client's shell keeps its manners: rounds cut short, nothing measured in a pause, uploads within the limit."""

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from brokers.planner import work_order
from clients import events as ev
from clients import runner as shell
from clients.politeness import Manners, When
from clients.runner import ClientRunner
from clients.trainer import Trainer
from ravnest_fed.facts import BlobRef, WorkOrder, encode
from ravnest_fed.founding import Founded
from ravnest_fed.hashing import CHUNK_SIZE
from ravnest_fed.links import parse_link
from ravnest_fed.messages import Chunk, Want, decode_to_client
from ravnest_fed.model_files import read_model
from ravnest_fed.partition import Partition
from ravnest_fed.recipe import load_recipe
from ravnest_fed.replica import Replica
from tests.tiny_federation import found_tiny, write_recipe

HOT = "the machine is 3 degrees from its limit"


class FakeLoop:
    """Keeps what is to be called later; time is the test's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.soon: list[tuple[Any, ...]] = []

    def call_later(self, wait: float, act: Callable[..., None], *arguments: object) -> Any:
        entry = (self.now + wait, lambda: act(*arguments))
        self.later.append(entry)
        return SimpleNamespace(cancel=lambda: self.later.remove(entry) if entry in self.later else None)

    def call_soon_threadsafe(self, *call: Any) -> None:
        self.soon.append(call)

    def run(self) -> None:
        """Let time pass until nothing is left."""
        while self.later:
            entry = min(self.later, key=lambda one: one[0])
            self.later.remove(entry)
            self.now = max(self.now, entry[0])
            entry[1]()


@pytest.fixture
def founded(tmp_path: Path) -> Founded:
    return found_tiny(tmp_path, brokers=1, clients=1)


def runner_of(founded: Founded, manners: Manners) -> tuple[ClientRunner, FakeLoop]:
    """A client's shell whose loop is a fake, with the federation's first model in its hands."""
    link = parse_link(founded.link_files[0].read_text())
    loaded = load_recipe(write_recipe(founded.folder.parent))
    runner = ClientRunner(link, loaded, lambda told: None, founded.folder / "state", "cpu", manners=manners)
    loop = FakeLoop()
    runner._loop = loop  # type: ignore[assignment]
    federation = founded.federation
    model = next(founded.folder.rglob("*.safetensors"))
    runner.replica = Replica(federation, read_model(model, federation.schema))
    runner._trainer = Trainer(loaded, federation.schema, Partition(0, 1, 0), "cpu", 0, model)
    return runner, loop


class Watching:
    """A watch whose verdicts, one a question, are the test's."""

    def __init__(self, verdicts: Iterator[str]) -> None:
        self._verdicts = verdicts

    @property
    def because(self) -> str:
        return next(self._verdicts, HOT)


def order_of(founded: Founded, runner: ClientRunner) -> WorkOrder:
    assert runner.replica is not None
    return work_order(founded.federation, runner.replica.head, founded.federation.members[0].node_id)


def test_a_round_is_cut_short_at_the_step_at_which_the_machine_is_needed(founded: Founded) -> None:
    runner, _ = runner_of(founded, Manners(When("idle")))
    order = order_of(founded, runner)
    assert order.local_steps == 2
    runner._watch = Watching(iter([""]))  # type: ignore[assignment]
    trained = runner._train(order, (), threading.Event())
    assert isinstance(trained, ev.Trained)
    assert (trained.local_steps, trained.num_examples) == (1, 8)


def test_a_round_that_is_not_begun_is_yielded(founded: Founded) -> None:
    runner, _ = runner_of(founded, Manners(When("idle")))
    runner._watch = Watching(iter([]))  # type: ignore[assignment]
    assert runner._train(order_of(founded, runner), (), threading.Event()) == ev.Yielded(0)


def test_nothing_is_measured_in_a_pause(founded: Founded) -> None:
    runner, _ = runner_of(founded, Manners(When("idle")))
    measured = runner._evaluate(0)
    assert isinstance(measured, ev.Evaluated) and "size" in measured.metrics
    runner._watch.because = HOT
    assert runner._evaluate(0) == ev.Evaluated(0, {}, 0)


def test_a_share_of_the_processor_rests_between_steps_until_the_round_is_abandoned(
    founded: Founded, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = runner_of(founded, Manners(max_cpu=0.5))
    monkeypatch.setattr(shell.psutil, "cpu_count", lambda: 1)
    monkeypatch.setattr(shell.torch, "get_num_threads", lambda: 1)
    asked: list[tuple[float, Any]] = []
    boundary = shell.StepBoundary

    def made(factor: float, because: Callable[[], str], rest: Callable[[float], object]) -> Any:
        asked.append((factor, rest))
        return boundary(factor, because, rest)

    monkeypatch.setattr(shell, "StepBoundary", made)
    abandoned = threading.Event()
    trained = runner._train(order_of(founded, runner), (), abandoned)
    assert isinstance(trained, ev.Trained) and trained.local_steps == 2
    assert asked == [(1.0, abandoned.wait)]


def test_the_session_hears_of_a_need_on_the_loop(founded: Founded) -> None:
    runner, loop = runner_of(founded, Manners(When("idle")))
    runner._watch.take(HOT)
    assert loop.soon == [(runner._handle, ev.Needed(HOT))]


@pytest.mark.parametrize("limit", [None, CHUNK_SIZE])
def test_chunks_leave_within_the_upload_limit(
    founded: Founded, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, loop = runner_of(founded, Manners(upload_limit=limit))
    monkeypatch.setattr(shell.time, "monotonic", lambda: loop.now)
    sent: list[tuple[float, int, int]] = []

    class Line:
        def send(self, raw: bytes) -> None:
            chunk = decode_to_client(raw)
            assert isinstance(chunk, Chunk)
            sent.append((loop.now, chunk.index, len(raw)))

    runner._lines["b1"] = Line()  # type: ignore[assignment]
    ref: BlobRef = runner._outbox.put(bytes(3 * CHUNK_SIZE))
    runner._received("b1", encode(Want(ref.hash, (2, 0, 1))))
    assert [index for _, index, _ in sent] == ([2] if limit else [2, 0, 1])
    loop.run()
    assert [index for _, index, _ in sent] == [2, 0, 1]
    if limit:
        for (at, _, size), (following, _, _) in pairwise(sent):
            assert following - at == pytest.approx(size / limit)


def test_the_probe_waits_for_a_machine_that_is_not_needed_and_keeps_to_the_gpu_memory(
    founded: Founded, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = runner_of(founded, Manners(When("idle"), max_gpu_memory=5))
    done: list[object] = []
    monkeypatch.setattr(shell.time, "sleep", done.append)
    monkeypatch.setattr(shell, "probe_apart", lambda *_, **named: done.append(named["max_gpu_memory"]))
    runner._watch = Watching(iter([HOT, HOT, ""]))  # type: ignore[assignment]
    runner._measure(Partition(0, 1, 0))
    assert done == [shell.YIELD_LOOK_SECONDS, shell.YIELD_LOOK_SECONDS, 5]
