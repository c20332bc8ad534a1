"""A client whose round has ended without it trains on, hands in late, and begins the next round meanwhile."""

import msgspec
import pytest

from clients import effects as fx
from clients import events as ev
from clients.residual import Standing
from ravnest_fed.head import CountedSequences, Head
from ravnest_fed.messages import Offer
from tests.building import tiny, work_order
from tests.joining import Client, only, sent, told

ONE = tiny(settings={"max_staleness": "2"})
ROUND_0 = ONE.replica().head


def head(server_round: int, counted: dict[str, CountedSequences] | None = None) -> Head:
    return msgspec.structs.replace(
        ROUND_0, server_round=server_round, commit_hash=bytes([server_round]) * 32, counted=counted or {}
    )


@pytest.fixture
def client() -> Client:
    found = Client(ONE, initial=ROUND_0)
    found.join()
    found.order(work_order(ONE, ROUND_0, 0))
    return found


def test_a_commit_that_leaves_the_base_in_reach_does_not_end_the_work(client: Client) -> None:
    effects = client.fetch_commit(1)
    assert effects == [fx.Fold(1)]
    effects = client.do(ev.Folded(head(1)))
    assert not only(effects, fx.Evaluate) and not only(effects, fx.Train)
    assert not only(client.order(work_order(ONE, head(1), 0)), fx.Train)
    effects = client.trained(base_round=0)
    assert len(sent(effects, Offer)) == 1
    # The device is free again: the model it missed is measured, and the next round begun while the last one uploads.
    assert only(effects, fx.Evaluate) == [fx.Evaluate(1)]
    assert [train.order.base_round for train in only(effects, fx.Train)] == [1]
    assert [effect.fields.get("staleness") for effect in only(effects, fx.Tell) if effect.event == "trained"] == [1]


def test_a_commit_that_leaves_the_base_behind_ends_the_work(client: Client) -> None:
    for server_round in (1, 2):
        assert not only(client.commit(head(server_round)), fx.AbandonTraining)
    assert client.fetch_commit(3) == [fx.AbandonTraining(), fx.Fold(3)]
    assert not sent(client.trained(base_round=0), Offer)


def test_what_is_trained_is_encoded_only_once_the_one_before_is_settled(client: Client) -> None:
    (offer,) = sent(client.trained(base_round=0), Offer)
    client.commit(head(1))
    assert only(client.order(work_order(ONE, head(1), 0)), fx.Train)
    assert not only(client.do(ev.Finished(1)), fx.Encode)
    client.order(work_order(ONE, head(2), 0))
    effects = client.commit(head(2, {client.me: CountedSequences(1)}))
    assert only(effects, fx.Forget) == [fx.Forget()]
    assert [effect.order.base_round for effect in only(effects, fx.Encode)] == [1]
    effects = client.trained(base_round=1, seed=1)
    assert len(sent(effects, Offer)) == 1 and sent(effects, Offer) != [offer]
    assert [train.order.base_round for train in only(effects, fx.Train)] == [2]


def test_what_no_round_may_count_any_more_makes_room_for_the_next(client: Client) -> None:
    client.trained(base_round=0)
    client.commit(head(1))
    client.order(work_order(ONE, head(1), 0))
    client.do(ev.Finished(1))
    assert not only(client.commit(head(2)), fx.Encode)
    effects = client.commit(head(3))
    assert only(effects, fx.Forget) == [fx.Forget(counted=False)] and only(effects, fx.Encode)


def test_what_is_not_receipted_is_offered_again_after_each_commit_that_left_it_out(client: Client) -> None:
    offers = sent(client.trained(base_round=0), Offer)
    assert sent(client.commit(head(1)), Offer) == offers
    assert sent(client.commit(head(2)), Offer) == offers
    assert not sent(client.commit(head(3)), Offer)


def test_a_round_whose_base_was_folded_past_before_it_began_gives_way_to_the_newest(client: Client) -> None:
    client.commit(head(1))
    client.order(work_order(ONE, head(1), 0))
    effects = client.do(ev.Overtaken(0))
    assert only(effects, fx.Evaluate) == [fx.Evaluate(1)]
    assert [train.order.base_round for train in only(effects, fx.Train)] == [1]


def test_the_end_of_training_ends_the_work(client: Client) -> None:
    effects = client.commit(msgspec.structs.replace(head(1), stop="enough"))
    assert only(effects, fx.AbandonTraining) and only(effects, fx.Evaluate) == [fx.Evaluate(1)]
    assert told(client.do(ev.Evaluated(1, {}, 0))) == ["model"]


def test_a_client_killed_while_it_waits_to_be_counted_offers_the_same_bytes_again(client: Client) -> None:
    effects = client.trained(base_round=0)
    (kept,) = only(effects, fx.Keep)
    standing = Standing(ONE.federation.fingerprint, client.me).keep(kept.offer, kept.residual)
    again = Client(ONE, kept=standing, initial=ROUND_0)
    again.join(server_round=1)
    assert [offer.manifest for offer in sent(again.commit(head(1)), Offer)] == [kept.offer.manifest]
