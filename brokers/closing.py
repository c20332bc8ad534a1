"""When a round may close, and what it waits for: pure functions over counts and times."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ravnest_fed.federation import Rounds

NAMED = 4
"""How many of those who are waited for are named."""


@dataclass(frozen=True)
class Readiness:
    """Whether a round may close, when it may at the latest by what is known now (None: not yet), and what it waits for."""

    ready: bool
    at: float | None
    waiting: str


def readiness(rounds: Rounds, arrived: int, expected: int, missing: Sequence[str], at: float, now: float) -> Readiness:
    """Judge a round with `arrived` contributions held by their owners.

    `expected` is how many clients may still be counted on in all, `missing` the names of those who have not come; `at` is
    when the grace is over (seconds). A round closes at once when nobody else is expected, else when the grace is over.
    """
    if arrived < rounds.min_contributions or arrived == 0:
        return Readiness(False, None, f"waiting {arrived}/{rounds.min_contributions} contributions")
    wanted = min(rounds.target_contributions or expected, max(expected, rounds.min_contributions))
    if arrived >= wanted or now >= at:
        return Readiness(True, now, "closing")
    return Readiness(
        False,
        at,
        f"waiting for {wanted - arrived} more of {wanted}{named(missing)}; {max(0.0, at - now):.0f} s grace left",
    )


def named(missing: Sequence[str]) -> str:
    """The first few of these names, in brackets."""
    shown = ", ".join(missing[:NAMED]) + (", …" if len(missing) > NAMED else "")
    return f" ({shown})" if shown else ""


def missing_clients(
    last_clients: tuple[str, ...],
    live: frozenset[str],
    away: frozenset[str],
    contributed: frozenset[str],
    server_round: int,
    members: Iterable[str],
) -> list[str]:
    """The clients that `expected_clients` counts on and that have not come."""
    known = set(members) if server_round == 1 else set(last_clients) | live
    return sorted(known - away - contributed)


def expected_clients(
    last_clients: tuple[str, ...],
    live: frozenset[str],
    away: frozenset[str],
    contributed: frozenset[str],
    server_round: int,
    target: int,
    members: int,
) -> int:
    """How many clients a round counts on, those that `contributed` already among them.

    They are those of the last commit and those connected now, without those seen leaving or skipping. Before the first
    commit nobody is known, so the target, or else every member, is counted on.
    """
    known = ((set(last_clients) | live) - away) | contributed
    if server_round == 1:
        return max(len(known), (target or members) - len(away - contributed))
    return len(known)
