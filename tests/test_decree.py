"""A body and the signed facts that it rests on: the findings against a body that was derived in any other way."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ravnest_fed.decree import (
    check_body,
    contribution_finding,
    count,
    evaluation_of,
    evidence_for,
    order_of,
)
from ravnest_fed.errors import VerificationError
from ravnest_fed.facts import BlobRef, Body, Counted, Evaluation, decode, encode, sign
from ravnest_fed.identity import Signed
from tests.building import Contribution, contribution, decide, evaluation, identity, tiny, work_order

ONE = tiny(brokers=3, members=4, settings={"max_contributions": "3", "max_metrics": "2"})
FEDERATION = ONE.federation
REPLICA = ONE.replica()
for _ in range(2):
    _before = decide(ONE, REPLICA, [contribution(ONE, REPLICA.head, member) for member in (0, 1)])
    REPLICA.fold(_before.body, _before.raw, _before.read_update)
HEAD = REPLICA.head
OFFERS = sorted((contribution(ONE, HEAD, member) for member in (0, 1, 2)), key=lambda each: each.manifest.client)
MEASURED = [evaluation(ONE, HEAD, 0, {"loss": 0.5}), evaluation(ONE, HEAD, 3, {"loss": 1.5}, num_examples=30)]
DECIDED = decide(ONE, REPLICA, OFFERS, MEASURED)
BODY = DECIDED.body


def refused(body: Body, evidence: bytes, finding: str) -> None:
    with pytest.raises(VerificationError, match=finding) as caught:
        check_body(FEDERATION, HEAD, body, evidence)
    assert caught.value.what.startswith(f"round {body.server_round}: ")


def over(contributions: list[Contribution], evaluations: list[Signed] | None = None) -> tuple[Body, bytes]:
    """The body and evidence that count these contributions, in this order, with counts drawn from their manifests."""
    evidence = evidence_for([each.signed for each in contributions], MEASURED if evaluations is None else evaluations)
    counted = tuple(count(FEDERATION, HEAD, each.manifest, each.manifest_hash) for each in contributions)
    body = msgspec.structs.replace(BODY, counted=counted, evidence=BlobRef.of(evidence, inline=False))
    return body, evidence


def test_a_body_that_follows_from_its_facts_is_accepted() -> None:
    check_body(FEDERATION, HEAD, BODY, DECIDED.evidence)
    check_body(FEDERATION, HEAD, decode(Body, DECIDED.raw), DECIDED.evidence)


def test_the_draft_depends_on_no_order() -> None:
    again = decide(ONE, REPLICA, OFFERS[::-1], MEASURED[::-1])
    assert again.raw == DECIDED.raw
    assert again.evidence == DECIDED.evidence


def test_the_draft_holds_the_means_the_shares_and_the_next_bounds() -> None:
    assert BODY.metrics == {"loss": 1.25}
    assert BODY.total_share == sum(one.share for one in BODY.counted)
    assert BODY.next_clip_bound < math.inf
    assert (BODY.server_round, BODY.parent) == (3, HEAD.commit_hash)


TAMPERED: list[tuple[str, Any, str]] = [
    ("federation", b"\1" * 32, "another federation"),
    ("server_round", 2, "does not follow the head"),
    ("server_round", 4, "does not follow the head"),
    ("parent", b"\1" * 32, "does not follow the head"),
    ("counted", BODY.counted[:-1], "other contributions than its evidence"),
    ("counted", (), "other contributions than its evidence"),
    ("counted", (*BODY.counted, BODY.counted[-1]), "other contributions than its evidence"),
    ("counted", BODY.counted[::-1], "is weighed wrongly"),
    ("total_share", BODY.total_share + 1, "total_share is not"),
    ("total_steps", BODY.total_steps + 1, "total_steps is not"),
    ("scale_bits", BODY.scale_bits - 1, "scale_bits is not"),
    ("evidence", BlobRef.of(b"other"), "another hash"),
    ("metrics", {"loss": 1.0}, "metrics is not"),
    ("metrics", {}, "metrics is not"),
    ("metrics", {"loss": 1.25, "accuracy": 1.0}, "metrics is not"),
    ("updates", BODY.updates[:-1], "the update has 4 shards, the schema 5"),
    ("updates", tuple(BlobRef.of(update) for update in DECIDED.updates), "updates is not"),
    ("owners", BODY.owners[:-1], "owners do not fit"),
    ("owners", (3, *BODY.owners[1:]), "owners do not fit"),
    ("owners", (-1, *BODY.owners[1:]), "owners do not fit"),
    ("next_scale_bits", BODY.next_scale_bits + 1, "next_scale_bits is not"),
    ("next_clip_bound", math.inf, "next_clip_bound is not"),
    ("next_clip_bound", math.nan, "next_clip_bound is not"),
    ("stop", "enough", "stop is not"),
    ("change", OFFERS[0].signed, "not signed by this federation's operator"),
    ("stop", "the date 2030-01-01T00:00:00+00:00 is reached", "stop is not"),
]


@pytest.mark.parametrize(("field", "value", "finding"), TAMPERED)
def test_a_tampered_field_is_found(field: str, value: Any, finding: str) -> None:
    refused(msgspec.structs.replace(BODY, **{field: value}), DECIDED.evidence, finding)


def test_every_field_is_tampered_with_or_checked_by_folding() -> None:
    assert set(Body.__struct_fields__) - {field for field, _, _ in TAMPERED} == {"model_hash", "state_hash"}


@pytest.mark.parametrize("field", Counted.__struct_fields__)
def test_a_tampered_count_is_found(field: str) -> None:
    first = BODY.counted[0]
    value = getattr(first, field)
    others = {str: ONE.members[3].node_id, bytes: b"\1" * 32, tuple: ((0, 1),)}
    other = others.get(type(value)) or value + 1
    tampered = msgspec.structs.replace(first, **{field: other})
    refused(
        msgspec.structs.replace(BODY, counted=(tampered, *BODY.counted[1:])), DECIDED.evidence, "is weighed wrongly"
    )


def member_of(offer: Contribution) -> int:
    return [member.node_id for member in ONE.members].index(offer.manifest.client)


FIRST = member_of(OFFERS[0])
BAD: list[tuple[str, Callable[[], Contribution], str]] = [
    (
        "another federation",
        lambda: contribution(ONE, HEAD, FIRST, federation=b"\1" * 32),
        "belongs to another federation",
    ),
    ("signed by another", lambda: contribution(ONE, HEAD, FIRST, signer=ONE.members[3]), "has a wrong signature"),
    ("signed by a broker", lambda: contribution(ONE, HEAD, FIRST, signer=ONE.brokers[0]), "has a wrong signature"),
    ("signed by a stranger", lambda: contribution(ONE, HEAD, FIRST, signer=identity("x")), "has a wrong signature"),
    (
        "an older base",
        lambda: contribution(ONE, HEAD, FIRST, base_round=1),
        "has a base that this round does not count",
    ),
    ("a later base", lambda: contribution(ONE, HEAD, FIRST, base_round=3), "has a base that this round does not count"),
    (
        "another base",
        lambda: contribution(ONE, HEAD, FIRST, base_hash=b"\1" * 32),
        "has a base that this round does not count",
    ),
    ("past its last round", lambda: contribution(ONE, HEAD, FIRST, last_round=2), "is past its last round"),
    (
        "an order by a member",
        lambda: contribution(ONE, HEAD, FIRST, order=sign(ONE.members[0], opened_order())),
        "carries no valid work order",
    ),
    (
        "an order for another client",
        lambda: contribution(ONE, HEAD, FIRST, order=work_order(ONE, HEAD, 3)),
        "carries no valid work order",
    ),
    (
        "an order for another base",
        lambda: contribution(ONE, HEAD, FIRST, order=work_order(ONE, HEAD, FIRST, base_hash=b"\1" * 32)),
        "carries no valid work order",
    ),
    (
        "an order for an older round",
        lambda: contribution(ONE, HEAD, FIRST, order=work_order(ONE, HEAD, FIRST, base_round=1)),
        "carries no valid work order",
    ),
    (
        "an order of another federation",
        lambda: contribution(ONE, HEAD, FIRST, order=work_order(ONE, HEAD, FIRST, federation=b"\1" * 32)),
        "carries no valid work order",
    ),
    (
        "an order for too much",
        lambda: contribution(ONE, HEAD, FIRST, order=work_order(ONE, HEAD, FIRST, local_steps=3)),
        "carries no valid work order",
    ),
    (
        "an order with a wrong signature",
        lambda: contribution(
            ONE, HEAD, FIRST, order=msgspec.structs.replace(work_order(ONE, HEAD, FIRST), signature=b"\1" * 64)
        ),
        "carries no valid work order",
    ),
    (
        "a norm that is no number",
        lambda: contribution(ONE, HEAD, FIRST, norm=math.nan),
        "cannot count: the delta.s norm is not finite",
    ),
]


def opened_order() -> Any:
    order = order_of(FEDERATION, OFFERS[0].manifest)
    assert order is not None
    return order


@pytest.mark.parametrize(("make", "finding"), [each[1:] for each in BAD], ids=[each[0] for each in BAD])
def test_a_bad_manifest_is_found(make: Callable[[], Contribution], finding: str) -> None:
    refused(*over([make(), *OFFERS[1:]]), f"the contribution of c{FIRST + 1} {finding}")


@pytest.mark.parametrize("sequence", [1, 2])
def test_a_sequence_that_was_counted_is_found(sequence: int) -> None:
    first, others = OFFERS[0], OFFERS[1:]
    member = next(member for member in (0, 1) if HEAD.was_counted(ONE.members[member].node_id, sequence))
    again = contribution(ONE, HEAD, member, sequence=sequence)
    chosen = sorted([again, *(o for o in (first, *others) if member_of(o) != member)], key=lambda o: o.manifest.client)
    refused(*over(chosen), f"the contribution of c{member + 1} was counted before")


def test_a_contribution_by_a_stranger_is_found() -> None:
    larger = tiny(brokers=3, members=5, settings={"max_contributions": "3", "max_metrics": "2"})
    stranger = contribution(larger, HEAD, 4, federation=FEDERATION.fingerprint)
    refused(*over([stranger, *OFFERS[1:]]), f"{larger.members[4].node_id[:8]} is by a stranger")


def test_contributions_out_of_order_or_twice_are_found() -> None:
    refused(*over([OFFERS[1], OFFERS[0], OFFERS[2]]), "out of order")
    twice = contribution(ONE, HEAD, FIRST, sequence=9)
    refused(*over([OFFERS[0], twice, OFFERS[1]]), "two are of one client")


def test_more_contributions_than_the_limit_are_found() -> None:
    four = sorted([*OFFERS, contribution(ONE, HEAD, 3)], key=lambda each: each.manifest.client)
    refused(*over(four), "more contributions than the limit")


BAD_MEASURES: dict[str, Callable[[], Signed]] = {
    "another round": lambda: evaluation(ONE, HEAD, 1, {"loss": 1.0}, server_round=1),
    "another model": lambda: evaluation(ONE, HEAD, 1, {"loss": 1.0}, model_hash=b"\1" * 32),
    "another federation": lambda: evaluation(ONE, HEAD, 1, {"loss": 1.0}, federation=b"\1" * 32),
    "another client": lambda: evaluation(ONE, HEAD, 1, {"loss": 1.0}, client=ONE.members[2].node_id),
    "no examples": lambda: evaluation(ONE, HEAD, 1, {"loss": 1.0}, num_examples=0),
    "too many examples": lambda: evaluation(ONE, HEAD, 1, {"loss": 1.0}, num_examples=2**48 + 1),
    "too many metrics": lambda: evaluation(ONE, HEAD, 1, {"a": 1.0, "b": 1.0, "c": 1.0}),
    "a long name": lambda: evaluation(ONE, HEAD, 1, {"x" * 65: 1.0}),
    "no number": lambda: evaluation(ONE, HEAD, 1, {"loss": math.nan}),
    "infinite": lambda: evaluation(ONE, HEAD, 1, {"loss": -math.inf}),
    "past what can be summed": lambda: evaluation(ONE, HEAD, 1, {"loss": 1e308}),
    "a wrong signature": lambda: msgspec.structs.replace(evaluation(ONE, HEAD, 1, {}), signature=b"\1" * 64),
    "by a broker": lambda: by_broker(),
    "another fact": lambda: OFFERS[0].signed,
}


def by_broker() -> Signed:
    fact = Evaluation(FEDERATION.fingerprint, ONE.brokers[0].node_id, 2, HEAD.model_hash, 10, {"loss": 1.0})
    return sign(ONE.brokers[0], fact)


@pytest.mark.parametrize("make", BAD_MEASURES.values(), ids=BAD_MEASURES.keys())
def test_an_evaluation_that_is_not_sound_is_found(make: Callable[[], Signed]) -> None:
    assert evaluation_of(FEDERATION, HEAD, make()) is None
    refused(*over(OFFERS, [make()]), "the evaluation of .* is not sound")


def test_two_evaluations_of_one_client_are_found() -> None:
    two = [evaluation(ONE, HEAD, 1, {"loss": 1.0}), evaluation(ONE, HEAD, 1, {"loss": 2.0})]
    refused(*over(OFFERS, two), "two evaluations are of one client")


def test_a_sound_contribution_has_no_finding() -> None:
    for counted, offer in zip(BODY.counted, OFFERS, strict=True):
        assert contribution_finding(FEDERATION, HEAD, counted, offer.signed) == ""
    assert encode(BODY) == DECIDED.raw
