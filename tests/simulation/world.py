"""Time, the event heap, and a network that loses, repeats, delays and cuts. Everything follows from one seed."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ravnest_fed.federation import Federation
from ravnest_fed.parameters import ModelState

Action = Callable[[], None]


@dataclass
class Weather:
    """How bad the network is: probabilities of a message, delays in seconds. `drop_votes` is for votes alone."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.02
    jitter: float = 0.05
    straggle: float = 0.0
    drop_votes: float = 0.0


@dataclass
class World:
    """All that the nodes of one run share."""

    federation: Federation
    initial: ModelState
    random: random.Random
    weather: Weather = field(default_factory=Weather)
    now: float = 0.0
    trace: list[str] | None = None
    cut: set[tuple[str, str]] = field(default_factory=set)
    _heap: list[tuple[float, int, Action]] = field(default_factory=list)
    _count: int = 0

    def after(self, seconds: float, action: Action) -> None:
        """Let `action` happen in so many seconds."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + seconds, self._count, action))

    def run(self, until: float, enough: Callable[[], bool]) -> None:
        """Take events in order until the time is over or `enough` holds."""
        while self._heap and self._heap[0][0] <= until and not enough():
            self.now, _, action = heapq.heappop(self._heap)
            action()

    def note(self, who: str, text: str) -> None:
        """A line of the trace, if one is kept."""
        if self.trace is not None:
            self.trace.append(f"{self.now:9.3f}  {who:<4} {text}")

    def linked(self, source: str, target: str) -> bool:
        """Whether messages pass from `source` to `target` (node names)."""
        return (source, target) not in self.cut

    def latency(self) -> float:
        """How long a message takes."""
        weather = self.weather
        seconds = weather.delay * self.random.random() + 0.001
        if self.random.random() < weather.straggle:
            seconds += weather.jitter * 20 * self.random.random()
        return seconds + weather.jitter * self.random.random() ** 4

    def send(self, source: str, target: str, arrive: Action) -> None:
        """Carry a message: it may be lost, come twice, or late."""
        if not self.linked(source, target):
            return
        copies = 1
        if self.random.random() < self.weather.drop:
            copies = 0
        elif self.random.random() < self.weather.duplicate:
            copies = 2
        for _ in range(copies):
            self.after(self.latency(), arrive)
