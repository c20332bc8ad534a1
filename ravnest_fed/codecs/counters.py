"""The payload of a shard of integer buffers: how much each counter grew, as 64-bit integers.

Not in the registry: counters are always sent like this, whatever codec the parameters have.
"""

from typing import Final

import numpy as np

from ravnest_fed.codecs.base import HEADER, open_payload, write_header
from ravnest_fed.errors import LocalProtocolError, PayloadError
from ravnest_fed.hashing import Buffer
from ravnest_fed.parameters import Int64

CODEC_ID: Final = 32
MAX_INCREMENT: Final = 2**48
"""The most that a counter may grow in one round."""


def counters_size(count: int) -> int:
    """Bytes of a payload of `count` counters, header included."""
    return HEADER.size + 8 * count


def encode_counters(increments: Int64) -> bytes:
    """The payload of an int64 vector of increments, each from 0 to 2^48. Raises PayloadError if one is not."""
    if increments.dtype != np.int64 or increments.ndim != 1:
        raise LocalProtocolError(f"counters are an int64 vector, not {increments.dtype} of shape {increments.shape}")
    _check_bounds(increments, MAX_INCREMENT)
    return write_header(CODEC_ID, increments.size).tobytes() + increments.astype("<i8").tobytes()


def decode_counters(payload: Buffer, count: int, most: int = MAX_INCREMENT) -> Int64:
    """The `count` increments of a payload, each from 0 to `most`. Raises PayloadError if one is not, or for damage."""
    body = open_payload(payload, CODEC_ID, count, counters_size(count), "counters")
    increments = body.view("<i8").astype(np.int64)
    _check_bounds(increments, min(most, MAX_INCREMENT))
    return increments


def _check_bounds(increments: Int64, most: int) -> None:
    if increments.size and not 0 <= increments.min() <= increments.max() <= most:
        raise PayloadError(f"a counter grew by less than 0 or more than {most}", "count steps upwards")
