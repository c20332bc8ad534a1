"""How long a round waits for the rest, from how long rounds really took. Pure counting; times in seconds.

The time at which a round may close without somebody is the median of recent durations plus a multiple of their spread,
so nobody has to know a number that fits slow links. What comes too late counts as a duration too: where a client became
slower than the rest, rounds wait longer again, until it is among them.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median

from ravnest_fed.federation import Rounds

RECENT = 20
"""How many durations are remembered."""
SPREADS = 3.0
"""How many spreads beyond the median a round waits. The spread is the median distance from the median."""
LEAST_SPREAD = 0.1
"""The spread is never taken for less than this share of the median: rounds that were alike are no promise."""


class Pace:
    """The durations of recent rounds, as one broker saw them."""

    def __init__(self, rounds: Rounds, durations: Iterable[float] = ()) -> None:
        """`durations` are those of rounds before this broker started, oldest first."""
        self._rounds = rounds
        self._recent: deque[float] = deque(durations, RECENT)

    def took(self, seconds: float) -> None:
        """A round lasted so long, or a contribution that came too late so long after its round had begun."""
        self._recent.append(max(seconds, 0.0))

    def close_at(self, started: float, minimum_since: float, training_seconds: float) -> float:
        """When a round that began at `started` and had its minimum at `minimum_since` closes without the rest.

        `training_seconds` is the longest training among those that have come: all there is to go by before the first
        round has ended.
        """
        rounds = self._rounds
        if rounds.grace_seconds:
            return minimum_since + rounds.grace_seconds
        if self._recent:
            middle = median(self._recent)
            spread = median(abs(one - middle) for one in self._recent)
            at = started + middle + SPREADS * max(spread, LEAST_SPREAD * middle)
        else:
            at = minimum_since + training_seconds
        if rounds.mode == "asynchronous":
            # Nobody in particular is waited for, so nothing but a number that does not come is cut short.
            return minimum_since + rounds.max_grace_seconds
        least, most = minimum_since + rounds.min_grace_seconds, minimum_since + rounds.max_grace_seconds
        return min(max(at, least), most)


class Latecomers:
    """Whose contributions to the round just closed came late: so long that round would have had to wait."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._known: set[str] = set()
        self._closed: tuple[int, float] | None = None

    def closed(self, base_round: int, began: float) -> None:
        """The round on top of `base_round`, which had begun at `began`, has ended."""
        self._closed, self._known = (base_round, began), set()

    def came(self, client: str, base_round: int, now: float) -> None:
        """A client offers work done on `base_round`."""
        if self._closed is not None and self._closed[0] == base_round and client not in self._known:
            self._known.add(client)
            self._pace.took(now - self._closed[1])
