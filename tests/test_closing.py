"""When a round may close, and how many clients it counts on."""

import pytest

from brokers.closing import expected_clients, missing_clients, named, readiness
from brokers.pace import Pace
from ravnest_fed.federation import Rounds

NOBODY: frozenset[str] = frozenset()


def rounds(minimum: int = 2, target: int = 0, grace: float = 0.0, least: float = 2.0, most: float = 300.0) -> Rounds:
    return Rounds(
        min_contributions=minimum,
        target_contributions=target,
        grace_seconds=grace,
        min_grace_seconds=least,
        max_grace_seconds=most,
    )


def test_below_the_minimum_a_round_waits_however_long_it_takes() -> None:
    found = readiness(rounds(3), arrived=2, expected=2, missing=[], at=0.0, now=1e6)
    assert (found.ready, found.at) == (False, None) and found.waiting == "waiting 2/3 contributions"


def test_a_round_never_closes_over_nothing() -> None:
    assert not readiness(rounds(0), arrived=0, expected=0, missing=[], at=0.0, now=1e6).ready


def test_a_round_closes_at_once_when_everybody_expected_has_come() -> None:
    found = readiness(rounds(), arrived=3, expected=3, missing=[], at=9.0, now=5.0)
    assert found.ready and found.at == 5.0


def test_with_somebody_missing_a_round_waits_until_the_grace_is_over_and_names_who_is_missing() -> None:
    waiting = readiness(rounds(), arrived=2, expected=3, missing=["c3"], at=15.0, now=14.999)
    assert not waiting.ready and waiting.at == 15.0
    assert waiting.waiting == "waiting for 1 more of 3 (c3); 0 s grace left"
    assert readiness(rounds(), arrived=2, expected=3, missing=["c3"], at=15.0, now=15.0).ready


def test_of_many_who_are_missing_the_first_few_are_named() -> None:
    assert named(["a", "b", "c", "d", "e"]) == " (a, b, c, d, …)"
    assert named([]) == ""


def test_a_fixed_grace_begins_with_the_minimum() -> None:
    pace = Pace(rounds(grace=10.0), [1.0, 1.0])
    assert pace.close_at(started=0.0, minimum_since=7.0, training_seconds=99.0) == 17.0


def test_before_the_first_round_has_ended_the_grace_is_the_longest_training() -> None:
    assert Pace(rounds()).close_at(0.0, 100.0, training_seconds=30.0) == 130.0


def test_later_a_round_waits_about_as_long_as_rounds_took() -> None:
    alike = Pace(rounds(), [20.0] * 9)
    assert alike.close_at(1000.0, 1001.0, 0.0) == pytest.approx(1000.0 + 20.0 * 1.3)
    spread = Pace(rounds(), [10.0, 20.0, 30.0])
    assert spread.close_at(1000.0, 1001.0, 0.0) == pytest.approx(1000.0 + 20.0 + 3 * 10.0)


def test_the_grace_stays_within_its_bounds() -> None:
    assert Pace(rounds(least=2.0), [0.1] * 5).close_at(0.0, 50.0, 0.0) == 52.0
    assert Pace(rounds(most=60.0), [1e6] * 5).close_at(0.0, 50.0, 0.0) == 110.0


def test_who_became_slower_than_the_rest_is_waited_for_again_after_a_few_rounds() -> None:
    pace = Pace(rounds(), [10.0] * 20)
    needed = 0
    while (cut := pace.close_at(0.0, 9.0, 0.0)) < 30.0:
        needed += 1
        pace.took(cut)
        pace.took(30.0)
    assert 1 <= needed <= 12
    for _ in range(20):
        pace.took(10.0)
    assert pace.close_at(0.0, 9.0, 0.0) == pytest.approx(13.0)


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
    assert readiness(rounds(2, target), arrived, expected, [], at=10.0, now=1.0).ready == ready


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


def test_the_missing_are_those_counted_on_who_have_not_come() -> None:
    assert missing_clients((), frozenset("a"), frozenset("b"), frozenset("a"), 1, "abc") == ["c"]
    assert missing_clients(("a", "b"), frozenset("cd"), frozenset("d"), frozenset("a"), 2, "abcdef") == ["b", "c"]
