"""What goes wrong, and when: drawn from the seed before the run begins."""

import random
from dataclasses import dataclass
from typing import Literal

from tests.simulation.world import Weather

FAULTY_SECONDS = 14.0
Kind = Literal["crash", "vanish", "partition", "one-way", "jump", "lose-disk", "slow-disk", "flip", "crash-at-commit"]


@dataclass(frozen=True)
class Fault:
    """One fault: at a time, of a kind, to a node (or between two), for so many seconds."""

    at: float
    kind: Kind
    node: str
    other: str
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Everything that goes wrong in a run."""

    weather: Weather
    faults: tuple[Fault, ...]
    cheaters: frozenset[str]


def draw(random: random.Random, brokers: list[str], clients: list[str]) -> Plan:
    """The faults of one run."""
    weather = Weather(
        drop=random.choice([0.0, 0.0, 0.02, 0.1]),
        duplicate=random.choice([0.0, 0.05, 0.2]),
        delay=random.choice([0.005, 0.05, 0.2]),
        jitter=random.choice([0.01, 0.1, 0.5]),
        straggle=random.choice([0.0, 0.0, 0.05]),
        drop_votes=random.choice([0.0, 0.0, 0.0, 0.6]),
    )
    faults: list[Fault] = []
    kinds: list[Kind] = [
        "crash",
        "crash",
        "vanish",
        "partition",
        "one-way",
        "jump",
        "slow-disk",
        "flip",
        "crash-at-commit",
    ]
    for _ in range(random.randint(0, 8)):
        kind = random.choice(kinds)
        node = random.choice(clients if kind == "vanish" else brokers)
        other = random.choice(brokers)
        faults.append(Fault(random.uniform(0.5, FAULTY_SECONDS), kind, node, other, random.uniform(0.2, 8.0)))
    minority = (len(brokers) - 1) // 2
    if minority and random.random() < 0.15:
        node = random.choice(brokers)
        faults.append(Fault(random.uniform(1.0, FAULTY_SECONDS), "lose-disk", node, node, 0.0))
    cheaters = frozenset(random.sample(clients, 1)) if random.random() < 0.2 and len(clients) > 2 else frozenset()
    return Plan(weather, tuple(sorted(faults, key=lambda one: one.at)), cheaters)
