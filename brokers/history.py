"""What a client's rounds really took, smoothed: quick to believe that it got slower, slow to believe the contrary."""

import math
from dataclasses import dataclass, field

DROP, RISE = 0.8, 0.65
"""How much of the way a smoothed speed goes towards a lower and towards a higher one."""
TRUST = 1.25
"""No order is greater than this factor times what the broker's own clock saw delivered in as much time."""
MISSED = 0.5
"""Who did not finish in time may have done anything below the order; half of it is the best guess."""
GROWTH = 2.0
"""Without the broker's own clock, no order is greater than this factor times the steps delivered last."""


class SpeedEstimator:
    """A speed from single measurements of it, in any unit: exponential smoothing with one rate down and another up."""

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, speed: float) -> None:
        """A round was done at this speed. What is no speed (zero, negative, not finite) changes nothing."""
        if not (math.isfinite(speed) and speed > 0):
            return
        if self.value is None:
            self.value = speed
        else:
            self.value += (DROP if speed < self.value else RISE) * (speed - self.value)


@dataclass(frozen=True)
class Delivered:
    """One round's work of a client. `training_seconds` is its own claim.

    `elapsed_seconds` is what this broker's clock saw between the order and the whole contribution; None where another
    broker was home.
    """

    local_steps: int
    num_examples: int
    training_seconds: float
    elapsed_seconds: float | None = None


@dataclass
class History:
    """A client's rounds so far: its speed in samples/s, and the seconds of a round that are not training."""

    speed: SpeedEstimator = field(default_factory=SpeedEstimator)
    rounds: int = 0
    _pace: SpeedEstimator = field(default_factory=SpeedEstimator)
    _proven_steps: int = 0
    _proven_rate: float | None = None

    @property
    def overhead(self) -> float | None:
        """Seconds of a round for transfers, folding and waiting, by this broker's clock; None until it saw a round."""
        return None if self._pace.value is None else 1.0 / self._pace.value

    def delivered(self, work: Delivered) -> None:
        """A contribution came, or was committed."""
        if work.training_seconds <= 0 or work.num_examples < 1 or work.local_steps < 1:
            return
        self.rounds += 1
        elapsed = work.elapsed_seconds
        training = work.training_seconds if elapsed is None else min(work.training_seconds, elapsed)
        if training > 0:
            self.speed.observe(work.num_examples / training)
        self._proven_steps = work.local_steps
        self._proven_rate = work.local_steps / elapsed if elapsed else None
        if elapsed is not None:
            # As a pace, so that a slower transfer is believed quickly and a faster one slowly.
            self._pace.observe(1.0 / max(elapsed - training, 1e-3))

    def missed(self, local_steps: int, num_examples: int, elapsed_seconds: float) -> None:
        """An order of so many steps and examples was not fulfilled in this time: the client is slower than that."""
        if elapsed_seconds <= 0 or local_steps < 1:
            return
        self.rounds += 1
        guess = MISSED * num_examples / elapsed_seconds
        if self.speed.value is None or guess < self.speed.value:
            self.speed.observe(guess)
        self._proven_steps, self._proven_rate = local_steps, local_steps / elapsed_seconds

    def most_steps(self, target_seconds: float) -> int | None:
        """The most steps that deliveries justify for a round of this length, whatever was claimed; None without any."""
        if not self.rounds:
            return None
        if self._proven_rate is not None:
            return max(1, math.floor(TRUST * self._proven_rate * target_seconds))
        return max(1, math.floor(GROWTH * self._proven_steps))
