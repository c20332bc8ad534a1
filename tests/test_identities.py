"""Identities that any correct implementation meets, with the real trainer and whole federations in memory."""

from pathlib import Path

import numpy as np
import pytest
import torch

from clients.trainer import LocalWork, Trainer
from ravnest_fed.aggregation.fixed_point import choose_scale_bits
from ravnest_fed.facts import Body, WorkOrder, decode
from ravnest_fed.model_state import read_state, schema_of
from ravnest_fed.partition import Partition
from ravnest_fed.recipe import load_recipe
from tests.joined import Joined, federation_of
from tests.trained import Trained

RECIPE = """
import torch
import ravnest_fed as rf

class Line(rf.Recipe):
    micro_batch = 8
    local_steps = 5

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(7, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def train_data(self, part):
        x = torch.randn(64, 7, generator=torch.Generator().manual_seed(3))
        return x, x.sum(1, keepdim=True).sin()

    def loss(self, model, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y)
"""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("normalization", ["none", "fednova"])
def test_one_client_with_fedavg_equals_local_training(normalization: str, tmp_path: Path) -> None:
    """To one ulp of the larger of base and result, plus the fixed-point step: fp32, learning rate 1, no clipping.

    Dividing by the steps and multiplying by them again costs an ulp of the delta more.
    """
    (tmp_path / "recipe.py").write_text(RECIPE)
    loaded = load_recipe(tmp_path / "recipe.py")
    model = loaded.build_model(0)
    schema = schema_of(model, 4096)
    federation, _ = federation_of(
        1,
        1,
        codecs={"up": "fp32", "down": "fp32"},
        strategy={"clip_factor": 0.0, "normalization": normalization},
        rounds={"local_steps": 5},
        schema=schema,
    )
    joined = Joined(federation, read_state(model, schema))
    joined.start_brokers()
    joined.join_clients()
    client = joined.clients["c1"]
    federated = Trainer(loaded, schema, Partition(0, 1, 0), "cpu", 0)
    alone = Trainer(loaded, schema, Partition(0, 1, 0), "cpu", 0)
    local = read_state(model, schema)
    for server_round in range(1, 7):
        assert client.order is not None
        order = decode(WorkOrder, client.order.payload)
        work = LocalWork(server_round, 8, 1, order.local_steps, order.committed_steps)
        base = joined.brokers["b1"].replica.state
        before = base.vector.copy()
        result = federated.local_round(work, base)
        client.say("b1", client.offer(result.delta.vector, num_examples=result.num_examples))
        joined.deliver()
        assert joined.rounds() == {server_round}
        body = decode(Body, joined.brokers["b1"].disk.commits[server_round].body)

        # Local training from where the federation stood, so that the bound of one round is what is tested.
        local.vector[:] = before
        kept = alone.local_round(work, local)
        expected = before - kept.delta.vector
        after = joined.brokers["b1"].replica.state.vector
        bound = np.spacing(np.maximum(np.abs(before), np.abs(after))) + 2.0**-body.scale_bits
        if normalization == "fednova":
            bound += np.spacing(np.abs(kept.delta.vector)) + (order.local_steps - 1) * 2.0**-body.scale_bits
        assert np.all(np.abs(after - expected) <= bound)
        assert not np.array_equal(after, before)
        np.testing.assert_array_equal(result.delta.vector, kept.delta.vector)


def test_fedavgm_without_momentum_equals_fedavg_bit_for_bit() -> None:
    hashes = set()
    for strategy in ({"name": "fedavg"}, {"name": "fedavgm", "momentum": 0.0}):
        joined = Joined.started(3, 3, strategy=strategy)
        for _ in range(4):
            joined.contribute()
        hashes |= joined.model_hashes()
    assert len(hashes) == 1


def test_fedprox_without_its_pull_equals_fedavg_bit_for_bit_and_with_it_does_not(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    loaded = load_recipe(tmp_path / "recipe.py")
    hashes = []
    for strategy in ({}, {"proximal": 0.0}, {"proximal": 0.3}):
        trained = Trained(loaded, 2, strategy=strategy)
        for _ in range(2):
            trained.round()
        hashes.append(trained.head.model_hash)
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
def test_all_brokers_agree_on_an_adaptive_strategy_s_model_and_running_products(name: str) -> None:
    joined = Joined.started(3, 3, strategy={"name": name, "learning_rate": 0.01, "momentum": 0.5, "beta2": 0.99})
    rate = np.float32(0.99)
    before = next(iter(joined.brokers.values())).replica.state.vector.copy()
    for _ in range(3):
        joined.contribute()
    assert len(joined.model_hashes()) == 1
    assert {head.scalars for head in joined.heads().values()} == {(0.125, float(rate * rate * rate))}
    moved = np.abs(next(iter(joined.brokers.values())).replica.state.vector - before)
    assert 0.001 < moved[: 3 * 4096].max() < 0.05


def test_momentum_changes_the_model_and_all_brokers_agree_on_it() -> None:
    hashes = set()
    for strategy in ({"name": "fedavg"}, {"name": "fedavgm", "momentum": 0.9, "nesterov": True}):
        joined = Joined.started(3, 3, strategy=strategy)
        for _ in range(3):
            joined.contribute()
        assert len(joined.model_hashes()) == 1
        hashes |= joined.model_hashes()
    assert len(hashes) == 2


def test_a_resumed_federation_equals_one_that_never_stopped() -> None:
    hashes = set()
    for stops in (False, True):
        joined = Joined.started(3, 3, strategy={"name": "fedavgm", "momentum": 0.9})
        for _ in range(4):
            joined.contribute()
            if stops:
                for name in joined.brokers:
                    joined.kill(name)
                for name in joined.brokers:
                    joined.restart(name)
                joined.join_clients()
        assert joined.rounds() == {4}
        hashes |= joined.model_hashes()
    assert len(hashes) == 1


def test_a_norm_far_above_the_others_is_clipped_to_the_bound() -> None:
    joined = Joined.started(3, 4, strategy={"clip_factor": 2.0})
    joined.contribute()
    for name, client in joined.clients.items():
        client.contribute(joined.home_of(name), scale=0.1 if name == "c4" else 0.01)
    joined.deliver()
    assert joined.rounds() == {2}
    body = decode(Body, joined.brokers["b1"].disk.commits[2].body)
    by_name = {joined.federation.name_of(one.client): one for one in body.counted}
    assert by_name["c1"].weight == by_name["c1"].share
    assert by_name["c4"].weight / by_name["c4"].share == pytest.approx(0.2, rel=0.05)


def test_the_scale_leaves_headroom_above_what_was_recorded() -> None:
    joined = Joined.started(1, 2)
    joined.contribute()
    body = decode(Body, joined.brokers["b1"].disk.commits[1].body)
    greatest = max(one.max_abs for one in body.counted)
    assert body.next_scale_bits == choose_scale_bits([greatest], joined.federation.limits.max_contributions)
