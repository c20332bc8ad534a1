"""When a client works and when it leaves the machine to its owner. Samples and the time in, a verdict out; no I/O.

A need of the owner's counts once it lasts, and is over only when it has fallen well below where it began, and everything
was quiet for a while: a client that flaps disturbs more than one that works, and does less.
"""

import math
import re
from dataclasses import dataclass, field
from datetime import time
from typing import Literal

from ravnest_fed.errors import UsageError

CALM_SECONDS = 30.0
"""How long no need was seen before work goes on."""
_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True)
class When:
    """When a client may work: `always`, or while the machine is not needed (`idle`), then from `start` to `end` if given.

    Hours are local; those that end before they begin go past midnight.
    """

    kind: Literal["idle", "always"] = "idle"
    start: time | None = None
    end: time | None = None

    @classmethod
    def parse(cls, text: str) -> "When":
        """Read `idle`, `always` or `HH:MM-HH:MM`. Raises UsageError."""
        if text == "always":
            return cls("always")
        if text == "idle":
            return cls("idle")
        found = _HOURS.fullmatch(text)
        if found is None:
            raise UsageError(f"--when is {text[:40]!r}", "use idle, always, or hours such as 22:00-06:30")
        numbers = [int(part) for part in found.groups()]
        start, end = time(numbers[0], numbers[1]), time(numbers[2], numbers[3])
        if start == end:
            raise UsageError(f"--when is {text}, which is no time at all", "use idle for the whole day")
        return cls("idle", start, end)

    def within(self, local: time) -> bool:
        """Whether `local` is among the hours; the last minute named is not."""
        if self.start is None or self.end is None:
            return True
        if self.start < self.end:
            return self.start <= local < self.end
        return local >= self.start or local < self.end

    def __str__(self) -> str:
        return f"{self.start:%H:%M}-{self.end:%H:%M}" if self.start and self.end else self.kind


@dataclass(frozen=True)
class Manners:
    """What an owner allows a client: bytes of memory on the GPU, a share of all cores, bytes a second of upload."""

    when: When = field(default_factory=lambda: When("always"))
    max_gpu_memory: int | None = None
    max_cpu: float | None = None
    upload_limit: int | None = None


@dataclass(frozen=True)
class Sample:
    """What the machine does beside training; None where it does not tell.

    `gpu_others` and `cpu_others` are percent of the GPU's time, and of all cores together, that other processes take.
    `headroom` is in degrees Celsius below where the hottest of processor and GPU must slow down.
    """

    gpu_others: float | None = None
    cpu_others: float | None = None
    on_battery: bool = False
    headroom: float | None = None


@dataclass
class _Need:
    """One reason to pause: from a value of `above` that lasts for `lasting` seconds, until it is below `below`."""

    above: float
    below: float
    lasting: float
    text: str
    reason: str = ""
    _since: float | None = None

    def observe(self, value: float | None, now: float) -> None:
        if value is None or value < (self.below if self.reason else self.above):
            self.reason, self._since = "", None
            return
        if self._since is None:
            self._since = now
        if not self.reason and now - self._since >= self.lasting:
            # The number is the one of the beginning: a reason that changes each second is no news.
            self.reason = self.text.format(abs(value))


class Politeness:
    """The verdict for one machine. Times are in seconds of a clock that never goes back."""

    def __init__(self, when: When) -> None:
        self._when = when
        self._gpu = _Need(10.0, 5.0, 3.0, "another process uses {:.0f}% of the GPU")
        self._cpu = _Need(30.0, 15.0, 5.0, "other processes use {:.0f}% of the CPU")
        self._battery = _Need(1.0, 1.0, 0.0, "the machine runs on battery")
        self._heat = _Need(-5.0, -15.0, 0.0, "the machine is {:.0f} degrees from its limit")
        self._reasons: list[str] = []
        self._needed_at = -math.inf

    def observe(self, sample: Sample, local: time, now: float) -> str:
        """Why the client shall pause, by this sample taken at local time `local`; empty: it shall work."""
        if self._when.kind == "always":
            return ""
        self._gpu.observe(sample.gpu_others, now)
        self._cpu.observe(sample.cpu_others, now)
        self._battery.observe(float(sample.on_battery), now)
        self._heat.observe(None if sample.headroom is None else -sample.headroom, now)
        needs = (self._gpu, self._cpu, self._battery, self._heat)
        reasons = [need.reason for need in needs if need.reason]
        if reasons:
            self._reasons, self._needed_at = reasons, now
        elif now - self._needed_at >= CALM_SECONDS:
            self._reasons = []
        outside = [] if self._when.within(local) else [f"it is outside {self._when}"]
        return ", ".join(outside + self._reasons)


def most_threads(max_cpu: float, cores: int) -> int:
    """How many threads stay within the share `max_cpu` of all cores; at least one."""
    return max(1, math.floor(max_cpu * cores + 1e-9))


def rest_factor(max_cpu: float | None, cores: int, threads: int) -> float:
    """How long to rest after each step, as a multiple of the step, for `threads` busy threads to stay within the share."""
    return 0.0 if max_cpu is None else max(0.0, threads / (max_cpu * cores) - 1.0)
