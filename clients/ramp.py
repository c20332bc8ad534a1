"""How a probe climbs: which micro-batch to step with next, and when it knows enough. Decides; measures nothing.

Each micro-batch gets one step to warm up and then a slice of the time. The climb ends where doubling no longer pays,
where memory or data end, or where the next size would not fit into the time that is left. Memory that the machine
would kill for instead of refusing it is foreseen.
"""

from dataclasses import dataclass
from statistics import median

from ravnest_fed.capability import MAX_MICRO_BATCH, Speed

SECONDS = 10.0
"""How long a probe may take by default."""
SLICE = 0.03
"""The share of the whole time that one micro-batch is timed for."""
GAIN = 1.1
"""A doubling that gives less than this factor is flat."""
FLAT = 2
"""So many flat doublings in a row end the climb."""
CLOSE = 0.95
"""The smallest micro-batch that reaches this share of the best speed is chosen: more would take memory for nothing."""
MOST_STEPS = 512
"""Most steps at one micro-batch, for steps that take no time at all."""


@dataclass(frozen=True)
class Climbed:
    """What a climb found: speeds by micro-batch, the one chosen (1 without any), and why, for a person.

    `fits` is the greatest micro-batch that memory allows, None where no bound was met.
    """

    speeds: tuple[Speed, ...]
    micro_batch: int
    chosen: str
    ended: str
    fits: int | None = None


class Ramp:
    """A climb of at most about `seconds`: it may be passed by a single step whose length nobody could know.

    Flat speeds end it only from the micro-batch `least` on: that of the recipe is wanted in any case.
    """

    def __init__(self, seconds: float = SECONDS, least: int = 1) -> None:
        self._seconds = seconds
        self._least = least
        self._spent = 0.0
        self._size = 1
        self._steps: list[tuple[int, float]] = []
        self._speeds: list[Speed] = []
        self._best = 0.0
        self._flat = 0
        self._peak: int | None = None
        self._fits: int | None = None
        self._ended = ""

    def next(self) -> int | None:
        """The micro-batch to make one training step with; None once the climb is over."""
        return None if self._ended else self._size

    def stepped(self, examples: int, seconds: float, peak: int | None = None, free: int | None = None) -> None:
        """A step was made with `examples`, in `seconds`.

        `peak` is the most memory that the process has used so far and `free` what the machine has left, in bytes, where
        a process that asks for too much is not refused but killed.
        """
        self._steps.append((examples, max(seconds, 0.0)))
        self._spent += max(seconds, 0.0)
        timed = self._steps[1:]
        whole_slice = len(timed) > 2 and sum(took for _, took in timed) >= SLICE * self._seconds
        if whole_slice or len(self._steps) > MOST_STEPS or self._spent + seconds > self._seconds:
            # Where not even a second step is to be had, the warm-up itself is the best that is known.
            self._measured(timed or self._steps, peak, free)

    def refused(self) -> None:
        """A step ran out of memory."""
        self._ended = f"{self._size} at once does not fit into memory"
        if self._speeds:
            self._fits = self._speeds[-1].micro_batch
            self._ended += f"; {self._fits} does"

    def result(self) -> Climbed:
        """What the climb has found so far."""
        if not self._speeds:
            return Climbed((), 1, "nothing could be measured", self._ended)
        best = max(self._speeds, key=lambda one: one.samples_per_second)
        chosen = next(one for one in self._speeds if one.samples_per_second >= CLOSE * best.samples_per_second)
        reason = f"fastest of those tried: {chosen.samples_per_second:.4g} samples/s"
        if chosen is not best:
            reason = (
                f"the smallest within {100 * (1 - CLOSE):.0f} % of the best speed, "
                f"{best.samples_per_second:.4g} samples/s at {best.micro_batch}"
            )
        return Climbed(tuple(self._speeds), chosen.micro_batch, reason, self._ended, self._fits)

    def _measured(self, timed: list[tuple[int, float]], peak: int | None, free: int | None) -> None:
        # The median: on a busy machine single steps take many times as long as the others.
        seconds = max(median(took for _, took in timed), 1e-9)
        rate = sum(examples for examples, _ in timed) / len(timed) / seconds
        given = self._steps[0][0]
        self._speeds.append(Speed(max(1, min(given, MAX_MICRO_BATCH)), rate))
        self._flat = self._flat + 1 if rate < GAIN * self._best else 0
        self._best = max(self._best, rate)
        self._ended = self._end(given, seconds, peak, free)
        self._peak, self._steps = peak, []
        self._size *= 2

    def _end(self, given: int, step_seconds: float, peak: int | None, free: int | None) -> str:
        """Why the climb ends after this size; empty if it goes on."""
        size = self._size
        if given < size:
            return f"the data gives no more than {given} at once"
        if given > size:
            return f"the recipe's own loader makes batches of {given}"
        if self._flat >= FLAT and size >= self._least:
            return f"speed has flattened: {size} at once gives less than {GAIN:g} times the best before"
        if 2 * size > MAX_MICRO_BATCH:
            return f"{MAX_MICRO_BATCH} at once is the most that is tried"
        if peak is not None and free is not None and self._peak is not None and size > 1:
            # From one size to the next the use grew by what half of this batch takes, so the next takes twice that.
            wanted = 2 * (peak - self._peak)
            if wanted > free / 2:
                self._fits = size
                return f"{2 * size} at once would take about {wanted / 1e9:.2g} GB more of the {free / 1e9:.2g} GB free"
        # A step to warm up and one to time, each at most twice as long as this size's.
        if self._spent + 4 * step_seconds > self._seconds:
            return f"{2 * size} at once would not fit into the {self._seconds:g} s of the probe"
        return ""
