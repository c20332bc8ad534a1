"""Slices of shared data: disjoint, dealt anew until covered, every sample once an epoch, whoever comes and goes."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest_fed.facts import decode, encode
from ravnest_fed.slices import (
    MAX_PIECES,
    Deal,
    Interval,
    SampleOrder,
    Slice,
    Terms,
    first,
    first_deal,
    is_slice,
    joined,
    size,
    without,
)

INTERVALS = st.sets(st.integers(0, 60)).map(lambda ends: tuple(joined((end, end + 1) for end in ends)))


def positions(of: Slice | list[Interval]) -> list[int]:
    return [position for start, stop in of for position in range(start, stop)]


# --- slices ----------------------------------------------------------------------------------------------------------


@given(INTERVALS, INTERVALS, st.integers(0, 70))
def test_slices_agree_with_sets_of_positions(one: Slice, other: Slice, count: int) -> None:
    assert positions(without(one, other)) == sorted(set(positions(one)) - set(positions(other)))
    assert positions(first(one, count)) == positions(one)[:count]
    assert size(one) == len(positions(one))
    assert is_slice(one)


@pytest.mark.parametrize("value", [((3, 3),), ((4, 2),), ((-1, 2),), ((0, 2), (1, 3)), ((5, 6), (0, 1)), ((0, 2**62),)])
def test_what_is_no_slice_is_told(value: Slice) -> None:
    assert not is_slice(value)


def test_a_slice_of_very_many_pieces_is_none() -> None:
    assert is_slice(tuple((2 * n, 2 * n + 1) for n in range(4 * MAX_PIECES)))
    assert not is_slice(tuple((2 * n, 2 * n + 1) for n in range(4 * MAX_PIECES + 1)))


# --- the order of samples --------------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(0, 2**63 - 1))
def test_each_epoch_holds_every_sample_once_in_an_order_of_its_own(samples: int, seed: int) -> None:
    order = SampleOrder(samples, seed)
    epochs = [order.rows(((epoch * samples, (epoch + 1) * samples),)) for epoch in range(3)]
    assert all(sorted(rows) == list(range(samples)) for rows in epochs)
    whole = order.rows(((0, 3 * samples),))
    assert np.array_equal(whole, np.concatenate(epochs))
    if samples > 20:
        assert not np.array_equal(epochs[0], epochs[1])


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    assert SampleOrder(10, 7).rows(((0, 10), (12, 15))).tolist() == [5, 0, 1, 6, 2, 8, 4, 9, 3, 7, 9, 1, 0]


def test_positions_of_old_epochs_are_found_again() -> None:
    order = SampleOrder(5, 1)
    known = order.rows(((0, 5),))
    order.rows(((50, 100),))
    assert np.array_equal(order.rows(((0, 5),)), known)


# --- the deal --------------------------------------------------------------------------------------------------------


def regions(deal: Deal) -> dict[str, list[int]]:
    return {region.client: positions([piece.interval for piece in region.pieces]) for region in deal.regions}


def test_regions_are_proportional_to_what_was_covered_last() -> None:
    terms = Terms(10, 10_000, sized=True, max_staleness=0)
    deal = first_deal("abc", terms)
    assert {client: len(dealt) for client, dealt in regions(deal).items()} == {"a": 40, "b": 40, "c": 40}
    covered = {"a": first(deal.usable("a", 0, 0), 40), "b": first(deal.usable("b", 0, 0), 20)}
    deal = deal.after(1, covered, "abc", terms)
    assert {client: len(dealt) for client, dealt in regions(deal).items()} == {"a": 160, "b": 80, "c": 40}


def test_what_was_not_covered_is_dealt_again_first_and_to_those_who_work() -> None:
    terms = Terms(10, 10, sized=False, max_staleness=0)
    deal = first_deal("abc", terms)
    assert deal.usable("a", 0, 0) == ((0, 10),)
    deal = deal.after(1, {"c": ((20, 30),)}, "abc", terms)
    assert deal.usable("c", 1, 0) == ((0, 10),)
    assert deal.usable("a", 1, 0) == ((10, 20),)
    assert deal.usable("b", 1, 0) == ((30, 40),)
    assert (deal.covered, deal.whole) == (10, 0)


def test_a_piece_is_used_and_counted_as_long_as_staleness_allows_and_then_dealt_anew() -> None:
    terms = Terms(10, 10, sized=False, max_staleness=2)
    deal = first_deal("ab", terms)
    mine = deal.usable("a", 0, 2)
    assert mine == ((0, 20),)
    for server_round in range(1, 5):
        deal = deal.after(server_round, {}, "ab", terms)
        # From a base of round 2 it could still be trained on; such work may be counted up to round 2 + 1 + 2.
        assert deal.holds("a", mine)
        assert (mine[0] in deal.usable("a", server_round, 2)) == (server_round <= 2)
    deal = deal.after(5, {}, "ab", terms)
    assert not deal.holds("a", mine)


def test_a_stranger_has_no_region() -> None:
    deal = first_deal("a", Terms(10, 10, sized=False, max_staleness=0))
    assert deal.usable("x", 0, 0) == ()
    assert not deal.holds("x", ((0, 1),))
    assert not deal.holds("a", ((9, 11),))


def test_a_deal_survives_its_encoding() -> None:
    terms = Terms(10, 100, sized=True, max_staleness=1)
    deal = first_deal("ab", terms).after(1, {"a": ((0, 7),)}, "ab", terms)
    assert decode(Deal, encode(deal)) == deal


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3), st.booleans())
def test_every_position_is_covered_once_and_none_for_ever_left_out(seed: int, staleness: int, sized: bool) -> None:
    """Clients come and go, do parts of their work, and hand it in late; the lowest gap moves on all the same."""
    source = random.Random(seed)
    terms = Terms(8, 64, sized, staleness)
    members = [f"c{number}" for number in range(source.randint(1, 6))]
    deal = first_deal(members, terms)
    covered: set[int] = set()
    waiting: dict[str, tuple[int, Slice]] = {}
    for server_round in range(60):
        for client in members:
            if client not in waiting and source.random() < 0.6:
                usable = deal.usable(client, server_round, staleness)
                assert size(usable) >= terms.round_samples
                waiting[client] = (server_round, first(usable, source.randint(1, size(usable))))
        counted: dict[str, Slice] = {}
        for client, (base, of) in list(waiting.items()):
            if source.random() < 0.7 or staleness == 0:
                del waiting[client]
                assert deal.holds(client, of)
                if source.random() < 0.9:
                    counted[client] = of
            elif server_round - base >= staleness:
                del waiting[client]
        for of in counted.values():
            assert not covered & set(positions(of))
            covered |= set(positions(of))
        deal = deal.after(server_round + 1, counted, members, terms)
        held = [position for dealt in regions(deal).values() for position in dealt]
        assert len(held) == len(set(held))
        assert not covered & set(held)
        assert deal.covered == len(covered)
        assert set(range(deal.whole)) <= covered
        assert deal.whole not in covered
        assert all(before[1] < after[0] for before, after in pairwise(deal.free))
        assert all(len(region.pieces) <= MAX_PIECES + 2 * staleness + 2 for region in deal.regions)
    # From here on everybody works: what was left out is covered before long.
    gap = deal.whole
    for server_round in range(60, 60 + 4 * (2 * staleness + 1)):
        counted = {client: first(deal.usable(client, server_round, staleness), 8) for client in members}
        deal = deal.after(server_round + 1, counted, members, terms)
    assert deal.whole > gap


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=20)
def test_gaps_do_not_grow_without_bound(seed: int) -> None:
    source = random.Random(seed)
    terms = Terms(32, 512, True, 2)
    members = [f"c{number}" for number in range(20)]
    deal = first_deal(members, terms)
    most = 0
    for server_round in range(150):
        workers = [client for client in members if source.random() < 0.5]
        counted = {
            client: first(deal.usable(client, server_round, 2), source.choice((1, 3, 32, 100))) for client in workers
        }
        deal = deal.after(server_round + 1, counted, members, terms)
        most = max(most, len(deal.free))
    assert most <= 3 * MAX_PIECES * len(members)
    assert deal.tail - deal.covered <= 3 * len(members) * 512
