"""Asynchronous beside synchronous rounds, with one client of four that is ten times slower: time to the same loss.

python -m benchmarks.straggler [--json] [--goal LOSS] [--seeds N]

Processes on loopback train the example's digits; speeds are emulated by sleeps, as in `benchmarks.sizing`. Every client has
the same work. Synchronous rounds wait for everybody. Asynchronous ones commit every three contributions, whoever they
are by; the straggler's come about seven commits late and count with less weight. `speedup` is the ratio of the seconds from
the first commit's round on to the goal; `worst_after_goal` is the worst loss of a later model over the goal, so that a run
which diverges afterwards is seen.
"""

import argparse
import json
import statistics
import sys
from typing import Any

from benchmarks.paced import DIGITS, paced

PACE, SLOWER = 0.002, 10
CLIENTS = 4
GOAL, LEAST_SPEEDUP, MOST_AFTER = 0.3, 2.0, 1.5
SECONDS = 150.0
AFTER_COMMITS = {"synchronous": 3, "asynchronous": 30}
MODES: dict[str, dict[str, str]] = {
    "synchronous": {"rounds.grace_seconds": "60", "rounds.target_contributions": str(CLIENTS)},
    "asynchronous": {
        "rounds.mode": "asynchronous",
        "rounds.target_contributions": "3",
        "rounds.max_staleness": "12",
        "strategy.learning_rate": "0.5",
    },
}


def run(mode: str, goal: float, seed: int) -> dict[str, Any]:
    """Train until some commits past the goal."""
    paces = [PACE] * (CLIENTS - 1) + [PACE * SLOWER]
    settings = {"rounds.local_steps": "10", "rounds.micro_batch": "32", "federation.seed": str(seed), **MODES[mode]}

    def reached() -> int | None:
        return next((number for number, loss in sorted(watched.losses.items()) if loss <= goal), None)

    def enough() -> bool:
        first = reached()
        return first is not None and max(watched.losses) >= first + AFTER_COMMITS[mode]

    with paced(paces, settings, text=DIGITS) as (watched, _):
        watched.until(lambda: bool(watched.rounds.get(1)), 60)
        began = min(one.ordered for one in watched.rounds[1].values() if one.ordered is not None)
        watched.until(enough, SECONDS)
        first = reached()
        assert first is not None
        late = watched.losses_after(first)
        return {
            "seconds_to_goal": round(watched.committed[first] - began, 2),
            "commits_to_goal": first,
            "worst_after_goal": round(max(late) / goal, 3),
            "last_loss": round(late[-1], 4),
        }


def main() -> None:
    """Run and print; exit status 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--goal", type=float, default=GOAL)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        both = {mode: run(mode, options.goal, seed) for mode in MODES}
        speedup = both["synchronous"]["seconds_to_goal"] / both["asynchronous"]["seconds_to_goal"]
        runs.append({"seed": seed, **both, "speedup": round(speedup, 2)})
        if not options.json:
            print(runs[-1], flush=True)
    speedups = [one["speedup"] for one in runs]
    worst = max(one["asynchronous"]["worst_after_goal"] for one in runs)
    met = statistics.median(speedups) >= LEAST_SPEEDUP and worst <= MOST_AFTER
    result = {
        "speedup": statistics.median(speedups),
        "speedups": speedups,
        "worst_after_goal": worst,
        "target_met": met,
    }
    if options.json:
        print(json.dumps({**result, "runs": runs}))
    else:
        print(
            f"asynchronous rounds reach the loss {options.goal} {result['speedup']} times sooner in the median ", end=""
        )
        print(f"(target {LEAST_SPEEDUP}); afterwards the loss is at most {worst} times the goal")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
