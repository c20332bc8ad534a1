"""Unlike data and unequal work: FedNova beside plain FedAvg on digits, clients making 1, 2, 4 and 8 times the steps.

python -m benchmarks.fairness [--json] [--seeds N] [--rounds N] [--alpha A]

Each client's classes are drawn from a Dirichlet distribution (alpha 0.1), so what a client alone has must not be drowned by
those that make more steps. Brokers and trainers run in this process, joined in memory, as in `benchmarks.dropout`; each seed
draws another split and another initial model, the same for both. Run it from the project's folder.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from clients.trainer import LocalResult, LocalWork
from ravnest_fed.facts import WorkOrder, decode
from ravnest_fed.model_state import write_state
from ravnest_fed.recipe import LoadedRecipe, Partition, load_recipe
from tests.trained import Trained

RECIPE = Path(__file__).parent.parent / "examples" / "digits"
STEPS = (5, 10, 20, 40)
GOAL = 0.9
WAYS: dict[str, dict[str, object]] = {
    "fednova": {"normalization": "fednova"},
    "fedavg": {"normalization": "none", "weighting": "examples"},
    "fedavg, equal weights": {"normalization": "none", "weighting": "equal"},
}


class Unequal(Trained):
    """Trained clients of which each makes its own number of steps."""

    def work(self, name: str) -> LocalResult:
        signed = self.joined.clients[name].order
        assert signed is not None
        order = decode(WorkOrder, signed.payload)
        steps = STEPS[list(self.trainers).index(name) % len(STEPS)]
        work = dataclasses.replace(LocalWork.ordered(order, 0.0), local_steps=steps)
        return self.trainers[name].local_round(work, self.state)


def skewed(alpha: float, rate: float) -> LoadedRecipe:
    """The digits with classes spread by a Dirichlet distribution of `alpha`, trained by plain SGD of this rate."""
    loaded = load_recipe(RECIPE)
    recipe: Any = loaded.recipe
    recipe.local_steps = max(STEPS)

    def train_data(part: Partition) -> tuple[torch.Tensor, torch.Tensor]:
        mine = recipe.train[part.dirichlet(recipe.labels[recipe.train], alpha=alpha)]
        return recipe.images[mine], torch.from_numpy(recipe.labels[mine])

    recipe.train_data = train_data
    recipe.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=rate)
    return loaded


def run(loaded: LoadedRecipe, seed: int, rounds: int, strategy: dict[str, object]) -> dict[str, Any]:
    """The accuracy after each round."""
    trained = Unequal(loaded, len(STEPS), seed=seed, strategy=strategy)
    accuracies, slowest = [], []
    images, labels = trained.loaded.recipe.train_data(trained.trainers["c1"]._partition)
    for _ in range(rounds):
        trained.round()
        measured = next(iter(trained.trainers.values())).evaluate(trained.state)
        assert measured is not None
        accuracies.append(measured[0]["accuracy"])
        slowest.append(agreement(trained, images, labels))
    reached = next((number for number, one in enumerate(accuracies, 1) if one >= GOAL), None)
    return {
        "rounds_to_goal": reached,
        "best": round(max(accuracies), 4),
        # One round's accuracy jumps about where classes are so unlike.
        "last": round(statistics.fmean(accuracies[-5:]), 4),
        "slowest_early": round(statistics.fmean(slowest[:10]), 4),
        "slowest_last": round(statistics.fmean(slowest[-5:]), 4),
    }


def agreement(trained: Trained, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The committed model's accuracy on one client's own samples."""
    model = trained.loaded.build_model(0)
    write_state(model, trained.schema, trained.state)
    with torch.no_grad():
        return float((model.eval()(images).argmax(1) == labels).double().mean())


def main() -> None:
    """Run and print; exit status 1 where FedNova needs more rounds than FedAvg in the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=0.1, help="the local learning rate")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = skewed(options.alpha, options.rate)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for seed in range(options.seeds):
        for name, strategy in WAYS.items():
            runs[name].append(run(loaded, seed, options.rounds, strategy))
            if not options.json:
                print(f"seed {seed}, {name}: {runs[name][-1]}", flush=True)
    summary = {}
    for name, found in runs.items():
        needed = [one["rounds_to_goal"] or options.rounds + 1 for one in found]
        last = [one["last"] for one in found]
        summary[name] = {
            "rounds_to_goal_median": statistics.median(needed),
            "rounds_to_goal_spread": [min(needed), max(needed)],
            "last_median": round(statistics.median(last), 4),
            "last_spread": [min(last), max(last)],
            "slowest_early_median": statistics.median(one["slowest_early"] for one in found),
            "slowest_last_median": statistics.median(one["slowest_last"] for one in found),
        }
    met = summary["fednova"]["rounds_to_goal_median"] <= summary["fedavg"]["rounds_to_goal_median"]
    if options.json:
        print(json.dumps({"goal": GOAL, "runs": runs, "summary": summary, "target_met": met}))
    else:
        for name, one in summary.items():
            print(f"{name}: {one}")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
