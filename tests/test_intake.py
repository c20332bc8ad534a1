"""Uploads: what is refused, under which name, and that a good contribution is taken right afterwards."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from building import Contribution, Tiny, contribution, delta, identity, tiny, work_order

from brokers.contributions import Contributions
from brokers.effects import Effect, Fetch, Inspect, SaveContribution, SaveEquivocation, SendClient
from brokers.events import Inspected
from brokers.intake import Intake
from ravnest_fed import codecs
from ravnest_fed.head import CountedSequences, Head
from ravnest_fed.identity import Signed
from ravnest_fed.messages import BlobRef, Manifest, Offer, Reason, Receipt, ReceiptNotice, Refused, open_signed
from ravnest_fed.parameters import BLOCK

ONE = tiny()
HEAD = ONE.replica().head
LATER = msgspec.structs.replace(HEAD, server_round=3, commit_hash=b"c" * 32, scale_bits=20)
Make = Callable[[], Offer]


class Desk:
    """One broker's intake on top of `head`, with what the round took so far."""

    def __init__(self, head: Head = HEAD, one: Tiny = ONE) -> None:
        self.one = one
        self.head = head
        self.intake = Intake(one.federation, one.brokers[0])
        self.known = Contributions(one.federation, head)
        self.highest: dict[str, int] = {}

    def offer(self, offer: Offer, session: str = "s") -> list[Effect]:
        highest = self.highest.get(offer.manifest.node_id, 0)
        return self.intake.offer(session, offer, self.head, self.known, highest)

    def upload(self, offer: Offer, session: str = "s") -> list[Effect]:
        """Offer, and let every shard arrive."""
        effects = self.offer(offer, session)
        for blob in dict.fromkeys(effect.ref.hash for effect in effects if isinstance(effect, Fetch)):
            effects += self.intake.on_fetched(blob)
        return effects

    def admit(self, made: Contribution, session: str = "s") -> list[Effect]:
        """Offer, upload and inspect a sound contribution, and hand it to the round."""
        effects = self.upload(made.offer, session)
        assert [type(effect) for effect in effects if not isinstance(effect, Fetch)] == [Inspect], effects
        effects = self.intake.on_inspected(Inspected(made.manifest_hash, "", ""), self.head)
        taken = self.intake.admitted.pop()
        assert not self.intake.admitted
        self.known.add(taken.signed, taken.manifest, taken.shards, self.one.brokers[0].node_id)
        self.highest[taken.manifest.client] = taken.manifest.sequence
        return effects


def refusals(effects: list[Effect]) -> list[tuple[str, str]]:
    return [
        (effect.session, effect.message.reason)
        for effect in effects
        if isinstance(effect, SendClient) and isinstance(effect.message, Refused)
    ]


def good(member: int = 0, head: Head = HEAD, **changes: Any) -> Contribution:
    return contribution(ONE, head, member, **changes)


def order_with(**changes: Any) -> Signed:
    return work_order(ONE, HEAD, 0, **changes)


def altered(**changes: Any) -> Make:
    """A good contribution with fields of its manifest replaced before it was signed."""
    return lambda: good(**changes).offer


def reordered(**changes: Any) -> Make:
    """A good contribution for a work order with fields replaced before a broker signed it."""
    return lambda: good(order=order_with(**changes)).offer


def unsigned() -> Offer:
    made = good()
    return Offer(Signed(made.signed.node_id, made.signed.payload, bytes(64)), made.shards)


def signed_by_another() -> Offer:
    return good(signer=ONE.members[1]).offer


def in_anothers_name() -> Offer:
    made = good(signer=ONE.members[1])
    return Offer(Signed(ONE.members[0].node_id, made.signed.payload, made.signed.signature), made.shards)


def not_a_manifest() -> Offer:
    return Offer(ONE.members[0].sign("Manifest", b"\xff"), good().shards)


def by_a_stranger() -> Offer:
    return good(signer=identity("stranger")).offer


def order_by_a_client() -> Offer:
    order = order_with()
    return good(order=ONE.members[0].sign("WorkOrder", order.payload)).offer


def order_of_another_client() -> Offer:
    return good(order=work_order(ONE, HEAD, 1)).offer


def order_forged() -> Offer:
    order = order_with()
    return good(order=Signed(order.node_id, order.payload, bytes(64))).offer


def other_shards() -> Offer:
    return Offer(good().signed, good(1).shards)


def swapped_shards() -> Offer:
    made = good()
    first, second, *rest = made.shards
    return Offer(made.signed, (second, first, *rest))


def fewer_shards() -> Offer:
    made = good()
    return Offer(made.signed, made.shards[:-1])


def longer_shard() -> Offer:
    made = good()
    limit = codecs.get(ONE.federation.codecs.up).encoded_size(BLOCK)
    return Offer(made.signed, (BlobRef(made.shards[0].hash, limit + 1), *made.shards[1:]))


def empty_shard() -> Offer:
    made = good()
    return Offer(made.signed, (BlobRef(made.shards[0].hash, 0), *made.shards[1:]))


BAD: list[tuple[str, Make]] = [
    (Reason.WRONG_SIGNATURE, unsigned),
    (Reason.WRONG_SIGNATURE, signed_by_another),
    (Reason.WRONG_SIGNATURE, in_anothers_name),
    (Reason.WRONG_SIGNATURE, not_a_manifest),
    (Reason.UNKNOWN_CLIENT, by_a_stranger),
    (Reason.WRONG_FEDERATION, altered(federation=b"x" * 32)),
    (Reason.WRONG_BASE, altered(base_hash=b"x" * 32)),
    (Reason.WRONG_BASE, altered(base_round=7, last_round=8)),
    (Reason.WRONG_BASE, altered(last_round=2)),
    (Reason.OUT_OF_DATE, altered(base_round=-1)),
    (Reason.OUT_OF_DATE, altered(last_round=0)),
    (Reason.REPLAYED, altered(sequence=0)),
    (Reason.REPLAYED, altered(sequence=-5)),
    (Reason.REPLAYED, altered(sequence=2**48 + 1)),
    (Reason.WRONG_ORDER, order_by_a_client),
    (Reason.WRONG_ORDER, order_of_another_client),
    (Reason.WRONG_ORDER, order_forged),
    (Reason.WRONG_ORDER, reordered(base_round=1)),
    (Reason.WRONG_ORDER, reordered(base_hash=b"x" * 32)),
    (Reason.WRONG_ORDER, reordered(federation=b"x" * 32)),
    (Reason.WRONG_ORDER, reordered(local_steps=10**6)),
    (Reason.BAD_COUNT, altered(num_examples=0)),
    (Reason.BAD_COUNT, altered(num_examples=-1)),
    (Reason.BAD_COUNT, altered(num_examples=ONE.federation.max_examples + 1)),
    (Reason.BAD_COUNT, altered(num_examples=2**62)),
    (Reason.BAD_COUNT, altered(local_steps=1)),  # too few steps for so many examples
    (Reason.BAD_COUNT, altered(local_steps=0)),
    (Reason.BAD_COUNT, altered(local_steps=-2)),
    (Reason.BAD_COUNT, altered(local_steps=3)),
    (Reason.BAD_COUNT, altered(training_seconds=float("nan"))),
    (Reason.BAD_COUNT, altered(training_seconds=-1.0)),
    (Reason.BAD_METRICS, altered(metrics={"loss": float("nan")})),
    (Reason.BAD_METRICS, altered(metrics={"loss": float("inf")})),
    (Reason.BAD_METRICS, altered(metrics={"": 1.0})),
    (Reason.BAD_METRICS, altered(metrics={"m" * 65: 1.0})),
    (Reason.BAD_METRICS, altered(metrics={f"m{number}": 1.0 for number in range(33)})),
    (Reason.WRONG_CODEC, altered(codec="fp32")),
    (Reason.WRONG_CODEC, altered(codec="")),
    (Reason.WRONG_SHAPE, altered(shard_count=4)),
    (Reason.WRONG_SHAPE, fewer_shards),
    (Reason.WRONG_HASH, other_shards),
    (Reason.WRONG_HASH, swapped_shards),
    (Reason.WRONG_LENGTH, longer_shard),
    (Reason.WRONG_LENGTH, empty_shard),
    (Reason.NOT_FINITE, altered(norm=float("nan"))),
    (Reason.NOT_FINITE, altered(norm=float("inf"))),
    (Reason.NOT_FINITE, altered(max_abs=float("nan"))),
    (Reason.WRONG_NORM, altered(norm=-1.0)),
    (Reason.WRONG_NORM, altered(max_abs=-1.0)),
    (Reason.OUT_OF_RANGE, altered(max_abs=2.0**64)),
]


@pytest.mark.parametrize(("reason", "make"), BAD, ids=[f"{number}-{reason}" for number, (reason, _) in enumerate(BAD)])
def test_a_bad_offer_is_refused_by_name_and_a_good_one_taken_afterwards(reason: str, make: Make) -> None:
    desk, offer = Desk(), make()
    effects = desk.offer(offer, "bad")
    assert refusals(effects) == [("bad", reason)]
    assert not any(isinstance(effect, (Fetch, Inspect, SaveContribution)) for effect in effects)
    assert desk.intake.refusals == {reason: 1}
    assert not refusals(desk.admit(good()))


def test_after_the_end_everything_is_refused() -> None:
    desk = Desk(msgspec.structs.replace(HEAD, stop="the last of 1 rounds is committed"))
    assert refusals(desk.offer(good().offer)) == [("s", Reason.STOPPED)]


def test_a_value_past_the_rounds_fixed_point_is_refused() -> None:
    reach = 2.0 ** (62 - 16 - 10 - 20)
    desk = Desk(LATER)
    assert refusals(desk.offer(good(head=LATER, max_abs=reach).offer)) == [("s", Reason.OUT_OF_RANGE)]
    desk.admit(good(head=LATER, max_abs=float(np.nextafter(reach, 0))))


def test_a_sequence_used_before_is_refused_by_the_head_and_by_what_this_broker_saw() -> None:
    client = ONE.members[0].node_id
    head = msgspec.structs.replace(HEAD, counted={client: CountedSequences(5, 0b101)})
    desk = Desk(head)
    for used in (5, 4, 2):
        assert refusals(desk.offer(good(head=head, sequence=used).offer)) == [("s", Reason.REPLAYED)]
    desk.highest[client] = 8
    for used in (6, 8):
        assert refusals(desk.offer(good(head=head, sequence=used).offer)) == [("s", Reason.REPLAYED)]
    desk.admit(good(head=head, sequence=9))


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
    desk.highest[made.manifest.client] = made.manifest.sequence
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
    assert len(desk.known) == 0 and desk.known.equivocated(first.manifest.client)
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
    desk.intake.forget_before(1)
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
