"""Hundreds of rounds of a tiny recipe while brokers and clients die and come back: does anything grow?

python -m benchmarks.churn [--json] [--rounds N] [--seed N]

b1 and c1 are never killed; their memory, file descriptors and disk are sampled as rounds go by. A slope is that of the
least-squares line through the samples after the warm-up, the first quarter of the rounds. The log is consolidated every
`CHECKPOINT_EVERY` rounds, so a broker's disk is a saw; nothing should rise for long.
"""

import argparse
import asyncio
import io
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from ravnest_fed.chaos import Chaos, schedule
from ravnest_fed.cluster import Cluster, Node, free_addresses
from ravnest_fed.commands.following import follow
from ravnest_fed.commands.round_table import RoundView
from ravnest_fed.founding import found
from ravnest_fed.recipe import load_recipe
from ravnest_fed.verification import lost_rounds

RECIPE = """
import torch
import ravnest_fed as rf

class Tiny(rf.Recipe):
    micro_batch = 8
    local_steps = 2
    keep_optimizer = True
    def model(self):
        return torch.nn.Linear(64, 64)
    def train_data(self, part):
        inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(part.index))
        return inputs, inputs.flip(1)
    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    def evaluate(self, model):
        return {"size": float(sum(one.square().sum() for one in model.parameters()))}
"""
BROKERS, CLIENTS = 3, 4
OBSERVED = ("b1", "c1")
WARM_UP = 0.25
CHECKPOINT_EVERY = 10
MEMORY_TARGET, DESCRIPTOR_TARGET, DISK_TARGET = 3.0, 3.0, 1.0
"""Most that the line may rise over all sampled rounds and count as flat: MB of resident memory, descriptors, MB of disk."""
ENDING = 10
"""Rounds at the end that are not sampled: clients leave in them."""


@dataclass(frozen=True)
class Sample:
    """One node's use after a round: resident memory (MB), open file descriptors, threads, disk below its folder (MB)."""

    server_round: int
    memory_mb: float
    descriptors: float
    threads: float
    disk_mb: float


class Watch(RoundView):
    """Samples the observed nodes as rounds are shown, and prints nothing."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__("", Console(file=io.StringIO()))
        self.samples: dict[str, list[Sample]] = {name: [] for name in OBSERVED}
        self.notes: list[str] = []
        self._cluster = cluster

    def add(self, entry: dict[str, Any]) -> None:
        if entry["server_round"] > self._cluster.founded.federation.stop.rounds - ENDING:
            return
        state = self._cluster.founded.folder
        folders = {"b1": state / "brokers" / "b1", "c1": state / "state" / "c1"}
        for name, node in ((name, (self._cluster.brokers | self._cluster.clients)[name]) for name in OBSERVED):
            if node.alive:
                self.samples[name].append(_sample(entry["server_round"], node, folders[name]))

    def note(self, text: str) -> None:
        self.notes.append(text)


def _sample(server_round: int, node: Node, folder: Path) -> Sample:
    process = psutil.Process(node.process.pid)
    with process.oneshot():
        descriptors = process.num_fds() if os.name == "posix" else process.num_handles()
        memory, threads = process.memory_info().rss / 2**20, process.num_threads()
    sizes = 0
    for file in folder.rglob("*"):
        try:
            sizes += file.stat().st_size
        except FileNotFoundError:
            continue  # renamed or removed meanwhile
    return Sample(server_round, round(memory, 3), descriptors, threads, round(sizes / 2**20, 4))


def growth(samples: list[Sample], rounds: int) -> dict[str, dict[str, float]]:
    """By quantity: its value after the warm-up and at the end, and what the line rises between and over 100 rounds."""
    late = [one for one in samples if one.server_round > WARM_UP * rounds]
    at = np.array([one.server_round for one in late], np.float64)
    found_out = {}
    for name in ("memory_mb", "descriptors", "threads", "disk_mb"):
        values = np.array([getattr(one, name) for one in late], np.float64)
        slope = float(np.polyfit(at, values, 1)[0]) if len(set(at)) > 1 else float("nan")
        rise = slope * float(at[-1] - at[0])
        found_out[name] = {
            "first": values[0],
            "last": values[-1],
            "rise": round(rise, 3),
            "per_100_rounds": round(100 * slope, 3),
        }
    return found_out


def run(rounds: int, seed: int) -> dict[str, Any]:
    """A run to its end: the growth of each observed node, and how often which nodes were killed."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "tiny.py"
        recipe.write_text(RECIPE)
        settings = {
            "stop.rounds": str(rounds),
            "rounds.grace_seconds": "0.5",
            "checkpoint_every": str(CHECKPOINT_EVERY),
        }
        founded = found(
            load_recipe(recipe), free_addresses(BROKERS), CLIENTS, settings, None, Path(folder) / "federation"
        )
        brokers = [one.name for one in founded.federation.brokers]
        clients = [one.name for one in founded.federation.members]
        strikes = [one for one in schedule(seed, rounds, brokers, clients) if one.node not in OBSERVED]
        chaos = Chaos(strikes, set(brokers), set(clients))
        with Cluster(founded, recipe) as cluster, Watch(cluster) as watch:
            cluster.start()
            summary = asyncio.run(follow(cluster, watch, chaos))
        final = summary.json()
        lost = lost_rounds(founded.folder, summary.told())
    replicas = [one for group in ("brokers", "clients") for one in final[group].values()]
    killed: dict[str, int] = {}
    for kill in chaos.kills:
        killed[kill.strike.node] = killed.get(kill.strike.node, 0) + 1
    return {
        "rounds": final["final"]["server_round"],
        "kills": dict(sorted(killed.items())),
        "lost_rounds": lost,
        "died": sorted(summary.dead),
        "replicas_equal": {one["model_hash"] for one in replicas} == {final["final"]["model_hash"]},
        "growth": {name: growth(samples, rounds) for name, samples in watch.samples.items()},
        "samples": {
            name: [asdict(one) for one in samples[:: max(1, rounds // 50)]] for name, samples in watch.samples.items()
        },
    }


def main() -> None:
    """Run and print; exit status 1 where memory or descriptors grow, or the run did not end well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    options = parser.parse_args()
    if options.rounds < 20:
        parser.error("--rounds must be at least 20")
    one = run(options.rounds, options.seed)
    flat = all(
        found_out["memory_mb"]["rise"] <= MEMORY_TARGET
        and found_out["descriptors"]["rise"] <= DESCRIPTOR_TARGET
        and found_out["disk_mb"]["rise"] <= DISK_TARGET
        for found_out in one["growth"].values()
    )
    met = flat and one["rounds"] == options.rounds and one["replicas_equal"] and not one["lost_rounds"] + one["died"]
    if options.json:
        print(json.dumps(one | {"target_met": met}))
    else:
        kills = ", ".join(f"{name} {count} times" for name, count in one["kills"].items()) or "nobody"
        print(f"{one['rounds']} rounds; killed: {kills}; rounds lost: {one['lost_rounds'] or 'none'}; ", end="")
        print(f"replicas equal: {one['replicas_equal']}; died: {one['died'] or 'none'}")
        for name, quantities in one["growth"].items():
            for quantity, values in quantities.items():
                print(
                    f"{name} {quantity}: {values['first']:g} after the warm-up, {values['last']:g} at the end, "
                    f"the line rises by {values['rise']:g}, by {values['per_100_rounds']:g} over 100 rounds"
                )
        print(f"memory and descriptors flat: {flat}")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
