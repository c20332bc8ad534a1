"""Exact sums: values become integers on a common scale, so that order does not matter and subtraction takes back.

A value v counts as q = rint(v * 2^S); a contribution adds w * q to a 64-bit sum. S, the scale's bits, is common to a
round and so chosen that the sum cannot overflow at the most contributions allowed.
"""

import math
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from ravnest_fed.codecs.base import slices
from ravnest_fed.codecs.float_bits import flush_tiny, greatest_magnitude
from ravnest_fed.errors import LocalProtocolError, PayloadError
from ravnest_fed.parameters import Float32, Int64

Float64 = npt.NDArray[np.float64]

WEIGHT_BITS: Final = 16
MAX_WEIGHT: Final = 2**WEIGHT_BITS
"""The greatest weight of a contribution."""
SUM_BITS: Final = 62
"""Bits of the greatest magnitude that a sum may reach."""
EXACT: Final = 2.0**53
"""Below this, float64 holds every integer."""
MIN_SCALE_BITS: Final = -128
MAX_SCALE_BITS: Final = 126
"""Bounds of S. With the least one every finite float32 is in range, whatever number of contributions is allowed."""


class OutOfRange(PayloadError):
    """A value is too large for the fixed point of its round, or not finite."""


def value_bits(max_contributions: int) -> int:
    """How many bits |q| may have so that `max_contributions` (at most 2^20) of the greatest weight cannot overflow."""
    return SUM_BITS - WEIGHT_BITS - (max_contributions - 1).bit_length()


def choose_scale_bits(max_abs: Iterable[float], max_contributions: int, headroom_bits: int = 8) -> int:
    """S such that the greatest recorded magnitude still fits when it grows by 2^headroom_bits.

    Magnitudes that are zero or not finite do not count; without any other, 1.0 is assumed.
    """
    greatest = max((value for value in max_abs if 0.0 < value < math.inf), default=1.0)
    _, exponent = math.frexp(greatest)
    return max(MIN_SCALE_BITS, min(MAX_SCALE_BITS, value_bits(max_contributions) - headroom_bits - exponent))


def quantise(values: Float32, scale_bits: int, limit_bits: int = SUM_BITS) -> Int64:
    """q = rint(float64(value) * 2^scale_bits) as int64, ties to even.

    Raises OutOfRange unless every value is finite and |value| * 2^scale_bits < 2^limit_bits.
    """
    require_in_range(values, scale_bits, limit_bits)
    return _rounded(values, scale_bits).astype(np.int64)


def _rounded(values: Float32, scale_bits: int) -> Float64:
    scaled = values.astype(np.float64)
    scaled *= np.float64(math.ldexp(1.0, scale_bits))
    np.rint(scaled, out=scaled)
    return scaled


def require_in_range(values: Float32, scale_bits: int, limit_bits: int) -> float:
    """The greatest magnitude; raise OutOfRange unless `quantise` can take these values."""
    greatest = greatest_magnitude(values)
    limit = math.ldexp(1.0, limit_bits - scale_bits)
    if not greatest < limit:
        raise OutOfRange(f"a value of magnitude {greatest:.3g} is past the fixed point's reach of {limit:.3g}")
    return greatest


class Accumulator:
    """The weighted sum of contributions to `count` values, on the scale `scale_bits`, with |q| below 2^limit_bits.

    Sums wrap around at 2^64 like all arithmetic on int64, so that a sum which is too large for a while comes back
    exactly once enough was subtracted.
    """

    def __init__(self, count: int, scale_bits: int, limit_bits: int) -> None:
        self.scale_bits = scale_bits
        self.limit_bits = limit_bits
        self._sum = np.zeros(count, np.int64)

    @property
    def count(self) -> int:
        """How many values are summed."""
        return self._sum.size

    def add(self, values: Float32, weight: int, start: int = 0, places: Int64 | None = None) -> None:
        """Add weight * values to the sums from `start` on. Raises OutOfRange before anything is added.

        With `places`, each value belongs that far behind `start`; they are in order, and none stands there twice.
        """
        weighted = self._weighted(values, weight, start, places)
        self._sum[_indices(values, start, places)] += weighted

    def subtract(self, values: Float32, weight: int, start: int = 0, places: Int64 | None = None) -> None:
        """Take back exactly what `add` added for the same arguments."""
        weighted = self._weighted(values, weight, start, places)
        self._sum[_indices(values, start, places)] -= weighted

    def mean(self, total_weight: int, factor: float = 1.0) -> Float32:
        """float32(float64(sum) / float64(total_weight) / 2^S * factor) of every value; magnitudes of at most 2^-126 become +0.

        A sum past 2^53 is rounded as it becomes float64. That and each later step is one correctly rounded operation,
        so the result is the same everywhere.
        """
        means = np.empty(self.count, np.float32)
        for start, stop in slices(self.count):
            means[start:stop] = _divide(self.sums(start, stop), total_weight, self.scale_bits, factor)
        return means

    def sums(self, start: int, stop: int) -> Float64:
        """The sums `start` to `stop` on the fixed point's scale, each rounded to float64."""
        return self._sum[start:stop].astype(np.float64)

    def _weighted(self, values: Float32, weight: int, start: int, places: Int64 | None) -> Int64:
        stop = start + (values.size if places is None else int(places[-1]) + 1 if places.size else 0)
        if not 0 <= weight <= MAX_WEIGHT or not 0 <= start <= stop <= self.count:
            raise LocalProtocolError(f"{values.size} values at {start} with weight {weight} miss {self.count} sums")
        greatest = require_in_range(values, self.scale_bits, self.limit_bits)
        rounded = _rounded(values, self.scale_bits)
        if (math.ldexp(greatest, self.scale_bits) + 1.0) * weight < EXACT:
            # Below 2^53 a product of integers is exact in float64 too, and much faster there.
            rounded *= np.float64(weight)
            return rounded.astype(np.int64)
        weighted = rounded.astype(np.int64)
        weighted *= np.int64(weight)
        return weighted


class SplitAccumulator:
    """Like `Accumulator`, for values whose magnitude nobody recorded: whole parts and fractions are summed apart.

    The reach is 2^limit_bits and the step 2^-limit_bits, in every round and for every set of contributions.
    """

    def __init__(self, count: int, limit_bits: int) -> None:
        self._whole = Accumulator(count, 0, limit_bits)
        self._fraction = Accumulator(count, limit_bits, limit_bits)

    @property
    def count(self) -> int:
        """How many values are summed."""
        return self._whole.count

    def add(self, values: Float32, weight: int, start: int = 0, places: Int64 | None = None) -> None:
        """Add weight * values to the sums from `start` on. Raises OutOfRange before anything is added."""
        require_in_range(values, 0, self._whole.limit_bits)
        whole = np.trunc(values)
        self._whole.add(whole, weight, start, places)
        self._fraction.add(values - whole, weight, start, places)

    def subtract(self, values: Float32, weight: int, start: int = 0, places: Int64 | None = None) -> None:
        """Take back exactly what `add` added for the same arguments."""
        require_in_range(values, 0, self._whole.limit_bits)
        whole = np.trunc(values)
        self._whole.subtract(whole, weight, start, places)
        self._fraction.subtract(values - whole, weight, start, places)

    def mean(self, total_weight: int) -> Float32:
        """The mean of every value in float32, by a fixed order of float64 operations; tiny ones become +0."""
        means = np.empty(self.count, np.float32)
        step = np.float64(math.ldexp(1.0, -self._fraction.scale_bits))
        for start, stop in slices(self.count):
            exact = self._fraction.sums(start, stop) * step
            exact += self._whole.sums(start, stop)
            means[start:stop] = _divide(exact, total_weight, 0)
        return means


def _indices(values: Float32, start: int, places: Int64 | None) -> slice | Int64:
    return slice(start, start + values.size) if places is None else places + start


def _divide(exact: Float64, total_weight: int, scale_bits: int, factor: float = 1.0) -> Float32:
    if total_weight <= 0:
        raise LocalProtocolError(f"a mean over a total weight of {total_weight} is not defined")
    exact /= np.float64(total_weight)
    exact *= np.float64(math.ldexp(1.0, -scale_bits))
    if factor != 1.0:
        exact *= np.float64(factor)
    means = exact.astype(np.float32)
    flush_tiny(means)
    return means
