"""Rounds sized to machines: four clients at 1, 2, 4 and 8 times the seconds a sample, beside equal work for all.

python -m benchmarks.sizing [--json] [--target SECONDS] [--rounds N]

Brokers and clients are processes on loopback; speeds are emulated by sleeps. The first rounds teach the broker the speeds;
figures are of the rounds from the fourth on. `share_of_summed_speed` is what the federation trains a second, over the sum
of what the clients train alone in a plain loop; `worst_deviation` is how far a client's time from order to receipt is
from the target at most, `samples_deviation` how far its part of the samples is from its part of the speed.
"""

import argparse
import json
import sys
from typing import Any

from benchmarks.paced import MICRO_BATCH, PACE, paced, speed_alone, spread

FACTORS = (1, 2, 4, 8)
FROM_ROUND = 4
LEAST_SHARE, MOST_DEVIATION, MOST_SAMPLES_DEVIATION = 0.9, 0.15, 0.1


def run(settings: dict[str, str], rounds: int, target: float, alone: dict[str, float]) -> dict[str, Any]:
    """A run's figures; `alone` holds each client's own samples a second."""
    paces = [PACE * factor for factor in FACTORS]
    settings = {"rounds.micro_batch": str(MICRO_BATCH), "stop.rounds": str(rounds), **settings}
    with paced(paces, settings) as (watched, _):
        watched.until(lambda: rounds in watched.committed, 60 + 8 * rounds * target)
    deviations, shares, off, seconds = [], [], [], []
    for number in range(FROM_ROUND, rounds + 1):
        seen = watched.rounds[number]
        samples = {name: one.local_steps * MICRO_BATCH for name, one in seen.items()}
        took = watched.round_seconds(number)
        seconds.append(took)
        shares.append(sum(samples.values()) / took / sum(alone.values()))
        for name, speed in alone.items():
            part = samples.get(name, 0) / max(1, sum(samples.values()))
            off.append(abs(part / (speed / sum(alone.values())) - 1.0))
            finished = seen[name].seconds if name in seen else None
            deviations.append(1.0 if finished is None else abs(finished / target - 1.0))
    last = watched.rounds[rounds]
    return {
        "share_of_summed_speed": round(sum(shares) / len(shares), 4),
        "worst_deviation": round(max(deviations), 4),
        "samples_deviation": round(max(off), 4),
        "local_steps": {name: last[name].local_steps for name in sorted(last)},
        "round_seconds": spread(seconds),
    }


def main() -> None:
    """Run both and print; exit status 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--target", type=float, default=10.0, help="seconds a round should take")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    paces = [PACE * factor for factor in FACTORS]
    alone = {f"c{index + 1}": speed_alone(paces, index, MICRO_BATCH, 3.0) for index in range(len(paces))}
    # With equal work the slowest machine fills the target.
    equal = max(1, round(options.target * min(alone.values()) / MICRO_BATCH))
    sized = {"rounds.target_seconds": str(options.target), "rounds.local_steps": str(equal)}
    figures = run(sized, options.rounds, options.target, alone)
    beside = run({"rounds.local_steps": str(equal)}, max(FROM_ROUND, options.rounds // 2), options.target, alone)
    met = (
        figures["share_of_summed_speed"] >= LEAST_SHARE
        and figures["worst_deviation"] <= MOST_DEVIATION
        and figures["samples_deviation"] <= MOST_SAMPLES_DEVIATION
    )
    result = {
        **figures,
        "samples_a_second_alone": {name: round(speed, 1) for name, speed in alone.items()},
        "equal_work": beside,
        "target_met": met,
    }
    if options.json:
        print(json.dumps(result))
    else:
        for name, found in (("sized", figures), ("equal work", beside)):
            print(
                f"{name}: {found['share_of_summed_speed']:.1%} of the summed speed (target {LEAST_SHARE:.0%}), ", end=""
            )
            print(
                f"finish {found['worst_deviation']:.1%} off the target at most (target {MOST_DEVIATION:.0%}), ", end=""
            )
            print(
                f"samples {found['samples_deviation']:.1%} off the speeds (target {MOST_SAMPLES_DEVIATION:.0%}); ",
                end="",
            )
            print(f"steps {found['local_steps']}, round {found['round_seconds']} s")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
