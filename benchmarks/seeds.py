"""The demo on several seeds: accuracy reached on the digits, and whether all replicas end alike.

python -m benchmarks.seeds [--json] [--seeds N] [--rounds N]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TARGET = 0.95


def run(seed: int, rounds: int) -> dict[str, Any]:
    """One demo run: its final metrics and the model hashes of brokers and clients."""
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "summary.json"
        command = [sys.executable, "-m", "ravnest_fed.commands.main", "demo", "--summary", str(summary)]
        subprocess.run([*command, "--seed", str(seed), "--rounds", str(rounds)], check=True, stdout=subprocess.DEVNULL)
        found = json.loads(summary.read_text())
    hashes = {one["model_hash"] for group in ("brokers", "clients") for one in found[group].values()}
    seconds = [entry["seconds"] for entry in found["rounds"][1:]]
    return {
        "seed": seed,
        "accuracy": found["final"]["metrics"]["accuracy"],
        "loss": found["final"]["metrics"]["loss"],
        "first_round_at_target": next(
            (one["server_round"] for one in found["rounds"] if one["metrics"].get("accuracy", 0.0) >= TARGET), None
        ),
        "model_hashes": len(hashes),
        "median_round_s": round(sorted(seconds)[len(seconds) // 2], 3),
    }


def main() -> None:
    """Run and print; exit status 1 where a seed misses the target or replicas differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    results = [run(seed, options.rounds) for seed in range(options.seeds)]
    met = all(one["accuracy"] >= TARGET and one["model_hashes"] == 1 for one in results)
    if options.json:
        print(json.dumps({"runs": results, "target_met": met}))
    else:
        for one in results:
            print(
                "  ".join(f"{name} {round(value, 4) if value is not None else 'never'}" for name, value in one.items())
            )
        print(f"every seed at {TARGET} and all replicas alike: {met}")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
