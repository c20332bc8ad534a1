"""Run ranges of seeds, or replay one as a readable trace.

python -m tests.simulation --seeds 0:2000
python -m tests.simulation --replay 17
"""

import argparse
import sys
import time

from tests.simulation.running import Run
from tests.simulation.signing import simulated_signatures


def main() -> None:
    """Exit status 1, and the failing seed as the last line, where a run breaks a guarantee."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:200", metavar="FROM:TO")
    parser.add_argument("--replay", type=int, metavar="SEED")
    options = parser.parse_args()
    with simulated_signatures():
        if options.replay is not None:
            outcome = Run(options.replay, traced=True).go()
            print("\n".join(outcome.trace))
            print(outcome.finding or f"sound: {outcome.rounds} rounds")
            sys.exit(1 if outcome.finding else 0)
        first, _, last = options.seeds.partition(":")
        began, rounds, failed = time.perf_counter(), 0, []
        for seed in range(int(first), int(last)):
            outcome = Run(seed).go()
            rounds += outcome.rounds
            if outcome.finding:
                failed.append(seed)
                print(f"seed {seed}: {outcome.finding}", flush=True)
        count = int(last) - int(first)
        print(f"{count} runs, {rounds} rounds committed, {len(failed)} failed, {time.perf_counter() - began:.1f} s")
        if failed:
            print(failed[0])
            sys.exit(1)


if __name__ == "__main__":
    main()
