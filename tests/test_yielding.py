"""A client whose machine is needed: shorter rounds with honest counts, skipped ones, and work again by itself."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from clients import effects as fx
from clients import events as ev
from clients.trainer import RoundYielded
from ravnest_fed.facts import Body, Counted, Evidence, Manifest, decode
from ravnest_fed.framing import unpack
from ravnest_fed.messages import Goodbye, Offer, Reason, Skip
from ravnest_fed.recipe import load_recipe
from tests.building import work_order
from tests.joining import ONE, ROUND_0, Client, only, sent, told
from tests.test_client_session import head, manifest_of, offered
from tests.test_trainer import Bench, work
from tests.tiny_federation import write_recipe
from tests.trained import Trained

torch.set_num_threads(1)

HOT = "the machine is 3 degrees from its limit"
ORDER_0 = work_order(ONE, ROUND_0, 0)


def steps(count: int) -> Callable[[], bool]:
    """Lets so many steps be made."""
    answers = iter([True] * count)
    return lambda: next(answers, False)


# --- the trainer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", [1, 2, 4])
def test_a_round_that_is_cut_short_is_a_round_of_so_many_steps(tmp_path: Path, done: int) -> None:
    bench = Bench(tmp_path)
    ordered = work(micro_batch=4, accumulation=2, local_steps=5)
    cut = bench.trainer().local_round(ordered, bench.base, goes_on=steps(done))
    whole = bench.trainer().local_round(replace(ordered, local_steps=done), bench.base)
    assert (cut.local_steps, cut.num_examples) == (done, whole.num_examples) == (done, 8 * done)
    assert np.array_equal(cut.delta.vector, whole.delta.vector)
    assert cut.metrics == whole.metrics


def test_the_next_round_goes_on_in_the_data_where_the_short_one_ended(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    trainer, other = bench.trainer(), bench.trainer()
    trainer.local_round(work(1, local_steps=3), bench.base, goes_on=steps(1))
    other.local_round(work(1, local_steps=1), bench.base)
    assert trainer.progress.position == other.progress.position
    following = [one.local_round(work(2), bench.base).delta.vector.tobytes() for one in (trainer, other)]
    assert following[0] == following[1]


def test_a_round_of_which_nothing_was_done_leaves_no_trace(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    trainer = bench.trainer()
    with pytest.raises(RoundYielded, match="round 1 was not begun"):
        trainer.local_round(work(1), bench.base, goes_on=lambda: False)
    once = bench.trainer().local_round(work(1), bench.base)
    assert trainer.local_round(work(1), bench.base).delta.vector.tobytes() == once.delta.vector.tobytes()


# --- the brokers -----------------------------------------------------------------------------------------------------


def two_clients(folder: Path) -> Trained:
    return Trained(load_recipe(write_recipe(folder)), clients=2, brokers=3)


def committed(trained: Trained, server_round: int) -> dict[str, tuple[Counted, Manifest]]:
    """What a commit counts, by the client's name, with the manifest that it rests on."""
    disk = trained.joined.brokers["b1"].disk
    body = decode(Body, disk.commits[server_round].body)
    record = body.evidence.inline or disk.blobs.read(body.evidence.hash)
    signed = decode(Evidence, unpack(record, 2**20)).manifests
    pairs = zip(body.counted, (decode(Manifest, one.payload) for one in signed), strict=True)
    return {trained.joined.federation.name_of(one.client): (one, manifest) for one, manifest in pairs}


def test_a_shorter_round_is_admitted_and_committed_with_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = two_clients(tmp_path)
    yielding = trained.trainers["c1"]
    shorter = functools.partial(yielding.local_round, goes_on=steps(1))
    monkeypatch.setattr(yielding, "local_round", shorter)
    trained.round()
    assert trained.server_round == 1
    assert [client.refusals() for client in trained.joined.clients.values()] == [[], []]
    (short, done), (whole, other) = (committed(trained, 1)[name] for name in ("c1", "c2"))
    assert (done.local_steps, done.num_examples) == (1, 8)
    assert (other.local_steps, other.num_examples) == (2, 16)
    assert (short.steps, whole.steps) == (1, 2) and short.share == whole.share


@pytest.mark.parametrize(
    "lie", [{"num_examples": 16}, {"local_steps": 3, "num_examples": 16}], ids=["examples", "steps"]
)
def test_counts_that_do_not_fit_the_work_done_are_refused(tmp_path: Path, lie: dict[str, int]) -> None:
    trained = two_clients(tmp_path)
    client = trained.joined.clients["c1"]
    result = trained.work("c1")
    counts = {"num_examples": 8, "local_steps": 1} | lie
    client.say(trained.joined.home_of("c1"), client.offer_state(result.delta, **counts))
    trained.joined.deliver()
    assert client.refusals() == [Reason.BAD_COUNT]


def test_a_round_does_not_wait_for_a_client_that_skips_it_and_counts_it_in_the_next(tmp_path: Path) -> None:
    trained = two_clients(tmp_path)
    joined = trained.joined
    joined.clients["c1"].say(joined.home_of("c1"), Skip(0, f"paused: {HOT}"))
    joined.deliver()
    trained.contribute("c2")
    joined.deliver()
    assert joined.rounds() == {1} and set(committed(trained, 1)) == {"c2"}
    assert any(HOT in line for line in joined.brokers[joined.home_of("c1")].said)
    trained.round()
    assert set(committed(trained, 2)) == {"c1", "c2"}


def test_who_skipped_may_still_bring_something_before_the_round_closes(tmp_path: Path) -> None:
    trained = two_clients(tmp_path)
    joined = trained.joined
    joined.clients["c1"].say(joined.home_of("c1"), Skip(0, f"paused: {HOT}"))
    joined.deliver()
    trained.contribute("c1")
    joined.deliver()
    trained.contribute("c2")
    joined.deliver()
    assert joined.rounds() == {1} and set(committed(trained, 1)) == {"c1", "c2"}


# --- the session -----------------------------------------------------------------------------------------------------


@pytest.fixture
def client() -> Client:
    made = Client()
    made.join()
    return made


def test_a_paused_client_skips_each_round_once_with_the_reason_and_works_when_it_may(client: Client) -> None:
    (pausing,) = client.do(ev.Needed(HOT))
    assert pausing == fx.Tell("pausing", {"because": HOT})
    assert client.do(ev.Needed(HOT)) == []
    effects = client.order(ORDER_0)
    assert sent(effects, Skip) == [Skip(0, f"paused: {HOT}")] and not only(effects, fx.Train)
    assert client.order(ORDER_0) == []
    client.commit(head(1))
    effects = client.order(work_order(ONE, head(1), 0))
    assert sent(effects, Skip) == [Skip(1, f"paused: {HOT}")]
    effects = client.do(ev.Needed(""))
    assert told(effects) == ["going on", "training"]
    (train,) = only(effects, fx.Train)
    assert train.order.base_round == 1
    assert offered(client.trained(1))


def test_a_new_home_is_told_of_the_skip_too_once_it_has_answered(client: Client) -> None:
    client.do(ev.Needed(HOT))
    client.order(ORDER_0)
    client.line(str(client.session.home), "down")
    assert not sent(client.do(ev.Needed("it is outside 22:00-06:30")), Skip)
    client.welcome()
    assert sent(client.order(ORDER_0), Skip) == [Skip(0, "paused: it is outside 22:00-06:30")]


def test_a_round_under_way_ends_by_itself_and_is_handed_in_with_what_was_done(client: Client) -> None:
    client.order(work_order(ONE, ROUND_0, 0, local_steps=5))
    effects = client.do(ev.Needed(HOT))
    assert told(effects) == ["pausing"] and not only(effects, fx.AbandonTraining)
    effects = client.trained()
    manifest = manifest_of(offered(effects))
    assert (manifest.local_steps, manifest.num_examples) == (2, 8)
    (tell,) = only(effects, fx.Tell)
    assert tell.fields["steps"] == 2
    assert not sent(client.all, Skip)


def test_a_round_of_which_nothing_was_done_is_skipped_and_is_no_failure(client: Client) -> None:
    client.order(ORDER_0)
    client.do(ev.Needed(HOT))
    for base in range(5):
        effects = client.do(ev.Yielded(base))
        if base == 0:
            assert sent(effects, Skip) == [Skip(0, f"paused: {HOT}")]
        assert not sent(effects, Offer) and not only(client.all, fx.End)
        client.commit(head(base + 1))
        client.order(work_order(ONE, head(base + 1), 0))
    assert only(client.do(ev.Needed("")), fx.Train)


def test_a_need_that_is_over_before_it_was_heard_of_loses_no_round(client: Client) -> None:
    client.order(ORDER_0)
    client.do(ev.Needed(HOT))
    assert told(client.do(ev.Needed(""))) == ["going on"]
    effects = client.do(ev.Yielded(0))
    assert only(effects, fx.Train) and told(effects) == ["training"]


def test_what_was_stopped_for_a_commit_is_not_skipped(client: Client) -> None:
    client.order(ORDER_0)
    client.commit(head(1))
    assert client.do(ev.Yielded(0)) == []


def test_a_paused_client_still_follows_the_log_and_may_leave(client: Client) -> None:
    client.do(ev.Needed(HOT))
    client.order(ORDER_0)
    client.commit(head(1))
    assert client.session.head == head(1)
    assert len(sent(client.do(ev.Leave(finish=True)), Goodbye)) == 1
