"""Rounds of unequal length: normalised deltas do not pull the model towards whoever made more steps."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from ravnest_fed.recipe import load_recipe
from tests.trained import Trained

RECIPE = """
import torch
import ravnest_fed as rf

class Tug(rf.Recipe):
    micro_batch = 4
    local_steps = 8

    def model(self):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        return model

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05)

    def train_data(self, part):
        return torch.full((4, 1), -1.0 if part.index == 0 else 1.0), torch.zeros(4)

    def loss(self, model, batch):
        goal = batch[0].mean()
        return 0.5 * (model.weight.squeeze() - goal) ** 2
"""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def settled(folder: Path, **strategy: object) -> float:
    """Where the weight comes to rest between a goal of -1 and one of 1, which the first client pulls to with an eighth
    of the other's steps. The clients' common objective is least at 0."""
    (folder / "recipe.py").write_text(RECIPE)
    trained = Trained(load_recipe(folder / "recipe.py"), 2, strategy={"clip_factor": 0.0, **strategy})
    slow = trained.trainers["c1"]

    def one_step(*arguments: object, work: object = slow.local_round) -> object:
        left = iter([True])
        return work(*arguments, goes_on=lambda: next(left, False))  # type: ignore[operator]

    slow.local_round = functools.partial(one_step)  # type: ignore[assignment, method-assign]
    for _ in range(40):
        trained.round()
    return float(trained.state.vector[0])


def test_unequal_steps_leave_no_bias_but_what_long_rounds_do(tmp_path: Path) -> None:
    normalised, plain = settled(tmp_path), settled(tmp_path, normalization="none", weighting="equal")
    by_examples = settled(tmp_path, normalization="none")
    # One step is 0.05 of the way to a goal, and eight are 0.34: the rest of the pull is the client's that has more.
    assert plain == pytest.approx((1 - 0.95**8 - 0.05) / (1 - 0.95**8 + 0.05), abs=0.01)
    assert by_examples > plain > 0.7
    assert abs(normalised) < 0.1


def test_equal_steps_give_what_plain_averaging_gives(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    models = []
    for normalization in ("fednova", "none"):
        trained = Trained(
            load_recipe(tmp_path / "recipe.py"), 2, strategy={"normalization": normalization, "weighting": "equal"}
        )
        for _ in range(3):
            trained.round()
        models.append(trained.state.vector.copy())
    np.testing.assert_allclose(models[0], models[1], atol=1e-7)
