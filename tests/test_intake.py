"""Uploads: from an offer to an admitted contribution, past liars, lost sessions and second deltas."""

import pytest

from brokers.effects import Fetch, Inspect, SaveContribution, SaveEquivocation, SendClient
from brokers.events import Inspected
from ravnest_fed.facts import Manifest, Receipt, open_signed
from ravnest_fed.messages import Reason, ReceiptNotice
from tests.building import delta
from tests.uploading import HEAD, LATER, ONE, Desk, good, refusals


def test_a_good_contribution_is_fetched_inspected_made_durable_and_only_then_receipted() -> None:
    desk, made = Desk(), good()
    fetched = desk.offer(made.offer)
    assert [effect.ref.hash for effect in fetched if isinstance(effect, Fetch)] == [ref.hash for ref in made.shards]
    assert all(isinstance(one, Fetch) and one.donors == ("s",) and one.into == "spool" for one in fetched)
    blobs = list(dict.fromkeys(ref.hash for ref in made.shards))
    for blob in blobs[:-1]:
        assert desk.intake.on_fetched(blob) == []
    bare = tuple(ref.bare() for ref in made.shards)
    assert desk.intake.on_fetched(blobs[-1]) == [Inspect(made.manifest_hash, made.manifest, bare)]
    assert desk.intake.on_fetched(blobs[-1]) == []
    saved, sent = desk.intake.on_inspected(Inspected(made.manifest_hash, "", ""), HEAD)
    assert saved == SaveContribution(made.signed, made.manifest, bare)
    assert isinstance(sent, SendClient) and isinstance(sent.message, ReceiptNotice)
    receipt = open_signed(Receipt, sent.message.receipt, ONE.brokers[0].public_key)
    assert receipt == Receipt(ONE.federation.fingerprint, made.manifest_hash)
    assert [upload.manifest for upload in desk.intake.admitted] == [made.manifest]


def test_the_same_offer_again_is_receipted_again_and_not_fetched() -> None:
    desk, made = Desk(), good()
    desk.admit(made, "first")
    (again,) = desk.offer(made.offer, "second")
    assert isinstance(again, SendClient) and again.session == "second" and isinstance(again.message, ReceiptNotice)


def test_a_contribution_known_from_another_broker_is_taken_in_full_before_it_is_receipted() -> None:
    desk, made = Desk(), good()
    desk.known.add(made.signed, made.manifest, made.shards, ONE.brokers[1].node_id)
    desk.sequences.saw(made.manifest.client, made.manifest.sequence, made.manifest_hash)
    assert len(desk.offer(made.offer)) == len(made.shards)
    effects = desk.admit(made, "t")
    assert [type(effect) for effect in effects] == [SaveContribution, SendClient]
    known = desk.known.get(made.manifest_hash)
    assert known is not None and known.home == ONE.brokers[0].node_id and len(desk.known) == 1


def test_an_offer_repeated_from_a_new_session_goes_on_with_what_is_missing() -> None:
    desk, made = Desk(), good()
    desk.offer(made.offer, "old")
    desk.intake.on_fetched(made.shards[0].hash)
    assert desk.intake.on_missed(made.shards[1].hash, ()) == []
    again = desk.offer(made.offer, "new")
    assert [(effect.ref, effect.donors) for effect in again if isinstance(effect, Fetch)] == [
        (ref, ("new",)) for ref in made.shards[1:]
    ]
    for ref in made.shards[1:]:
        desk.intake.on_fetched(ref.hash)
    (_, sent) = desk.intake.on_inspected(Inspected(made.manifest_hash, "", ""), HEAD)
    assert isinstance(sent, SendClient) and sent.session == "new"


def test_a_second_delta_for_a_round_is_kept_as_evidence_and_neither_counts() -> None:
    desk = Desk()
    first, second = good(), good(sequence=2, values=delta(ONE.federation.schema, 99))
    desk.admit(first)
    effects = desk.offer(second.offer)
    assert refusals(effects) == [("s", Reason.EQUIVOCATION)]
    assert effects[-1] == SaveEquivocation(first.manifest.client, 0, first.signed, second.signed)
    assert desk.known.equivocated(first.manifest.client)
    assert desk.known.countable(frozenset(ONE.federation.roster)) == []
    assert refusals(desk.offer(good(sequence=3).offer)) == [("s", Reason.EQUIVOCATION)]
    assert not refusals(desk.admit(good(1)))


def test_nobody_can_make_another_client_equivocate() -> None:
    desk, first = Desk(), good()
    desk.admit(first)
    forged = good(sequence=2, signer=ONE.members[1])
    assert refusals(desk.offer(forged.offer)) == [("s", Reason.WRONG_SIGNATURE)]
    assert len(desk.known) == 1


def test_wrong_bytes_are_refused_and_the_right_ones_taken_afterwards() -> None:
    desk, made = Desk(), good()
    desk.offer(made.offer, "liar")
    assert refusals(desk.intake.on_missed(made.shards[0].hash, ("liar",))) == [("liar", Reason.WRONG_HASH)]
    assert not refusals(desk.admit(made))


def test_a_liar_does_not_spoil_the_upload_of_another_client_that_holds_the_same_shard() -> None:
    desk, honest, liar = Desk(), good(0), good(1)
    assert honest.shards[-1].hash == liar.shards[-1].hash  # counters grow alike everywhere
    desk.offer(honest.offer, "honest")
    desk.offer(liar.offer, "liar")
    effects = desk.intake.on_missed(liar.shards[-1].hash, ("liar",))
    assert refusals(effects) == [("liar", Reason.WRONG_HASH)]
    assert Fetch(honest.shards[-1], ("honest",), "spool") in effects
    assert not refusals(desk.admit(honest, "honest"))


def test_one_arrival_serves_every_upload_with_that_shard() -> None:
    desk, made, other = Desk(), good(0), good(1)
    desk.offer(made.offer)
    desk.offer(other.offer)
    for ref in (*made.shards[:-1], *other.shards[:-1]):
        assert desk.intake.on_fetched(ref.hash) == []
    assert [type(effect) for effect in desk.intake.on_fetched(made.shards[-1].hash)] == [Inspect, Inspect]


@pytest.mark.parametrize("reason", [Reason.NOT_FINITE, Reason.DAMAGED_PAYLOAD, Reason.WRONG_NORM, Reason.OUT_OF_RANGE])
def test_what_the_inspection_finds_is_refused_and_a_good_one_taken_afterwards(reason: str) -> None:
    desk, made = Desk(), good()
    desk.upload(made.offer, "bad")
    effects = desk.intake.on_inspected(Inspected(made.manifest_hash, reason, "a finding"), HEAD)
    assert refusals(effects) == [("bad", reason)] and not desk.intake.admitted
    assert not any(isinstance(effect, SaveContribution) for effect in effects)
    assert desk.intake.on_inspected(Inspected(made.manifest_hash, "", ""), HEAD) == []
    assert not refusals(desk.admit(good(sequence=2)))


def test_a_round_that_closed_during_the_upload_makes_it_out_of_date() -> None:
    desk, made = Desk(), good()
    desk.upload(made.offer)
    effects = desk.intake.on_inspected(Inspected(made.manifest_hash, "", ""), LATER)
    assert refusals(effects) == [("s", Reason.OUT_OF_DATE)] and not desk.intake.admitted


def test_a_commit_forgets_uploads_that_are_not_complete() -> None:
    desk, made = Desk(), good()
    desk.offer(made.offer)
    desk.intake.forget_before(LATER)
    assert [desk.intake.on_fetched(ref.hash) for ref in made.shards] == [[]] * len(made.shards)


def test_a_client_has_few_uploads_at_once() -> None:
    desk = Desk()
    offers = [good(sequence=number, values=delta(ONE.federation.schema, number)) for number in range(1, 9)]
    for made in offers:
        desk.offer(made.offer)
    inspected = [
        effect
        for made in offers
        for ref in made.shards
        for effect in desk.intake.on_fetched(ref.hash)
        if isinstance(effect, Inspect)
    ]
    assert {effect.manifest_hash for effect in inspected} == {made.manifest_hash for made in offers[-2:]}


def test_the_receipt_is_for_this_federation_and_manifest_alone() -> None:
    desk, made = Desk(), good()
    _, sent = desk.admit(made)
    assert isinstance(sent, SendClient) and isinstance(sent.message, ReceiptNotice)
    assert open_signed(Receipt, sent.message.receipt, ONE.brokers[1].public_key) is None
    assert open_signed(Manifest, sent.message.receipt, ONE.brokers[0].public_key) is None
