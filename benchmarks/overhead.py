"""A round's overhead in the demo: its time less the slowest client's training, and what a broker costs at rest.

python -m benchmarks.overhead [--json] [--rounds N] [--brokers N] [--clients N]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from ravnest_fed.cluster import Cluster, free_addresses
from ravnest_fed.founding import found
from ravnest_fed.recipe import load_recipe

EXAMPLE = Path(__file__).parent.parent / "examples" / "digits"
START_TARGET, IDLE_TARGET, OVERHEAD_TARGET = 1.5, 150.0, 0.2


def round_overhead(rounds: int, brokers: int, clients: int) -> dict[str, float]:
    """Seconds of overhead over the demo's rounds; the first is left out, since clients still start up in it."""
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "summary.json"
        command = [sys.executable, "-m", "ravnest_fed.commands.main", "demo", "--summary", str(summary)]
        command += ["--rounds", str(rounds), "--brokers", str(brokers), "--clients", str(clients)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        entries = json.loads(summary.read_text())["rounds"][1:]
    overhead = [entry["seconds"] - entry["training_seconds"] for entry in entries]
    return {
        "overhead_median_s": round(statistics.median(overhead), 4),
        "overhead_max_s": round(max(overhead), 4),
        "round_median_s": round(statistics.median(entry["seconds"] for entry in entries), 4),
        "training_median_s": round(statistics.median(entry["training_seconds"] for entry in entries), 4),
    }


def broker_at_rest(seconds: float) -> dict[str, float]:
    """How long a broker takes until it can be reached, and its memory and processor time while nobody trains."""
    with tempfile.TemporaryDirectory() as folder:
        founded = found(load_recipe(EXAMPLE), free_addresses(1), 1, {}, None, Path(folder) / "federation")
        with Cluster(founded, EXAMPLE) as cluster:
            began = time.perf_counter()
            node = cluster.start_broker("b1")
            while "broker runs" not in node.log.read_text() and node.alive:
                time.sleep(0.01)
            started = time.perf_counter() - began
            process = psutil.Process(node.process.pid)
            before = sum(process.cpu_times()[:2])
            time.sleep(seconds)
            used = sum(process.cpu_times()[:2]) - before
            return {
                "broker_start_s": round(started, 3),
                "broker_idle_mb": round(process.memory_info().rss / 2**20, 1),
                "broker_idle_cpu_share": round(used / seconds, 4),
            }


def main() -> None:
    """Measure and print; exit status 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--brokers", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    figures = broker_at_rest(5.0) | round_overhead(options.rounds, options.brokers, options.clients)
    met = (
        figures["overhead_median_s"] <= OVERHEAD_TARGET
        and figures["broker_start_s"] <= START_TARGET
        and figures["broker_idle_mb"] <= IDLE_TARGET
    )
    if options.json:
        print(json.dumps(figures | {"targets_met": met}))
    else:
        print(f"broker: starts in {figures['broker_start_s']} s (target {START_TARGET}), rests at ", end="")
        print(
            f"{figures['broker_idle_mb']} MB (target {IDLE_TARGET}) and {figures['broker_idle_cpu_share']:.2%} of a core"
        )
        print(f"round: {figures['round_median_s']} s, training {figures['training_median_s']} s, overhead ", end="")
        print(f"{figures['overhead_median_s']} s in the median (target {OVERHEAD_TARGET}), ", end="")
        print(f"{figures['overhead_max_s']} s at most")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
