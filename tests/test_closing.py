"""When a round may close, and how many clients it counts on."""

import pytest

from brokers.closing import expected_clients, readiness
from ravnest_fed.federation import Rounds

NOBODY: frozenset[str] = frozenset()


def rounds(minimum: int = 2, target: int = 0, grace: float = 10.0) -> Rounds:
    return Rounds(min_contributions=minimum, target_contributions=target, grace_seconds=grace)


def test_below_the_minimum_a_round_waits_however_long_it_takes() -> None:
    for now in (0.0, 1e6):
        found = readiness(rounds(3), arrived=2, expected=2, minimum_since=None, now=now)
        assert (found.ready, found.at) == (False, None) and found.waiting == "waiting 2/3 contributions"


def test_a_round_never_closes_over_nothing() -> None:
    assert not readiness(rounds(0), arrived=0, expected=0, minimum_since=0.0, now=1e6).ready


def test_a_round_closes_at_once_when_everybody_expected_has_come() -> None:
    found = readiness(rounds(), arrived=3, expected=3, minimum_since=5.0, now=5.0)
    assert found.ready and found.at == 5.0


def test_with_somebody_missing_a_round_waits_until_the_grace_is_over_and_not_longer() -> None:
    waiting = readiness(rounds(), arrived=2, expected=3, minimum_since=5.0, now=14.999)
    assert not waiting.ready and waiting.at == 15.0
    assert waiting.waiting == "waiting for 1 more of 3, 0 s grace left"
    assert readiness(rounds(), arrived=2, expected=3, minimum_since=5.0, now=15.0).ready


def test_the_grace_begins_now_when_the_minimum_was_only_just_reached() -> None:
    found = readiness(rounds(), arrived=2, expected=3, minimum_since=None, now=7.0)
    assert not found.ready and found.at == 17.0


def test_without_grace_the_minimum_is_enough() -> None:
    assert readiness(rounds(grace=0.0), arrived=2, expected=9, minimum_since=None, now=7.0).ready


@pytest.mark.parametrize(
    ("target", "expected", "arrived", "ready"),
    [
        (3, 9, 2, False),
        (3, 9, 3, True),  # the target is reached, nobody else is waited for
        (9, 3, 2, False),
        (9, 3, 3, True),  # fewer than the target are there at all
        (9, 1, 2, True),  # the minimum is there, nobody else is expected
        (0, 4, 3, False),
        (0, 4, 4, True),
    ],
)
def test_a_target_bounds_whom_a_round_waits_for(target: int, expected: int, arrived: int, ready: bool) -> None:
    assert readiness(rounds(2, target), arrived, expected, minimum_since=0.0, now=1.0).ready == ready


def test_before_the_first_commit_the_target_or_else_every_member_is_counted_on() -> None:
    assert expected_clients((), NOBODY, NOBODY, NOBODY, 1, target=0, members=5) == 5
    assert expected_clients((), NOBODY, NOBODY, NOBODY, 1, target=3, members=5) == 3
    assert expected_clients((), frozenset("abcd"), NOBODY, NOBODY, 1, target=3, members=5) == 4


def test_before_the_first_commit_those_seen_leaving_are_not_counted_on() -> None:
    assert expected_clients((), frozenset("abcd"), frozenset("e"), NOBODY, 1, target=0, members=5) == 4
    assert expected_clients((), frozenset("abcd"), frozenset("e"), frozenset("e"), 1, target=0, members=5) == 5


def test_later_a_round_counts_on_the_last_commits_clients_and_those_connected() -> None:
    assert expected_clients(("a", "b"), frozenset("bc"), NOBODY, NOBODY, 2, target=0, members=9) == 3


def test_those_who_left_or_skip_are_not_counted_on_unless_they_contributed() -> None:
    assert expected_clients(("a", "b"), frozenset("abc"), frozenset("ac"), NOBODY, 2, 0, 9) == 1
    assert expected_clients(("a", "b"), frozenset("abc"), frozenset("ac"), frozenset("a"), 2, 0, 9) == 2
    assert expected_clients((), NOBODY, NOBODY, frozenset("z"), 2, 0, 9) == 1
