"""Dense codecs that keep every value by itself: `fp32` and `fp16`, IEEE 754 binary32 and binary16."""

from typing import Final

import numpy as np

from ravnest_fed.codecs.base import Bytes, Codec
from ravnest_fed.codecs.float_bits import all_finite, flush_tiny
from ravnest_fed.errors import PayloadError
from ravnest_fed.parameters import Float32

MAX_FP16: Final = np.float32(65504)
"""The greatest finite binary16 number."""


class Fp32(Codec):
    """Four bytes a value, unchanged."""

    name = "fp32"
    codec_id = 1

    def _body_size(self, count: int) -> int:
        return 4 * count

    def _encode_slice(self, values: Float32, body: Bytes, count: int, start: int) -> None:
        body[4 * start : 4 * (start + values.size)].view("<f4")[:] = values

    def _check_slice(self, body: Bytes, count: int, start: int, stop: int) -> None:
        values = body[4 * start : 4 * stop].view("<f4").astype(np.float32, copy=False)
        if not all_finite(values):
            raise PayloadError(f"a value between {start} and {stop} of an fp32 payload is not finite")

    def _decode_slice(self, body: Bytes, count: int, start: int, stop: int, out: Float32) -> None:
        self._check_slice(body, count, start, stop)
        out[:] = body[4 * start : 4 * stop].view("<f4")
        flush_tiny(out)


class Fp16(Codec):
    """Two bytes a value, rounded to nearest, ties to even; a magnitude past 65504 becomes 65504."""

    name = "fp16"
    codec_id = 2

    def _body_size(self, count: int) -> int:
        return 2 * count

    def _encode_slice(self, values: Float32, body: Bytes, count: int, start: int) -> None:
        body[2 * start : 2 * (start + values.size)].view("<f2")[:] = np.clip(values, -MAX_FP16, MAX_FP16)

    def _check_slice(self, body: Bytes, count: int, start: int, stop: int) -> None:
        bits = body[2 * start : 2 * stop].view("<u2")
        if bits.size and (bits & np.uint16(0x7FFF)).max() >= 0x7C00:
            raise PayloadError(f"a value between {start} and {stop} of an fp16 payload is not finite")

    def _decode_slice(self, body: Bytes, count: int, start: int, stop: int, out: Float32) -> None:
        self._check_slice(body, count, start, stop)
        out[:] = body[2 * start : 2 * stop].view("<f2")
        flush_tiny(out)
