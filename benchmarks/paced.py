"""A federation of real processes whose clients' speeds are emulated by sleeps, so that two cores do not limit them.

Each client's seconds a sample stand in a file that it reads anew for every micro-batch; so a speed can change mid-run.
"""

import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ravnest_fed.cluster import Cluster, Node, free_addresses
from ravnest_fed.founding import found
from ravnest_fed.recipe import load_recipe

PACES = "RAVNEST_BENCHMARK_PACES"
"""Names the file of seconds a sample, by client."""
PACE, MICRO_BATCH = 0.002, 16
"""Seconds a sample of the fastest client, and samples a step: long against what a step costs these machines in truth."""
RECIPE = '''
"""A line through a few points; each example takes as long to train as a file says."""

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import ravnest_fed as rf


class Paced(rf.Recipe):
    micro_batch = 16

    def model(self):
        return nn.Linear(8, 1)

    def train_data(self, part):
        self.index = part.index
        inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(part.index))
        return inputs, inputs.sum(1, keepdim=True)

    def loss(self, model, batch):
        inputs, goals = batch
        paces = json.loads(Path(os.environ["RAVNEST_BENCHMARK_PACES"]).read_text())
        time.sleep(paces[self.index] * len(inputs))
        return (model(inputs) - goals).square().mean()

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.01)
'''
DIGITS = '''
"""The example's digits; each image takes as long to train as a file says."""

import json
import os
import time
from pathlib import Path

from examples.digits.recipe import Digits


class PacedDigits(Digits):
    def train_data(self, part):
        self.index = part.index
        return super().train_data(part)

    def loss(self, model, batch):
        paces = json.loads(Path(os.environ["RAVNEST_BENCHMARK_PACES"]).read_text())
        time.sleep(paces[self.index] * len(batch[1]))
        return super().loss(model, batch)
'''
_LINE = re.compile(r"^(training|trained|contribution taken)  .*?round=(\d+)(?:.*?local_steps=(\d+))?")


@dataclass
class Seen:
    """What the benchmark saw of one client's round; times by its own clock, in seconds."""

    local_steps: int = 0
    ordered: float | None = None
    taken: float | None = None

    @property
    def seconds(self) -> float | None:
        """From the order to the receipt; None where one of them never came."""
        return None if self.ordered is None or self.taken is None else self.taken - self.ordered


@dataclass
class Watched:
    """Follows the clients' and a broker's output line by line. `rounds` holds what was seen, by round and client, `losses` what
    clients measured of a round's model."""

    cluster: Cluster
    rounds: dict[int, dict[str, Seen]] = field(default_factory=dict)
    committed: dict[int, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    _read: dict[str, int] = field(default_factory=dict)

    def look(self) -> None:
        """Take in what was printed since."""
        now = time.monotonic()
        for name, node in self.cluster.clients.items():
            for line in self._new_lines(name, node):
                if found := _LINE.match(line):
                    seen = self.rounds.setdefault(int(found[2]), {}).setdefault(name, Seen())
                    if found[1] == "training":
                        seen.local_steps, seen.ordered = int(found[3] or 0), now
                    elif found[1] == "contribution taken":
                        seen.taken = now
        for name, node in self.cluster.brokers.items():
            for line in self._new_lines(name, node):
                if "round committed" in line and (number := re.search(r"round=(\d+)", line)):
                    self.committed.setdefault(int(number[1]), now)
                    if loss := re.search(r"'loss': ([0-9.e+-]+)", line):
                        # A commit tells what was measured of the model before it.
                        self.losses.setdefault(int(number[1]) - 1, float(loss[1]))

    def until(self, done: Callable[[], bool], limit_seconds: float) -> None:
        """Look until `done`. Raises SystemExit once that takes too long, or a node has died."""
        deadline = time.monotonic() + limit_seconds
        while not done():
            self.look()
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"no end within {limit_seconds:.0f} s; the newest round is {max(self.committed, default=0)}"
                )
            self.cluster.check_brokers()
            time.sleep(0.01)

    def _new_lines(self, name: str, node: Node) -> list[str]:
        if not node.log.exists():
            return []
        with node.log.open("rb") as file:
            file.seek(self._read.get(name, 0))
            whole = file.read().rpartition(b"\n")[0]
        self._read[name] = self._read.get(name, 0) + (len(whole) + 1 if whole else 0)
        return whole.decode(errors="replace").splitlines()

    def losses_after(self, number: int) -> list[float]:
        """What was measured of the models from round `number` on."""
        return [loss for other, loss in sorted(self.losses.items()) if other >= number]

    def round_seconds(self, number: int) -> float:
        """How long a round took, from commit to commit."""
        return self.committed[number] - self.committed[number - 1]


class Paces:
    """The seconds a sample of each client, in the file that clients read."""

    def __init__(self, file: Path, paces: list[float]) -> None:
        self._file = file
        self.now = list(paces)
        self._write()

    def set(self, index: int, pace: float) -> None:
        """Change one client's."""
        self.now[index] = pace
        self._write()

    def _write(self) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(self.now))
        fresh.replace(self._file)


@contextmanager
def paced(
    paces: list[float], settings: Mapping[str, str], brokers: int = 1, text: str = RECIPE
) -> Iterator[tuple[Watched, Paces]]:
    """A running federation with one client a pace."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.py"
        recipe.write_text(text)
        file = Paces(Path(folder) / "paces.json", paces)
        os.environ[PACES] = str(Path(folder) / "paces.json")
        addresses = free_addresses(brokers)
        founded = found(load_recipe(recipe), addresses, len(paces), dict(settings), None, Path(folder) / "federation")
        with Cluster(founded, recipe) as cluster:
            cluster.start()
            yield Watched(cluster), file


def speed_alone(paces: list[float], index: int, micro_batch: int, seconds: float) -> float:
    """Samples a second of a client's machine in a plain training loop, without the framework."""
    import torch

    from ravnest_fed.partition import Partition

    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.py"
        recipe.write_text(RECIPE)
        Paces(Path(folder) / "paces.json", paces)
        os.environ[PACES] = str(Path(folder) / "paces.json")
        loaded = load_recipe(recipe)
        model = loaded.build_model(0)
        inputs, goals = loaded.recipe.train_data(Partition(index, len(paces), 0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        began, samples = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds:
            start = samples % (len(inputs) - micro_batch + 1)
            optimizer.zero_grad()
            loaded.recipe.loss(
                model, (inputs[start : start + micro_batch], goals[start : start + micro_batch])
            ).backward()
            optimizer.step()
            samples += micro_batch
    return samples / passed


def spread(values: list[float]) -> str:
    """Median, least and greatest, for people."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"
