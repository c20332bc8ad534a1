"""Which offers a broker refuses before it takes a byte, under which name, and that a good one is taken right afterwards."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from brokers.effects import Fetch, Inspect, SaveContribution
from ravnest_fed import codecs
from ravnest_fed.facts import BlobRef
from ravnest_fed.head import CountedSequences
from ravnest_fed.identity import Signed
from ravnest_fed.messages import Offer, Reason
from ravnest_fed.parameters import BLOCK
from tests.building import identity, work_order
from tests.uploading import HEAD, LATER, ONE, Desk, good, refusals

Make = Callable[[], Offer]


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
        assert refusals(desk.offer(good(head=head, sequence=used).offer)) == [("s", Reason.COUNTED)]
    desk.sequences.saw(client, 8, b"another manifest")
    for used in (6, 8):
        assert refusals(desk.offer(good(head=head, sequence=used).offer)) == [("s", Reason.REPLAYED)]
    desk.admit(good(head=head, sequence=9))
