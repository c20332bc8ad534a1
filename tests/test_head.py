"""The head: which sequences were counted, what a commit changes, and who owns which shard."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest_fed.facts import body_hash
from ravnest_fed.head import SEQUENCE_WINDOW, CountedSequences, balanced_owners, initial_head
from tests.building import contribution, decide, tiny, tiny_schema

ONE = tiny(brokers=5, schema=tiny_schema(blocks=60))


@given(st.integers(1, 300), st.lists(st.integers(1, 300), max_size=60))
def test_the_window_agrees_with_a_set(first: int, offered: list[int]) -> None:
    entry, counted = CountedSequences(first), {first}
    for sequence in offered:
        if not entry.holds(sequence):
            entry = entry.with_sequence(sequence)
            counted.add(sequence)
        assert entry.highest == max(counted)
        for asked in range(1, 302):
            too_old = asked < entry.highest - SEQUENCE_WINDOW
            assert entry.holds(asked) == (asked in counted or too_old)


@pytest.mark.parametrize("leap", [SEQUENCE_WINDOW - 1, SEQUENCE_WINDOW, SEQUENCE_WINDOW + 1])
def test_the_edge_of_the_window(leap: int) -> None:
    entry = CountedSequences(10).with_sequence(10 + leap)
    assert entry.holds(10)
    assert not entry.holds(11)
    assert entry.holds(9) == (leap >= SEQUENCE_WINDOW)


@pytest.mark.parametrize("sequence", [-(2**63), 0, 35, 99, 100])
def test_a_sequence_that_is_held_or_too_old_changes_nothing(sequence: int) -> None:
    entry = CountedSequences(99).with_sequence(100)
    assert entry.holds(sequence)
    assert entry.with_sequence(sequence) == entry


@pytest.mark.parametrize("leap", [2**48, 2**63])
def test_a_leap_of_any_size_costs_nothing(leap: int) -> None:
    entry = CountedSequences(3, 0b11).with_sequence(leap)
    assert entry == CountedSequences(leap, 0)
    assert entry.holds(3)
    assert not entry.holds(leap - 1)


def test_the_first_head_follows_from_the_federation() -> None:
    head = initial_head(ONE.federation, b"\1" * 32)
    assert (head.server_round, head.commit_hash, head.model_hash) == (0, ONE.federation.fingerprint, b"\1" * 32)
    assert head.scale_bits is None
    assert head.stop == ""
    assert len(head.owners) == len(ONE.federation.schema.shards)
    assert not head.was_counted(ONE.members[0].node_id, 1)


def test_a_head_after_a_round_is_what_its_body_says() -> None:
    one = tiny()
    replica = one.replica()
    offers = [contribution(one, replica.head, member, sequence=5) for member in (2, 0)]
    decided = decide(one, replica, offers)
    before = msgspec.structs.replace(replica.head)
    after = replica.head.after(decided.body, decided.raw, one.federation)
    assert replica.head == before
    body = decided.body
    assert (after.server_round, after.commit_hash) == (1, body_hash(decided.raw))
    assert (after.model_hash, after.owners, after.stop) == (body.model_hash, body.owners, body.stop)
    assert (after.scale_bits, after.clip_bound) == (body.next_scale_bits, body.next_clip_bound)
    assert after.last_clients == tuple(sorted(one.members[member].node_id for member in (0, 2)))
    assert after.norms == tuple(counted.norm for counted in body.counted)
    assert after.maxima == tuple(counted.max_abs for counted in body.counted)
    assert after.was_counted(one.members[0].node_id, 5)
    assert not after.was_counted(one.members[0].node_id, 6)
    assert not after.was_counted(one.members[1].node_id, 5)


def test_the_recorded_norms_are_the_newest_ones() -> None:
    one, longer = (tiny(settings={"norm_history": str(history)}) for history in (3, 6))
    replica = one.replica()
    decided = decide(one, replica, [contribution(one, replica.head, member) for member in range(4)])
    head = replica.head.after(decided.body, decided.raw, one.federation)
    assert head.norms == tuple(counted.norm for counted in decided.body.counted)[-3:]
    again = head.after(decided.body, decided.raw, longer.federation)
    assert again.norms == (*head.norms, *(counted.norm for counted in decided.body.counted))[-6:]
    assert len(again.maxima) == 6


def test_the_digest_covers_every_decision_of_the_head() -> None:
    one = tiny()
    replica = one.replica()
    decided = decide(one, replica, [contribution(one, replica.head, member) for member in range(2)])
    head = replica.head.after(decided.body, decided.raw, one.federation)
    client = one.members[0].node_id
    others = [
        msgspec.structs.replace(head, **change)
        for change in (
            {"server_round": 2},
            {"owners": head.owners[::-1]},
            {"scale_bits": 3},
            {"clip_bound": 0.5},
            {"scalars": (0.5,)},
            {"stop": "now"},
            {"counted": {}},
            {"counted": {**head.counted, client: CountedSequences(1, 1)}},
            {"norms": head.norms[::-1]},
            {"maxima": head.maxima[1:]},
        )
    ]
    digests = {each.digest(one.federation) for each in (head, *others)}
    assert len(digests) == 1 + len(others)
    assert head.digest(tiny(members=5).federation) not in digests
    turned = dict(reversed(head.counted.items()))
    assert msgspec.structs.replace(head, counted=turned).digest(one.federation) == head.digest(one.federation)


@given(st.sets(st.sampled_from(range(5)), min_size=1), st.integers(1, 10**9))
def test_owners_are_live_and_none_has_more_than_its_even_share(live: set[int], server_round: int) -> None:
    schema, roster = ONE.federation.schema, ONE.federation.roster
    owners = balanced_owners(schema, roster, tuple(roster[index] for index in live), server_round)
    assert len(owners) == len(schema.shards)
    load = Counter(owners)
    assert set(load) <= live
    assert max(load.values()) <= -(-len(owners) // len(live))


def test_owners_do_not_depend_on_the_order_of_the_live() -> None:
    schema, roster = ONE.federation.schema, ONE.federation.roster
    assert balanced_owners(schema, roster, roster[::-1], 7) == balanced_owners(schema, roster, roster, 7)


@pytest.mark.parametrize("gone", range(5))
def test_most_shards_stay_where_they_were_when_a_broker_goes(gone: int) -> None:
    schema, roster = ONE.federation.schema, ONE.federation.roster
    before = balanced_owners(schema, roster, roster, 7)
    after = balanced_owners(schema, roster, tuple(node for node in roster if node != roster[gone]), 7)
    stayed = sum(old == new for old, new in zip(before, after, strict=True) if old != gone)
    assert gone not in after
    assert stayed >= 0.7 * sum(old != gone for old in before)


def test_owners_change_from_round_to_round() -> None:
    schema, roster = ONE.federation.schema, ONE.federation.roster
    assert len({balanced_owners(schema, roster, roster, server_round) for server_round in range(1, 9)}) == 8
