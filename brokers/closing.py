"""When a round may close, and what it waits for: pure functions over counts and times."""

from dataclasses import dataclass

from ravnest_fed.federation import Rounds


@dataclass(frozen=True)
class Readiness:
    """Whether a round may close, when it may at the latest by what is known now (None: not yet), and what it waits for."""

    ready: bool
    at: float | None
    waiting: str


def readiness(rounds: Rounds, arrived: int, expected: int, minimum_since: float | None, now: float) -> Readiness:
    """Judge a round with `arrived` contributions held by their owners.

    `expected` is how many clients may still be counted on in all; `minimum_since` is when `min_contributions` were first
    reached (seconds). A round closes at once when nobody else is expected, else when the grace time has passed.
    """
    if arrived < rounds.min_contributions or arrived == 0:
        return Readiness(False, None, f"waiting {arrived}/{rounds.min_contributions} contributions")
    wanted = min(rounds.target_contributions or expected, max(expected, rounds.min_contributions))
    since = now if minimum_since is None else minimum_since
    at = since + rounds.grace_seconds
    if arrived >= wanted or now >= at:
        return Readiness(True, now, "closing")
    return Readiness(
        False, at, f"waiting for {wanted - arrived} more of {wanted}, {max(0.0, at - now):.0f} s grace left"
    )


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
