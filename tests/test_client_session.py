"""A client follows the log, works on the newest model, and offers the same bytes until a commit moves on."""

import msgspec
import pytest

from brokers.admission import check_manifest
from clients import effects as fx
from clients import events as ev
from clients.session import AGAIN_SECONDS
from ravnest_fed.capability import Capability, Speed
from ravnest_fed.errors import RavnestError, RecipeError
from ravnest_fed.facts import BlobRef, Evaluation, Manifest, Receipt, open_signed, sign, signed_hash
from ravnest_fed.head import CountedSequences, Head
from ravnest_fed.identity import Identity, Signed
from ravnest_fed.messages import (
    CapabilityNotice,
    CheckpointNotice,
    CommitNotice,
    CommitsRequest,
    EvaluationNotice,
    Goodbye,
    Hello,
    Offer,
    Ready,
    Reason,
    ReceiptNotice,
    Refused,
    Skip,
    Waiting,
    Welcome,
)
from ravnest_fed.transfer import STALL_SECONDS
from tests.building import identity, work_order
from tests.joining import (
    ONE,
    ROUND_0,
    Client,
    broker_id,
    commit_ref,
    only,
    sent,
    told,
    update_refs,
)

ME = ONE.members[0]
ORDER_0 = work_order(ONE, ROUND_0, 0)


def head(server_round: int, counted: int = 0, stop: str = "") -> Head:
    """The head after a round, which counted the sequence `counted` of this client (0: none of its)."""
    return msgspec.structs.replace(
        ROUND_0,
        server_round=server_round,
        commit_hash=bytes([server_round]) * 32,
        model_hash=bytes([100 + server_round]) * 32,
        counted={ME.node_id: CountedSequences(counted)} if counted else {},
        stop=stop,
    )


@pytest.fixture
def client() -> Client:
    made = Client()
    made.join()
    return made


def offered(effects: list[fx.Effect]) -> Offer:
    (offer,) = sent(effects, Offer)
    return offer


def manifest_of(offer: Offer) -> Manifest:
    found = open_signed(Manifest, offer.manifest, ME.public_key)
    assert found is not None
    return found


def receipt_by(broker: Identity, offer: Offer) -> ReceiptNotice:
    return ReceiptNotice(sign(broker, Receipt(ONE.federation.fingerprint, signed_hash(offer.manifest))))


def home_identity(client: Client) -> Identity:
    return next(one for one in ONE.brokers if one.node_id == broker_id(client.session.home or ""))


def test_joining_gets_the_federation_file_then_the_model_and_says_it_is_ready() -> None:
    client = Client()
    effects = client.join()
    assert [type(effect) for effect in only(client.all, (fx.ReadFederation, fx.Prepare))] == [
        fx.ReadFederation,
        fx.Prepare,
    ]
    assert only(effects, fx.Evaluate) == [fx.Evaluate(0)] and sent(effects, Ready) == [Ready(0)]


def test_a_commit_is_opened_before_its_updates_are_fetched_and_folded_once_all_are_here(client: Client) -> None:
    home = client.session.home
    assert client.hear(CommitNotice(1, commit_ref(1))) == [fx.Fetch(commit_ref(1), home)]
    assert client.do(ev.Fetched(commit_ref(1).hash)) == [fx.OpenCommit(commit_ref(1), home)]
    first, second, _ = update_refs(1)
    assert client.do(ev.CommitOpened(1, update_refs(1))) == [fx.Fetch(first, home), fx.Fetch(second, home)]
    assert client.do(ev.Fetched(second.hash)) == []
    assert client.do(ev.Fetched(first.hash)) == [fx.Fold(1)]
    assert client.do(ev.Fetched(first.hash)) == []
    effects = client.do(ev.Folded(head(1)))
    assert only(effects, fx.Evaluate) == [fx.Evaluate(1)] and client.session.head == head(1)


def test_a_client_that_is_behind_follows_commit_by_commit_and_works_at_the_end_only(client: Client) -> None:
    client.order(work_order(ONE, head(3), 0))
    for server_round in (3, 1, 2):
        client.hear(CommitNotice(server_round, commit_ref(server_round)))
    assert not only(client.all, fx.Train)
    for server_round in (1, 2, 3):
        client.fetch_commit(server_round)
        effects = client.do(ev.Folded(head(server_round)))
        assert only(effects, fx.Evaluate) == ([fx.Evaluate(3)] if server_round == 3 else [])
        assert len(only(effects, fx.Train)) == (server_round == 3)
    assert only(client.all, fx.Fold) == [fx.Fold(1), fx.Fold(2), fx.Fold(3)]


def test_commits_that_a_broker_did_not_name_are_asked_for_once(client: Client) -> None:
    assert sent(client.hear(CommitNotice(3, commit_ref(3))), CommitsRequest) == [CommitsRequest(0)]
    assert client.hear(CommitNotice(4, commit_ref(4))) == []
    effects = client.hear(CommitNotice(1, commit_ref(1)))
    assert only(effects, fx.Fetch) == [fx.Fetch(commit_ref(1), client.session.home)]


def test_a_commit_that_is_folded_already_is_not_fetched_again(client: Client) -> None:
    client.commit(head(1))
    assert client.hear(CommitNotice(1, commit_ref(1))) == []
    assert client.do(ev.Fetched(commit_ref(1).hash)) == []


def test_commits_are_caught_up_with_at_the_next_home_when_the_first_is_lost(client: Client) -> None:
    client.hear(CommitNotice(1, commit_ref(1)))
    client.do(ev.Fetched(commit_ref(1).hash))
    client.line(client.session.home or "", "down")
    assert client.do(ev.CommitOpened(1, update_refs(1))) == []
    assert sent(client.welcome(server_round=1), Ready) == [Ready(0)]
    assert client.fetch_commit(1) == [fx.Fold(1)]


def test_a_broker_without_the_commit_that_it_named_is_left_for_another(client: Client) -> None:
    before = client.session.home
    client.hear(CommitNotice(1, commit_ref(1)))
    assert told(client.do(ev.Missed(commit_ref(1).hash))) == ["home broker left"]
    assert client.session.home not in (before, None)
    assert client.do(ev.Missed(commit_ref(1).hash)) == []


def test_rounds_that_only_the_lost_home_knew_hold_nobody_up_at_the_next(client: Client) -> None:
    client.hear(CommitNotice(900, commit_ref(9)))
    client.line(client.session.home or "", "down")
    client.welcome(server_round=1)
    assert only(client.commit(head(1)), fx.Evaluate) == [fx.Evaluate(1)]


def test_an_evaluation_is_sent_for_the_head_alone(client: Client) -> None:
    effects = client.do(ev.Evaluated(0, {"accuracy": 0.5}, 20))
    (notice,) = sent(effects, EvaluationNotice)
    found = open_signed(Evaluation, notice.evaluation, ME.public_key)
    assert found is not None and found.metrics == {"accuracy": 0.5} and found.num_examples == 20
    assert (found.client, found.server_round, found.model_hash) == (ME.node_id, 0, ROUND_0.model_hash)
    client.commit(head(1))
    assert client.do(ev.Evaluated(0, {"accuracy": 0.5}, 20)) == []


def test_an_order_for_the_head_is_worked_on_once(client: Client) -> None:
    (train,) = only(client.order(ORDER_0), fx.Train)
    assert train.order.base_round == 0
    assert client.order(ORDER_0) == []


BAD_ORDERS = [
    work_order(ONE, head(1), 0),
    work_order(ONE, ROUND_0, 1),
    work_order(ONE, ROUND_0, 0, base_hash=b"x" * 32),
    work_order(ONE, ROUND_0, 0, federation=b"x" * 32),
    Signed(ORDER_0.node_id, ORDER_0.payload, bytes(64)),
    ME.sign("WorkOrder", ORDER_0.payload),
    identity("stranger").sign("WorkOrder", ORDER_0.payload),
]


@pytest.mark.parametrize("number", range(len(BAD_ORDERS)))
def test_an_order_that_does_not_fit_or_is_not_a_brokers_is_not_worked_on(client: Client, number: int) -> None:
    assert not only(client.order(BAD_ORDERS[number]), fx.Train)
    assert only(client.order(ORDER_0), fx.Train)


def test_a_delta_is_offered_with_a_manifest_that_says_what_was_done() -> None:
    client = Client()
    client.join(highest_sequence=6)
    client.order(ORDER_0)
    offer = offered(client.trained())
    manifest = manifest_of(offer)
    assert (manifest.client, manifest.sequence, manifest.base_round, manifest.last_round) == (ME.node_id, 7, 0, 1)
    assert (manifest.base_hash, manifest.order) == (ROUND_0.commit_hash, ORDER_0)
    assert (manifest.num_examples, manifest.local_steps, manifest.metrics) == (8, 2, {"loss": 0.5})
    assert manifest.shard_count == len(offer.shards)


def test_what_a_client_offers_a_broker_admits(client: Client) -> None:
    client.order(ORDER_0)
    offer = offered(client.trained())
    assert check_manifest(ONE.federation, ROUND_0, offer.manifest, offer.shards, 0) == manifest_of(offer)


def test_a_commit_ends_the_work_on_the_one_before(client: Client) -> None:
    client.order(ORDER_0)
    assert client.fetch_commit(1) == [fx.AbandonTraining(), fx.Fold(1)]
    effects = client.trained(base_round=0)
    assert effects == []
    client.do(ev.Folded(head(1)))
    assert only(client.order(work_order(ONE, head(1), 0)), fx.Train)
    assert not sent(client.trained(base_round=0), Offer)
    assert sent(client.trained(base_round=1), Offer)


def test_while_folding_nothing_is_begun(client: Client) -> None:
    client.fetch_commit(1)
    assert client.order(work_order(ONE, head(1), 0)) == []
    assert only(client.do(ev.Folded(head(1))), fx.Train)


def test_the_same_bytes_are_offered_to_every_new_home_until_a_commit_moves_on(client: Client) -> None:
    client.order(ORDER_0)
    first = offered(client.trained())
    client.hear(receipt_by(home_identity(client), first))
    for _ in range(2):
        client.line(client.session.home or "", "down")
        assert offered(client.welcome(highest_sequence=1)) == first
    client.commit(head(1, counted=1))
    client.line(client.session.home or "", "down")
    client.line(ONE.federation.brokers[0].name, "up")
    assert not sent(client.welcome(server_round=1), Offer)


def test_work_done_while_no_broker_is_there_is_offered_to_the_next_one(client: Client) -> None:
    client.order(ORDER_0)
    for broker in ONE.federation.brokers:
        client.line(broker.name, "down")
    assert not sent(client.trained(), Offer)
    client.line(ONE.federation.brokers[1].name, "up")
    assert offered(client.welcome())
    assert not only(client.order(ORDER_0), fx.Train)


def test_nothing_is_offered_before_the_new_home_has_answered(client: Client) -> None:
    client.order(ORDER_0)
    client.line(client.session.home or "", "down")
    assert not sent(client.trained(), Offer)
    assert sent(client.welcome(), Offer)


def test_a_large_offer_goes_without_the_bytes_inside() -> None:
    client = Client()
    client.join()
    client.order(ORDER_0)
    shards = tuple(msgspec.structs.replace(ref, inline=b"x" * 2**17) for ref in update_refs(1))
    effects = client.do(ev.Trained(0, shards, 1.0, 1.0, 8, 2, {}, 0.1))
    assert [ref.inline for ref in offered(effects).shards] == [b""] * 3


def test_a_receipt_is_told_once_and_a_forged_one_not_at_all(client: Client) -> None:
    client.order(ORDER_0)
    offer = offered(client.trained())
    good = receipt_by(home_identity(client), offer)
    forged = Signed(good.receipt.node_id, good.receipt.payload, bytes(64))
    other = sign(home_identity(client), Receipt(ONE.federation.fingerprint, b"x" * 32))
    for bad in (forged, other, ME.sign("Receipt", good.receipt.payload)):
        assert client.hear(ReceiptNotice(bad)) == []
    assert told(client.hear(good)) == ["contribution taken"]
    assert client.hear(good) == []


def test_an_order_again_before_the_receipt_has_the_same_bytes_offered_again(client: Client) -> None:
    client.order(ORDER_0)
    offer = offered(client.trained())
    assert offered(client.order(ORDER_0)) == offer
    client.hear(receipt_by(home_identity(client), offer))
    assert client.order(ORDER_0) == []


def test_an_upload_that_goes_on_is_not_offered_again_and_one_that_stalls_is_within_seconds(client: Client) -> None:
    client.order(ORDER_0)
    offer = offered(client.trained())
    for _ in range(100):
        client.do(ev.Pulled(str(client.session.home)))
        assert sent(client.tick(AGAIN_SECONDS - 0.1), Offer) == []
    assert sent(client.tick(0.2), Offer) == [offer]
    # By then the broker has given the stalled transfer up, and begins anew.
    assert sent(client.tick(STALL_SECONDS), Offer) == [offer]


def test_a_contribution_that_a_commit_counted_is_counted_and_forgotten(client: Client) -> None:
    client.order(ORDER_0)
    offered(client.trained())
    effects = client.commit(head(1, counted=1))
    assert only(effects, fx.Forget) == [fx.Forget()]
    assert client.session.contributions == 1 and "contribution not counted" not in told(client.all)
    client.order(work_order(ONE, head(1), 0))
    assert manifest_of(offered(client.trained(1, seed=1))).sequence == 2


def test_a_contribution_that_a_commit_left_out_is_told_and_new_work_has_a_new_sequence(client: Client) -> None:
    client.order(ORDER_0)
    client.trained()
    effects = client.commit(head(1))
    assert "contribution not counted" in told(effects) and only(effects, fx.Forget)
    assert client.session.contributions == 0
    client.order(work_order(ONE, head(1), 0))
    assert manifest_of(offered(client.trained(1, seed=1))).sequence == 2


def test_a_refusal_is_told_with_its_reason_and_work_goes_on_with_the_next_round(client: Client) -> None:
    client.order(ORDER_0)
    offer = offered(client.trained())
    assert client.hear(Refused(Reason.WRONG_NORM, "?", b"x" * 32)) == []
    (tell,) = client.hear(Refused(Reason.WRONG_NORM, "the norm is off", signed_hash(offer.manifest)))
    assert isinstance(tell, fx.Tell) and tell.warning
    assert tell.fields == {"reason": Reason.WRONG_NORM, "text": "the norm is off"}
    client.commit(head(1))
    assert only(client.order(work_order(ONE, head(1), 0)), fx.Train)


def test_training_that_diverged_skips_the_round_and_takes_part_in_the_next(client: Client) -> None:
    client.order(ORDER_0)
    effects = client.do(ev.TrainingFailed(0, RavnestError("the loss is not finite")))
    assert sent(effects, Skip) == [Skip(0, "the loss is not finite")] and told(effects) == ["nothing to send"]
    assert not sent(client.all, Offer)
    client.commit(head(1))
    client.order(work_order(ONE, head(1), 0))
    assert manifest_of(offered(client.trained(1))).sequence == 1


def test_a_failure_of_abandoned_training_skips_nothing(client: Client) -> None:
    client.order(ORDER_0)
    client.commit(head(1))
    assert client.do(ev.TrainingFailed(0, RavnestError("the loss is not finite"))) == []


def test_what_the_federation_waits_for_is_told(client: Client) -> None:
    assert told(client.hear(Waiting(1, "waiting 1/2 contributions"))) == ["waiting"]
    assert client.hear(Waiting(1, "")) == []


def test_the_last_commit_ends_the_session_after_its_model_was_evaluated(client: Client) -> None:
    client.order(ORDER_0)
    client.trained()
    effects = client.commit(head(1, counted=1, stop="the last of 1 rounds is committed"))
    assert not only(effects, fx.End) and only(effects, fx.Evaluate) == [fx.Evaluate(1)]
    effects = client.do(ev.Evaluated(1, {}, 0))
    assert len(sent(effects, EvaluationNotice)) == 1 and len(sent(effects, Goodbye)) == 1
    assert not only(effects, fx.End)
    (end,) = only(client.hear(Goodbye("heard")), fx.End)
    assert end.error is None and "training has ended" in end.reason
    assert client.session.contributions == 1


def test_a_recipe_that_fails_every_time_ends_the_client_and_a_round_that_failed_is_not_tried_again(
    client: Client,
) -> None:
    error = RecipeError("recipe r.py: loss() failed", "correct the recipe")
    for base in range(3):
        order = work_order(ONE, ROUND_0 if base == 0 else head(base), 0)
        assert only(client.order(order), fx.Train)
        effects = client.do(ev.TrainingFailed(base, error))
        assert sent(effects, Skip) == [Skip(base, str(error))]
        assert only(client.order(order), fx.Train) == []
        if base < 2:
            assert not only(effects, fx.End)
            client.commit(head(base + 1))
    (end,) = only(effects, fx.End)
    assert end.error is error


def test_leaving_abandons_the_work_under_way(client: Client) -> None:
    client.order(ORDER_0)
    effects = client.do(ev.Leave())
    assert [type(effect) for effect in effects] == [fx.AbandonTraining, fx.Send]


def test_who_wishes_to_finish_hands_the_round_in_and_then_says_goodbye(client: Client) -> None:
    client.order(ORDER_0)
    effects = client.do(ev.Leave(finish=True))
    assert told(effects) == ["finishing the round"] and not sent(effects, Goodbye)
    offer = offered(client.trained())
    effects = client.hear(receipt_by(home_identity(client), offer))
    assert len(sent(effects, Goodbye)) == 1
    (end,) = only(client.hear(Goodbye("heard")), fx.End)
    assert end.error is None


def test_who_finishes_begins_no_other_round_and_leaves_when_the_round_closed_without_it(client: Client) -> None:
    client.order(ORDER_0)
    client.do(ev.Leave(finish=True))
    effects = client.fetch_commit(1)
    assert only(effects, fx.AbandonTraining) and len(sent(effects, Goodbye)) == 1


def test_a_second_wish_drops_the_round(client: Client) -> None:
    client.order(ORDER_0)
    client.do(ev.Leave(finish=True))
    effects = client.do(ev.Leave(finish=True))
    assert only(effects, fx.AbandonTraining) and len(sent(effects, Goodbye)) == 1


def test_with_nothing_under_way_finishing_is_leaving(client: Client) -> None:
    assert len(sent(client.do(ev.Leave(finish=True)), Goodbye)) == 1


def test_what_the_machine_can_do_is_said_before_work_is_asked_for_and_to_each_new_home() -> None:
    can = Capability(device="cpu", speeds=(Speed(4, 10.0),), micro_batch=4)
    client = Client()
    assert not sent(client.join(), CapabilityNotice)
    client = Client()
    for broker in ONE.federation.brokers:
        client.line(broker.name, "up")
    client.tick(1.0)
    client.welcome()
    client.do(ev.FederationRead(ONE.federation))
    messages = [one.message for one in only(client.do(ev.Prepared(ROUND_0, can)), fx.Send)]
    assert messages == [CapabilityNotice(can), Ready(0)]
    assert client.session.home is not None
    client.line(client.session.home, "down")
    sent_now = [one.message for one in only(client.welcome(), fx.Send)]
    messages = [one for one in sent_now if not isinstance(one, Hello)]
    assert messages == [CapabilityNotice(can), Ready(0)]


def test_other_brokers_are_asked_to_let_it_fetch_and_then_every_blob_may_come_from_them() -> None:
    client = Client()
    names = [broker.name for broker in ONE.federation.brokers]
    for name in names:
        client.line(name, "up")
    client.tick(1.0)
    greeted = only(client.welcome(), fx.Send)
    home = client.session.home
    guests = {one.broker for one in greeted if isinstance(one.message, Hello) and one.message.guest}
    assert guests == set(names) - {home}
    other, third = sorted(guests)
    welcome = Welcome(1, ONE.federation.fingerprint, "", 0, 0, BlobRef.of(b"f"), BlobRef.of(b"m"))
    assert client.hear(welcome, other) == []
    client.do(ev.FederationRead(ONE.federation))
    client.do(ev.Prepared(ROUND_0, None))
    (fetch,) = only(client.hear(CommitNotice(1, commit_ref(1))), fx.Fetch)
    assert (fetch.broker, fetch.also) == (home, (other,))
    client.line(third, "down")
    assert [one.message.guest for one in only(client.line(third, "up"), fx.Send)] == [True]  # type: ignore[union-attr]
    client.line(other, "down")
    client.hear(CommitNotice(2, commit_ref(2)))
    client.do(ev.Missed(commit_ref(1).hash))
    assert client.session.home != home


def test_a_checkpoint_is_taken_up_where_it_is_further_than_the_commits(client: Client) -> None:
    checkpoint = BlobRef.of(b"checkpoint" * 9999, inline=False)
    assert only(client.hear(CheckpointNotice(7, commit_ref(7), checkpoint)), fx.Fetch)[0].ref == commit_ref(7)
    client.do(ev.Fetched(commit_ref(7).hash))
    (fetch,) = only(client.do(ev.CommitOpened(7, update_refs(7))), fx.Fetch)
    assert fetch.ref == checkpoint
    assert only(client.do(ev.Fetched(checkpoint.hash)), fx.TakeUp) == [fx.TakeUp(7, checkpoint)]
    client.do(ev.Folded(head(7)))
    assert client.session.head == head(7)
    assert client.hear(CheckpointNotice(6, commit_ref(6), checkpoint)) == []


def test_a_wrong_checkpoint_costs_the_broker_that_offered_it(client: Client) -> None:
    checkpoint = BlobRef.of(b"checkpoint" * 9999, inline=False)
    home = client.session.home
    client.hear(CheckpointNotice(7, commit_ref(7), checkpoint))
    client.do(ev.Fetched(commit_ref(7).hash))
    client.do(ev.CommitOpened(7, update_refs(7)))
    client.do(ev.Fetched(checkpoint.hash))
    assert told(client.do(ev.CommitRefused("it holds another state")))[0] == "home broker left"
    assert client.session.home != home
