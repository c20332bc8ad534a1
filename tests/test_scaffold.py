"""SCAFFOLD: control variates take out the drift of unlike clients, and a client's control follows what was counted."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from clients.control import Controls
from clients.residual import Standing
from clients.trainer import LocalWork
from ravnest_fed import codecs
from ravnest_fed.aggregation.outer import CONTROL, Scaffold
from ravnest_fed.blobs import MemoryBlobs
from ravnest_fed.errors import FederationFileError
from ravnest_fed.facts import WorkOrder, decode
from ravnest_fed.recipe import load_recipe
from tests.building import tiny
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
        return torch.optim.SGD(parameters, lr=0.1)

    def train_data(self, part):
        return torch.full((4, 1), float(part.index)), torch.zeros(4)

    def loss(self, model, batch):
        steepness, goal = (1.0, 0.0) if batch[0].mean() == 0 else (4.0, 1.0)
        return 0.5 * steepness * (model.weight.squeeze() - goal) ** 2
"""
OPTIMUM = 0.8
"""Where (w^2 + 4 (w - 1)^2) / 2 is least."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Controlled(Trained):
    """Trained clients that keep a control each, as a running client does."""

    def __init__(self, folder: Path, clients: int = 2, **strategy: object) -> None:
        (folder / "recipe.py").write_text(RECIPE)
        loaded = load_recipe(folder / "recipe.py")
        super().__init__(loaded, clients, strategy={"name": "scaffold", "clip_factor": 0.0, **strategy})
        self.blobs = MemoryBlobs()
        fingerprint = self.joined.federation.fingerprint
        self.standings = {name: Standing(fingerprint, name) for name in self.trainers}

    @property
    def common(self) -> np.ndarray:
        replica = next(iter(self.joined.brokers.values())).replica
        return replica.outer_state[CONTROL]

    def controls(self, name: str) -> Controls:
        return Controls(self.schema, self.standings[name], self.common, self.blobs.read)

    def contribute(self, name: str) -> None:
        client = self.joined.clients[name]
        assert client.order is not None
        order = decode(WorkOrder, client.order.payload)
        controls = self.controls(name)
        result = self.trainers[name].local_round(
            LocalWork.ordered(order, 0.0), self.state, correction=controls.correction()
        )
        offer = client.offer_state(result.delta, local_steps=result.local_steps, num_examples=4)
        renewal, codec = controls.renewal(self.blobs.put), codecs.get(order.codec)
        for shard, ref in zip(self.schema.shards, offer.shards, strict=True):
            if shard.kind == "parameters":
                decoded = codec.decode(client.outbox.read(ref.hash), shard.count)
                renewal.sent(shard, renewal.wanted(shard, decoded), decoded)
        self.standings[name] = self.standings[name].keep(offer, None, tuple(renewal.renewed))
        client.say(self.joined.home_of(name), offer)

    def round(self, taking_part: object = None) -> None:
        super().round(taking_part)  # type: ignore[arg-type]
        for name, standing in self.standings.items():
            self.standings[name] = standing.forget(counted=True)

    @property
    def weight(self) -> float:
        return float(self.state.vector[0])


def test_unlike_clients_meet_at_the_optimum_and_averaging_alone_misses_it(tmp_path: Path) -> None:
    controlled = Controlled(tmp_path)
    plain = Trained(load_recipe(tmp_path / "recipe.py"), 2, strategy={"clip_factor": 0.0})
    for _ in range(40):
        controlled.round()
        plain.round()
    # Eight steps leave 0.9^8 of the way to one goal and 0.6^8 of the way to the other.
    drifted = (1 - 0.6**8) / (1 - 0.6**8 + 1 - 0.9**8)
    assert float(plain.state.vector[0]) == pytest.approx(drifted, abs=0.01)
    assert abs(drifted - OPTIMUM) > 0.15
    assert controlled.weight == pytest.approx(OPTIMUM, abs=0.01)


def test_the_common_control_is_the_mean_of_the_clients_controls(tmp_path: Path) -> None:
    controlled = Controlled(tmp_path, clients=3)
    for taking_part in (None, None, ["c1", "c3"], ["c2"]):
        controlled.round(taking_part)
        own = [controlled.controls(name).correction() + controlled.common for name in controlled.trainers]
        np.testing.assert_allclose(np.mean(own, axis=0), controlled.common, atol=1e-3)
    assert max(np.abs(one).max() for one in own) > 0.05


def test_one_client_alone_is_not_corrected(tmp_path: Path) -> None:
    controlled = Controlled(tmp_path, clients=1)
    plain = Trained(load_recipe(tmp_path / "recipe.py"), 1, strategy={"clip_factor": 0.0})
    for _ in range(3):
        controlled.round()
        plain.round()
    np.testing.assert_allclose(controlled.controls("c1").correction(), 0.0, atol=1e-6)
    np.testing.assert_allclose(controlled.state.vector, plain.state.vector, atol=1e-5)


def test_a_step_moves_the_control_by_its_part_of_the_members() -> None:
    outer = Scaffold(0.5)
    parameters, control = np.float32([1.0, 2.0]), np.float32([0.5, -0.5])
    outer.step(parameters, np.float32([4.0, 8.0]), (control,), outer.taken(effective_steps=4.0, participation=0.5))
    assert parameters.tolist() == [-1.0, -2.0]
    assert control.tolist() == [0.75, 0.75]


def test_a_control_is_renewed_by_a_counted_contribution_alone(tmp_path: Path) -> None:
    controlled = Controlled(tmp_path)
    controlled.joined.deliver()
    controlled.contribute("c1")
    kept = controlled.standings["c1"]
    assert kept.next_control and not kept.control
    assert {ref.hash for ref in kept.next_control} <= kept.blobs
    assert kept.forget(counted=True).control == kept.next_control
    dropped = kept.forget(counted=False)
    assert not dropped.control and not dropped.next_control and dropped.returned is None
    # The same payload under another sequence renews nothing else.
    assert kept.offer is not None and kept.keep(kept.offer, None).next_control == kept.next_control


def test_a_damaged_control_counts_as_zeros_and_is_told(tmp_path: Path) -> None:
    controlled = Controlled(tmp_path)
    controlled.round()
    standing = controlled.standings["c1"]
    for damaged in (b"", b"\0\0\0\0"):
        ref = controlled.blobs.put(damaged).bare()
        controlled.standings["c1"] = msgspec.structs.replace(standing, control=(ref,))
        controls = controlled.controls("c1")
        assert controls.lost == [0]
        np.testing.assert_array_equal(controls.correction(), -controlled.common)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy.momentum": "0.5"}, "scaffold has none"),
        ({"strategy.normalization": "none"}, "means of deltas a step"),
        ({"strategy.weighting": "examples"}, "plain mean"),
        ({"rounds.max_staleness": "2"}, "has moved on"),
        ({"codecs.up": "topk128"}, "residual would enter"),
    ],
)
def test_settings_that_scaffold_cannot_work_with_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(FederationFileError, match=message):
        tiny(settings={"strategy.name": "scaffold", **settings})
