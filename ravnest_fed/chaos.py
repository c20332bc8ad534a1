"""Kills for the demo: which nodes die, when, and for how long. The schedule follows from its seed alone.

`schedule` draws strikes; a `Chaos` says which of them are due and which nodes shall start again. It keeps the limits of
`most_down` whatever the time does: a strike that would break one waits until enough nodes are at work again.
"""

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass

ROUNDS_A_STRIKE = 3
SHORTEST_SECONDS, LONGEST_SECONDS = 0.4, 2.5


@dataclass(frozen=True)
class Strike:
    """`node` is to be killed in round `server_round`, once `fraction` of a usual round has passed, for `down_seconds`."""

    node: str
    server_round: int
    fraction: float
    down_seconds: float


@dataclass
class Kill:
    """A strike that was carried out, in the round that was open then. The last two are None until the node is back."""

    strike: Strike
    server_round: int
    at: float
    started: bool = False
    back_at: float | None = None
    back_in_round: int | None = None


@dataclass(frozen=True)
class Start:
    """Start a killed node again."""

    node: str


def most_down(brokers: int, clients: int) -> tuple[int, int]:
    """How many brokers and clients may be down at once: a minority of the ones, half of the others."""
    return (brokers - 1) // 2, clients // 2


def schedule(seed: int, rounds: int, brokers: Sequence[str], clients: Sequence[str]) -> tuple[Strike, ...]:
    """Strikes for a training of `rounds` rounds, in order of time; none where nothing may be killed.

    About one in `ROUNDS_A_STRIKE` rounds, on brokers and clients in turn where both may be struck, and none in the first
    and the last round. Times down are in seconds, since a round takes as long as it takes.
    """
    draw = random.Random(f"chaos {seed}")
    targets = [
        group for group, most in zip((brokers, clients), most_down(len(brokers), len(clients)), strict=True) if most
    ]
    if not targets or rounds < 3:
        return ()
    draw.shuffle(targets)
    count = min(max(len(targets), rounds // ROUNDS_A_STRIKE), rounds - 2)
    moments = sorted(draw.sample(range(2, rounds), count))
    return tuple(
        Strike(
            draw.choice(targets[number % len(targets)]),
            moment,
            round(draw.random(), 3),
            round(draw.uniform(SHORTEST_SECONDS, LONGEST_SECONDS), 3),
        )
        for number, moment in enumerate(moments)
    )


class Chaos:
    """Carries out a schedule on `brokers` and `clients`. Times are in seconds on any clock that only goes forward."""

    def __init__(self, strikes: Sequence[Strike], brokers: Set[str], clients: Set[str]) -> None:
        self.kills: list[Kill] = []
        self._waiting = sorted(strikes, key=lambda one: (one.server_round, one.fraction))
        self._groups = tuple(zip((brokers, clients), most_down(len(brokers), len(clients)), strict=True))
        self._round = 0
        self._opened_at = 0.0

    @property
    def down(self) -> set[str]:
        """The nodes that were killed and not started again yet."""
        return {kill.strike.node for kill in self.kills if not kill.started}

    @property
    def restoring(self) -> bool:
        """Whether a node that was killed is not at work again yet."""
        return any(kill.back_at is None for kill in self.kills)

    def observe(self, open_round: int, at_work: Set[str], now: float) -> list[Kill]:
        """Take in what is seen: the open round, and the nodes that are at work. Returns the kills whose node is back."""
        if open_round != self._round:
            self._round, self._opened_at = open_round, now
        back = [kill for kill in self.kills if kill.started and kill.back_at is None and kill.strike.node in at_work]
        for kill in back:
            kill.back_at, kill.back_in_round = now, open_round
        return back

    def act(self, usual_seconds: float, at_work: Set[str], ended: bool, now: float) -> list[Kill | Start]:
        """What to do now: one strike at the most, and starts. A round usually takes `usual_seconds`.

        Once training has `ended` nothing is killed any more, and everything starts again.
        """
        actions: list[Kill | Start] = []
        for kill in self.kills:
            if not kill.started and (ended or now - kill.at >= kill.strike.down_seconds):
                kill.started = True
                actions.append(Start(kill.strike.node))
        strike = None if ended else next(iter(self._waiting), None)
        if strike and self._is_due(strike, usual_seconds, now) and self._may_fall(strike.node, at_work):
            self._waiting.pop(0)
            kill = Kill(strike, self._round, now)
            self.kills.append(kill)
            actions.append(kill)
        return actions

    def _is_due(self, strike: Strike, usual_seconds: float, now: float) -> bool:
        if strike.server_round != self._round:
            return strike.server_round < self._round
        return now - self._opened_at >= strike.fraction * usual_seconds

    def _may_fall(self, node: str, at_work: Set[str]) -> bool:
        """Whether `node` is at work and the limits hold without it; who is still starting counts as down."""
        absent = {kill.strike.node for kill in self.kills if kill.back_at is None}
        return node in at_work - absent and all(
            len(group - (at_work - absent - {node})) <= most for group, most in self._groups if node in group
        )
