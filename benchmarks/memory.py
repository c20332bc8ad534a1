"""A client's peak memory beside the same training in a plain loop, for a model of 25 million parameters.

python -m benchmarks.memory [--json] [--rounds N] [--codec NAME]

What counts is memory that only this process can hold (RssAnon), sampled every 10 ms. The client keeps the round's base in
it, one float32 vector, and slices. Outer state is mapped from disk, residuals lie there. `extra_vectors` is what the
client takes beyond the plain loop, as a multiple of the parameters' bytes. Beside it stand what a client holds that has not
trained yet, and the peak of the broker.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ravnest_fed.cluster import Cluster, free_addresses
from ravnest_fed.founding import found
from ravnest_fed.recipe import load_recipe

RECIPE = '''
"""Three wide layers on random points: 25 million parameters, and little else."""

import torch
from torch import nn

import ravnest_fed as rf


class Wide(rf.Recipe):
    micro_batch = 8
    local_steps = 4

    def model(self):
        return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024))

    def train_data(self, part):
        points = torch.randn(64, 1024, generator=torch.Generator().manual_seed(part.index))
        return points, points.flip(1)

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.001, momentum=0.9)
'''
PLAIN = """
import sys
import torch
from pathlib import Path
from ravnest_fed.partition import Partition
from ravnest_fed.recipe import load_recipe

torch.set_num_threads(1)
loaded = load_recipe(Path(sys.argv[1]))
model = loaded.build_model(0)
points, goals = loaded.recipe.train_data(Partition(0, 1, 0))
optimizer = loaded.recipe.optimizer(list(model.parameters()))
for step in range(12):
    optimizer.zero_grad()
    loaded.recipe.loss(model, (points[:8], goals[:8])).backward()
    optimizer.step()
"""
PARAMETERS = 1024 * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 1024 + 1024
MOST_EXTRA = 1.5
"""One vector is the base; the half is for libraries, sockets and slices."""


def anonymous(pid: int) -> int:
    """Bytes of a process that no file stands behind; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    except (OSError, StopIteration):
        return 0


class Peak:
    """Samples a process on another thread until `stop`."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(0.01):
            self.bytes = max(self.bytes, anonymous(self._pid))

    def stop(self) -> int:
        """The peak."""
        self._ended.set()
        self._thread.join()
        return self.bytes


def plain(recipe: Path) -> int:
    """The peak of a plain loop."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", PLAIN, str(recipe)], env=environment)
    peak = Peak(process.pid)
    if process.wait():
        raise SystemExit("the plain loop failed")
    return peak.stop()


def federated(recipe: Path, folder: Path, rounds: int, codec: str) -> dict[str, int]:
    """The peaks of a client and of its broker, and what the client holds before its first round."""
    settings = {"stop.rounds": str(rounds), "codecs.up": codec, "strategy.name": "fedavgm", "strategy.momentum": "0.5"}
    founded = found(load_recipe(recipe), free_addresses(1), 1, settings, None, folder / "federation")
    with Cluster(founded, recipe) as cluster:
        broker = Peak(cluster.start_broker("b1").process.pid)
        node = cluster.start_client("c1")
        client, rest = Peak(node.process.pid), 0
        deadline = time.monotonic() + 300
        while node.alive and time.monotonic() < deadline:
            time.sleep(0.05)
            if not rest and node.log.exists() and "training  round=1" in node.log.read_text():
                rest = anonymous(node.process.pid)
        if node.alive or node.process.returncode:
            raise SystemExit(f"the client did not end well: {node.last_words()}")
        return {"client": client.stop(), "broker": broker.stop(), "rest": rest}


def main() -> None:
    """Measure and print; exit status 1 where the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codec", default="int8", help="codecs.up")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.py"
        recipe.write_text(RECIPE)
        loop = plain(recipe)
        found_peaks = federated(recipe, Path(folder), options.rounds, options.codec)
    size = 4 * PARAMETERS
    extra = (found_peaks["client"] - loop) / size
    result: dict[str, Any] = {
        "plain_mb": round(loop / 1e6, 1),
        "client_mb": round(found_peaks["client"] / 1e6, 1),
        "client_before_training_mb": round(found_peaks["rest"] / 1e6, 1),
        "broker_mb": round(found_peaks["broker"] / 1e6, 1),
        "parameters_mb": round(size / 1e6, 1),
        "extra_vectors": round(extra, 3),
        "target_met": extra <= MOST_EXTRA,
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(f"plain loop {result['plain_mb']} MB, client {result['client_mb']} MB (before training ", end="")
        print(
            f"{result['client_before_training_mb']} MB), broker {result['broker_mb']} MB; the parameters are ", end=""
        )
        print(f"{result['parameters_mb']} MB, so the client takes {extra:.2f} vectors more (target {MOST_EXTRA})")
    sys.exit(0 if result["target_met"] else 1)


if __name__ == "__main__":
    main()
