"""Data that all clients share: founding, orders, slices on the client, training on them, and what is refused."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from brokers.planner import work_order
from brokers.sizing import Sized
from clients.own_slice import next_slice
from clients.trainer import LocalWork, Trainer
from ravnest_fed.decree import check_body
from ravnest_fed.errors import AdmissionRefused, FederationFileError, NoDataError, RecipeError, VerificationError
from ravnest_fed.facts import WorkOrder, decode, encode
from ravnest_fed.federation import from_tables
from ravnest_fed.founding import Address, found
from ravnest_fed.head import Head
from ravnest_fed.manifests import require_countable
from ravnest_fed.messages import Reason
from ravnest_fed.model_state import read_state, schema_of
from ravnest_fed.parameters import BLOCK
from ravnest_fed.recipe import LoadedRecipe, Partition, load_recipe
from ravnest_fed.slices import SampleOrder, Slice, first, size
from tests.building import contribution, decide, tables, tiny
from tests.building import work_order as ordered

torch.set_num_threads(1)

RECIPE = """
import torch
import ravnest_fed as rf

class Shared(rf.Recipe):
    micro_batch = 4
    local_steps = 2
    seen = []
    def model(self):
        return torch.nn.Linear(3, 1)
    def shared_data(self):
        inputs = torch.arange(60.).reshape(20, 3) / 60
        return torch.arange(20), inputs, inputs.sum(1, keepdim=True)
    def loss(self, model, batch):
        self.seen += batch[0].tolist()
        return torch.nn.functional.mse_loss(model(batch[1]), batch[2])
    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05)
"""
ONE = tiny(samples=100)
REPLICA = ONE.replica()
HEAD = REPLICA.head
ME = ONE.members[0].node_id


def load(folder: Path, text: str = RECIPE) -> LoadedRecipe:
    (folder / "recipe.py").write_text(text)
    return load_recipe(folder / "recipe.py")


def returning(data: str) -> str:
    """The recipe with other data."""
    return RECIPE + f"    def shared_data(self): return {data}\n"


# --- the recipe and the federation file ------------------------------------------------------------------------------


def test_founding_counts_the_shared_samples_and_signs_the_number(tmp_path: Path) -> None:
    made = found(load(tmp_path), [Address("127.0.0.1", 7000, 7001)], 2, {}, None, tmp_path / "federation")
    assert made.federation.data.samples == 20
    assert made.federation.weighting == "examples"


@pytest.mark.parametrize(
    ("data", "error", "named"),
    [
        ("None", RecipeError, "shared_data"),
        ("[]", NoDataError, "shared_data"),
        ("torch.utils.data.DataLoader([1, 2])", RecipeError, "shared_data.* DataLoader"),
        ("iter([1])", RecipeError, "shared_data"),
        ("(torch.zeros(3), torch.zeros(2))", RecipeError, "shared_data.*rows"),
        ("1 / 0", RecipeError, "recipe.py:.*shared_data"),
    ],
)
def test_shared_data_must_be_samples_by_number(tmp_path: Path, data: str, error: type, named: str) -> None:
    with pytest.raises(error, match=named):
        found(load(tmp_path, returning(data)), [Address("127.0.0.1", 7000, 7001)], 2, {}, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_recipe_has_its_data_in_one_way(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="both train_data and shared_data"):
        load(tmp_path, RECIPE + "    def train_data(self, part): return []\n")


@pytest.mark.parametrize("samples", [-1, 2**41])
def test_a_number_of_samples_that_cannot_be(samples: int) -> None:
    with pytest.raises(FederationFileError, match=r"data\.samples"):
        from_tables({**tables(), "data": {"samples": samples}}, "the test")


def test_scaffold_is_for_clients_with_data_of_their_own() -> None:
    with pytest.raises(FederationFileError, match="share one data set"):
        tiny(samples=100, settings={"strategy.name": "scaffold"})


def test_normalised_deltas_of_own_data_count_equally_and_of_shared_data_by_examples() -> None:
    assert tiny().federation.weighting == "equal"
    assert ONE.federation.weighting == "examples"


# --- orders and slices -----------------------------------------------------------------------------------------------


def sized(micro_batch: int, accumulation: int, steps: int) -> Sized:
    return Sized(micro_batch, accumulation, steps, None, {"local_steps": "the test's"})


def test_an_order_asks_for_no_more_than_was_dealt() -> None:
    # Not sized, a region holds just the federation's two steps of four.
    assert work_order(ONE.federation, HEAD, ME).local_steps == 2
    assert work_order(ONE.federation, HEAD, ME, sized(4, 1, 5)).local_steps == 2
    assert work_order(ONE.federation, HEAD, ME, sized(3, 1, 5)).local_steps == 2


def order_for(one: Any, head: Head, **changes: Any) -> WorkOrder:
    return decode(WorkOrder, ordered(one, head, 0, **changes).payload)


def test_a_client_takes_the_lowest_samples_of_its_region_in_whole_steps() -> None:
    assert HEAD.deal is not None
    mine = HEAD.deal.usable(ME, 0, 0)
    assert next_slice(order_for(ONE, HEAD), HEAD, (), 0) == mine
    assert next_slice(order_for(ONE, HEAD, local_steps=1), HEAD, (), 0) == first(mine, 4)
    assert next_slice(order_for(ONE, HEAD, micro_batch=3), HEAD, (), 0) == first(mine, 6)
    assert next_slice(order_for(ONE, HEAD, micro_batch=9), HEAD, (), 0) is None


def test_where_data_is_not_shared_there_is_no_slice() -> None:
    one = tiny()
    head = one.replica().head
    assert head.deal is None
    assert next_slice(order_for(one, head), head, (), 0) == ()


def test_samples_in_a_contribution_under_way_are_left_out_while_there_are_others() -> None:
    one = tiny(samples=100, settings={"max_staleness": "2"})
    head = one.replica().head
    assert head.deal is not None
    order, mine = order_for(one, head), head.deal.usable(ME, 0, 2)
    assert size(mine) == 2 * order.max_examples
    earlier = first(mine, 8)
    later = next_slice(order, head, earlier, 2)
    assert later is not None and size(later) == 8
    assert head.deal.holds(ME, later) and not set(later) & set(earlier)
    assert next_slice(order, head, mine, 2) == earlier


# --- what a round counts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        (),
        ((0, 7),),
        ((0, 9),),
        ((4, 8), (0, 4)),
        ((50, 58),),
        ((-8, 0),),
        ((0, 4), (4, 4), (4, 8)),
        ((0, 2**60),),
    ],
)
def test_a_slice_that_was_not_dealt_to_the_client_is_refused(wrong: Slice) -> None:
    assert HEAD.deal is not None
    start = HEAD.deal.usable(ME, 0, 0)[0][0]
    moved = tuple((low + start, high + start) for low, high in wrong)
    made = contribution(ONE, HEAD, 0, slice=moved)
    with pytest.raises(AdmissionRefused) as refused:
        require_countable(ONE.federation, HEAD, made.manifest)
    assert refused.value.reason == Reason.WRONG_SLICE
    require_countable(ONE.federation, HEAD, contribution(ONE, HEAD, 0).manifest)


def test_a_slice_where_no_data_is_shared_is_refused() -> None:
    one = tiny()
    head = one.replica().head
    with pytest.raises(AdmissionRefused, match="share no data"):
        require_countable(one.federation, head, contribution(one, head, 0, slice=((0, 8),)).manifest)


def test_a_commit_covers_what_its_manifests_name_and_deals_the_rest_again() -> None:
    replica = ONE.replica()
    deal = replica.head.deal
    assert deal is not None
    offers = [contribution(ONE, replica.head, 0), contribution(ONE, replica.head, 2, num_examples=4, local_steps=1)]
    decided = decide(ONE, replica, offers)
    assert {one.client: one.covered for one in decided.body.counted} == {
        one.manifest.client: one.manifest.slice for one in offers
    }
    replica.fold(decided.body, decided.raw, decided.read_update)
    after = replica.head.deal
    assert after is not None and after.covered == 12
    assert not after.holds(ME, offers[0].manifest.slice)
    old = contribution(ONE, replica.head, 0, slice=offers[0].manifest.slice)
    with pytest.raises(AdmissionRefused, match="covered by now"):
        require_countable(ONE.federation, replica.head, old.manifest)


def test_a_body_that_covers_other_samples_is_found_out() -> None:
    replica = ONE.replica()
    decided = decide(ONE, replica, [contribution(ONE, replica.head, 0)])
    (one,) = decided.body.counted
    forged = msgspec.structs.replace(decided.body, counted=(msgspec.structs.replace(one, covered=((90, 98),)),))
    with pytest.raises(VerificationError, match="weighed wrongly"):
        check_body(ONE.federation, replica.head, forged, decided.evidence)


def test_the_deal_is_part_of_the_replicated_state() -> None:
    assert HEAD.deal is not None
    other = msgspec.structs.replace(HEAD, deal=msgspec.structs.replace(HEAD.deal, tail=HEAD.deal.tail + 1))
    assert other.digest(ONE.federation) != HEAD.digest(ONE.federation)
    assert decode(Head, encode(HEAD)) == HEAD


# --- training --------------------------------------------------------------------------------------------------------


class Bench:
    """A trainer of the shared recipe, and what it saw."""

    def __init__(self, folder: Path, text: str = RECIPE, samples: int = 20, index: int = 0) -> None:
        self.loaded = load(folder, text)
        model = self.loaded.build_model(0)
        schema = schema_of(model, BLOCK)
        self.base = read_state(model, schema)
        self.trainer = Trainer(self.loaded, schema, Partition(index, 2, 5), "cpu", 5, samples=samples)

    def train(self, of: Slice, server_round: int = 1, steps: int = 3) -> Any:
        self.loaded.recipe.seen = []  # type: ignore[attr-defined]
        work = LocalWork(server_round, 2, 2, steps, 0, slice=of)
        return self.trainer.local_round(work, self.base)

    @property
    def seen(self) -> list[int]:
        return self.loaded.recipe.seen  # type: ignore[attr-defined,no-any-return]


def test_training_draws_exactly_the_samples_of_the_slice(tmp_path: Path) -> None:
    bench, of = Bench(tmp_path), ((3, 8), (14, 21))
    result = bench.train(of)
    assert bench.seen == SampleOrder(20, 5).rows(of).tolist()
    assert (result.num_examples, result.local_steps) == (12, 3)


def test_a_round_on_a_slice_leaves_no_trace_for_the_next(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.train(((0, 12),))
    after = bench.train(((12, 24),), 2)
    alone = Bench(tmp_path).train(((12, 24),), 2)
    assert np.array_equal(after.delta.vector, alone.delta.vector)


def test_a_slice_too_small_for_every_step_shortens_the_round() -> None:
    work = LocalWork.ordered(order_for(ONE, HEAD, local_steps=5), 0.0, ((0, 14),))
    assert (work.local_steps, work.slice) == (3, ((0, 14),))


def test_another_number_of_samples_here_than_at_the_founding_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"20 samples on this machine.*made with 21"):
        Bench(tmp_path, samples=21).trainer.load_data()


def test_samples_of_a_dataset_are_collated(tmp_path: Path) -> None:
    rows = "[(torch.tensor(n), torch.ones(3) * n, torch.ones(1)) for n in range(20)]"
    bench = Bench(tmp_path, returning(rows))
    bench.train(((0, 12),))
    assert bench.seen == SampleOrder(20, 5).rows(((0, 12),)).tolist()
