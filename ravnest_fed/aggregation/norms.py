"""L2 norms that come out the same on every machine and for every order of shards, and the bound drawn from them.

Each shard's squares are summed as integers, on a scale that follows from the shard's own greatest magnitude; the square
root of the exact sum over all shards is then correctly rounded.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ravnest_fed.codecs.base import slices
from ravnest_fed.codecs.float_bits import greatest_magnitude
from ravnest_fed.errors import PayloadError
from ravnest_fed.parameters import Float32

VALUE_BITS: Final = 20
"""Bits of the integers that are squared: the square of a slice's sum stays far below 2^63."""
MIN_HISTORY: Final = 3
"""With fewer recorded norms there is no bound."""


@dataclass(frozen=True)
class SquareSum:
    """The sum of squares total * 4^-scale_bits over one shard's values, and the greatest magnitude among them."""

    total: int
    scale_bits: int
    max_abs: float


def square_sum(values: Float32) -> SquareSum:
    """The squares of a shard's float32 values, each rounded to 20 bits below the greatest magnitude's power of two.

    Raises PayloadError if a value is not finite.
    """
    max_abs = greatest_magnitude(values)
    if not math.isfinite(max_abs):
        raise PayloadError("a value whose norm is asked for is not finite")
    scale_bits = VALUE_BITS - math.frexp(max_abs)[1]
    total = 0
    for start, stop in slices(values.size):
        scaled = values[start:stop].astype(np.float64)
        scaled *= np.float64(math.ldexp(1.0, scale_bits))
        np.rint(scaled, out=scaled)
        q = scaled.astype(np.int64)
        q *= q
        total += int(q.sum())
    return SquareSum(total, scale_bits, max_abs)


def combine(parts: Iterable[SquareSum]) -> float:
    """The norm over all parts: the square root of their exact sum, correctly rounded. Infinite past float64."""
    having = [part for part in parts if part.total]
    if not having:
        return 0.0
    scale_bits = max(part.scale_bits for part in having)
    exact = sum(part.total << 2 * (scale_bits - part.scale_bits) for part in having)
    # 64 bits of root and, in the last, whether anything lies below them: enough to round to 53 correctly.
    shift = max(0, 64 - exact.bit_length() // 2)
    exact <<= 2 * shift
    root = math.isqrt(exact)
    sticky = int(root * root != exact)
    try:
        return math.ldexp(float(root << 1 | sticky), -1 - shift - scale_bits)
    except OverflowError:
        return math.inf


def clip_bound(history: Sequence[float], factor: float) -> float:
    """The greatest norm that counts in full: `factor` times the median of the norms in `history`.

    Infinite, so that nothing is clipped, if `factor` is 0, fewer than 3 norms are recorded, or their median is 0.
    """
    if factor <= 0.0 or len(history) < MIN_HISTORY:
        return math.inf
    bound = statistics.median(history) * factor
    return bound if bound > 0.0 else math.inf
