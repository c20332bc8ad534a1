"""What it costs the model when three in ten clients drop out of each round at random: digits and char_lm.

python -m benchmarks.dropout [--json] [--recipe digits|char_lm] [--seeds N] [--clients N] [--rounds N] [--steps N]

Brokers and trainers run in this process, joined in memory instead of by sockets, so a run costs its training alone; deltas
are encoded, admitted, reduced and folded as over the network. Each run is compared with the undisturbed one of the same
seed and number of rounds. Run it from the project's folder: it uses the joined brokers of the tests.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ravnest_fed.model_state import read_state, schema_of
from ravnest_fed.parameters import BLOCK
from ravnest_fed.recipe import LoadedRecipe, load_recipe
from tests.trained import Trained

EXAMPLES = Path(__file__).parent.parent / "examples"
SHARE = 0.3
DEFAULTS = {"digits": (5, 10, 20), "char_lm": (1, 6, 8)}
"""Seeds, clients and rounds of each recipe."""
LEAST_ACCURACY, MOST_LOSS = 0.99, 1.02
"""As parts of the undisturbed run's: accuracy where the recipe measures it, else the loss."""


def taking_part(seed: int, server_round: int, clients: list[str]) -> list[str]:
    """Who takes part in a round: each client drops out with probability `SHARE`, but one is always there."""
    draw = random.Random(f"dropout {seed} {server_round}")
    chosen = [name for name in clients if draw.random() >= SHARE]
    return chosen or [draw.choice(clients)]


def train(loaded: LoadedRecipe, seed: int, clients: int, rounds: int, dropping: bool) -> tuple[dict[str, float], int]:
    """The metrics of the last model, and how many contributions were counted in all."""
    model = loaded.build_model(seed)
    loaded.warm_start(model)
    trained = Trained(loaded, clients, brokers=3, model=read_state(model, schema_of(model, 16 * BLOCK)), seed=seed)
    names = list(trained.trainers)
    counted = 0
    for server_round in range(1, rounds + 1):
        chosen = taking_part(seed, server_round, names) if dropping else names
        trained.round(chosen)
        counted += len(trained.head.last_clients)
    assert len(trained.joined.model_hashes()) == 1
    measured = trained.trainers[names[0]].evaluate(trained.state)
    assert measured is not None
    return measured[0], counted


def compare(loaded: LoadedRecipe, seed: int, clients: int, rounds: int) -> dict[str, Any]:
    """An undisturbed run beside one with dropout."""
    began = time.perf_counter()
    calm, full = train(loaded, seed, clients, rounds, False)
    dropped, counted = train(loaded, seed, clients, rounds, True)
    name = "accuracy" if "accuracy" in calm else "loss"
    ratio = dropped[name] / calm[name]
    return {
        "seed": seed,
        "contributions": f"{counted} of {full}",
        "metric": name,
        "undisturbed": round(calm[name], 4),
        "with_dropout": round(dropped[name], 4),
        "ratio": round(ratio, 4),
        "target_met": ratio >= LEAST_ACCURACY if name == "accuracy" else ratio <= MOST_LOSS,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    """Run and print; exit status 1 where a run misses the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--recipe", choices=sorted(DEFAULTS), help="this recipe alone")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="local steps, if not the recipe's own number")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, Any]]] = {}
    for name in [options.recipe] if options.recipe else ["digits", "char_lm"]:
        loaded = load_recipe(EXAMPLES / name)
        if options.steps:
            loaded.recipe.local_steps = options.steps
        seeds, clients, rounds = DEFAULTS[name]
        clients, rounds = options.clients or clients, options.rounds or rounds
        for seed in range(options.seeds or seeds):
            one = compare(loaded, seed, clients, rounds)
            results.setdefault(name, []).append(one)
            if not options.json:
                print(
                    f"{name}, {clients} clients, {rounds} rounds:",
                    "  ".join(f"{key} {value}" for key, value in one.items()),
                    flush=True,
                )
    met = all(one["target_met"] for found in results.values() for one in found)
    if options.json:
        print(json.dumps({"runs": results, "target_met": met}))
    else:
        for name, found in results.items():
            print(f"{name}: ratio {statistics.median(one['ratio'] for one in found)} in the median, ", end="")
            print(f"target met in {sum(one['target_met'] for one in found)} of {len(found)}")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
