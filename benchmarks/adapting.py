"""One of three clients becomes five times slower mid-run, then as fast as before: how soon its orders follow.

python -m benchmarks.adapting [--json] [--target SECONDS] [--grace SECONDS]

Processes on loopback, speeds emulated by sleeps, as in `benchmarks.sizing`. A round that the slowed client cannot finish
closes without it once the grace is over. `rounds_to_adapt_down` and `rounds_to_adapt_up` count the rounds from a change to the
first one that the client finishes within 15 % of the target; `longest_wait` is the longest that a round stayed open after its
smallest number of contributions had come, over the grace.
"""

import argparse
import json
import sys
from typing import Any

from benchmarks.paced import MICRO_BATCH, PACE, Watched, paced

FACTORS = (1, 2, 4)
MINIMUM = 2
SLOWED, SLOWER = 1, 5.0
WITHIN, MOST_ROUNDS = 0.15, 3
STEADY, SLOW, AGAIN = 4, 5, 5
SLACK_SECONDS = 0.5
"""What agreeing on the commit may take on top of the grace."""


def adapted(watched: Watched, first: int, last: int, target: float) -> int | None:
    """After how many rounds, counted from `first`, the slowed client finishes within the target."""
    name = f"c{SLOWED + 1}"
    for number in range(first, last + 1):
        seen = watched.rounds.get(number, {}).get(name)
        if seen is not None and seen.seconds is not None and abs(seen.seconds / target - 1.0) <= WITHIN:
            return number - first + 1
    return None


def run(target: float, grace: float) -> dict[str, Any]:
    """The whole run: steady, slowed, steady again."""
    paces = [PACE * factor for factor in FACTORS]
    rounds = STEADY + SLOW + AGAIN
    settings = {
        "rounds.micro_batch": str(MICRO_BATCH),
        "rounds.target_seconds": str(target),
        "rounds.local_steps": str(round(target / PACE / MICRO_BATCH / max(FACTORS))),
        "rounds.grace_seconds": str(grace),
        "rounds.min_contributions": str(MINIMUM),
        "stop.rounds": str(rounds),
    }
    with paced(paces, settings) as (watched, file):
        watched.until(lambda: STEADY in watched.committed, 60 + 4 * STEADY * target)
        file.set(SLOWED, paces[SLOWED] * SLOWER)
        watched.until(lambda: STEADY + SLOW in watched.committed, 60 + 4 * SLOW * target)
        file.set(SLOWED, paces[SLOWED])
        watched.until(lambda: rounds in watched.committed, 60 + 4 * AGAIN * target)
    waits = []
    for number in range(2, rounds + 1):
        taken = sorted(one.taken for one in watched.rounds[number].values() if one.taken is not None)
        waits.append(watched.committed[number] - taken[MINIMUM - 1])
    name = f"c{SLOWED + 1}"
    return {
        "rounds_to_adapt_down": adapted(watched, STEADY + 1, STEADY + SLOW, target),
        "rounds_to_adapt_up": adapted(watched, STEADY + SLOW + 1, rounds, target),
        "longest_wait": round(max(waits) / grace, 3),
        "longest_wait_seconds": round(max(waits), 2),
        "steps": [watched.rounds[number][name].local_steps for number in range(1, rounds + 1)],
        "round_seconds": [round(watched.round_seconds(number), 2) for number in range(2, rounds + 1)],
    }


def main() -> None:
    """Run and print; exit status 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--target", type=float, default=6.0, help="seconds a round should take")
    parser.add_argument("--grace", type=float, default=3.0, help="seconds that a round waits for the rest")
    options = parser.parse_args()
    figures = run(options.target, options.grace)
    down, up = figures["rounds_to_adapt_down"], figures["rounds_to_adapt_up"]
    met = (
        down is not None
        and up is not None
        and max(down, up) <= MOST_ROUNDS
        and figures["longest_wait_seconds"] <= options.grace + SLACK_SECONDS
    )
    if options.json:
        print(json.dumps({**figures, "target_met": met}))
    else:
        print(f"adapts down within {down} and up within {up} rounds (target {MOST_ROUNDS}); ", end="")
        print(f"a round waits {figures['longest_wait_seconds']} s at most, the grace is {options.grace} s")
        print(
            f"steps of the slowed client, round by round: {figures['steps']}; rounds took {figures['round_seconds']} s"
        )
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
