"""Float32 values by their bit patterns: magnitudes, finiteness, and the flushing of subnormals.

Read as an integer without its sign bit, a float32 orders as its magnitude does. That makes maxima and tests cheap and
keeps them apart from the flush-to-zero modes that libraries may set for a whole process.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from ravnest_fed.parameters import Float32

MAGNITUDE: Final = np.int32(0x7FFFFFFF)
"""All bits but the sign."""
LEAST_NORMAL: Final = np.int32(0x00800000)
"""Bits of 2^-126."""
INFINITY: Final = np.int32(0x7F800000)
"""Bits of infinity; those of every NaN are greater."""
GREATEST_HALF: Final = np.uint16(0x7F7F)
"""The upper half of the greatest finite float32 that has an all-zero lower half."""
LEAST_HALF: Final = np.uint16(0x0081)
"""The upper half of the least such number above 2^-126."""


def greatest_magnitude(values: Float32) -> float:
    """The greatest |value|, exactly; 0.0 of no values, infinity or NaN if a value is not finite."""
    if not values.size:
        return 0.0
    return float((values.view(np.int32) & MAGNITUDE).max().view(np.float32))


def all_finite(values: Float32) -> bool:
    """Whether no value is infinite or NaN."""
    return not values.size or bool((values.view(np.int32) & MAGNITUDE).max() < INFINITY)


def flush_tiny(values: Float32) -> None:
    """Turn -0 and every magnitude of at most 2^-126 into +0, in place.

    The least normal number itself goes with the subnormals: a product just below it is rounded up to it by one
    processor and flushed to zero by another, so only with this bound does each give the same bits in every mode.
    """
    bits = values.view(np.int32)
    np.copyto(bits, np.int32(0), where=(bits & MAGNITUDE) <= LEAST_NORMAL)


def upper_halves(values: Float32) -> npt.NDArray[np.uint16]:
    """The bfloat16 nearest to each non-negative value, ties to even, as its 16 bits; never infinity."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    np.minimum(rounded, np.uint32(GREATEST_HALF), out=rounded)
    return rounded.astype(np.uint16)


def from_upper_halves(halves: npt.NDArray[np.uint16]) -> Float32:
    """The float32 values whose upper 16 bits are `halves` and whose lower ones are zero."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
