"""Blockwise codecs: small integers, and one scale for each block of neighbours.

Source of the idea: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022); here linear and symmetric.

The body holds the scales of all blocks, then the codes of all values. A value is code * scale in float32. The scale is
the block's greatest magnitude over the greatest code; a block whose scale would not exceed 2^-126 is all zeros.
"""

from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ravnest_fed.codecs.base import Bytes, Codec
from ravnest_fed.codecs.float_bits import LEAST_NORMAL, MAGNITUDE, from_upper_halves, upper_halves
from ravnest_fed.errors import PayloadError
from ravnest_fed.parameters import Float32

Array = npt.NDArray[Any]
Int8Array = npt.NDArray[np.int8]


class Blockwise(Codec):
    """What blockwise codecs share. A subclass names its block (a divisor of 4096) and packs its codes."""

    block: ClassVar[int]
    """Values that share a scale; the last block may be shorter."""
    greatest: ClassVar[int]
    """Codes run from -greatest to greatest."""
    bits: ClassVar[int]
    """Bits of a packed code."""
    scale_bytes: ClassVar[int]
    """4 for scales in binary32, 2 for bfloat16, the upper half of binary32."""

    @abstractmethod
    def _pack(self, codes: Int8Array, packed: Bytes) -> None:
        """Write `codes` to `packed`."""

    @abstractmethod
    def _unpack(self, packed: Bytes, count: int) -> Int8Array:
        """The `count` codes in `packed`, whatever they are. Raises PayloadError if bits after them are not zero."""

    def _body_size(self, count: int) -> int:
        return self._codes_start(count) + -(-count * self.bits // 8)

    def _codes_start(self, count: int) -> int:
        return self.scale_bytes * -(-count // self.block)

    def _stored_scales(self, body: Bytes, start: int, stop: int) -> Array:
        first, last = start // self.block, -(-stop // self.block)
        return body[self.scale_bytes * first : self.scale_bytes * last].view(f"<u{self.scale_bytes}")

    def _packed_of(self, body: Bytes, count: int, start: int, stop: int) -> Bytes:
        base = self._codes_start(count)
        return body[base + start * self.bits // 8 : base + -(-stop * self.bits // 8)]

    def _encode_slice(self, values: Float32, body: Bytes, count: int, start: int) -> None:
        stop = start + values.size
        greatest = np.maximum.reduceat(values.view(np.int32) & MAGNITUDE, np.arange(0, values.size, self.block))
        scales = self._storable(greatest.view(np.float32) / np.float32(self.greatest))
        scales[scales.view(np.int32) <= LEAST_NORMAL] = 0
        self._stored_scales(body, start, stop)[:] = scales.view(np.uint32) >> np.uint32(32 - 8 * self.scale_bytes)
        # Divided by infinity, a block without a scale has the codes 0.
        scales[scales == 0] = np.inf
        codes = np.empty(values.size, np.int8)
        for blocks, rows, code_rows in self._rows(values, codes):
            ratio = rows / scales[blocks, None]
            np.rint(ratio, out=ratio)
            np.copyto(code_rows, ratio, casting="unsafe")
        self._pack(codes, self._packed_of(body, count, start, stop))

    def _storable(self, scale: Float32) -> Float32:
        """The nearest scale that the body can hold, within bounds."""
        rounded = scale if self.scale_bytes == 4 else from_upper_halves(upper_halves(scale))
        return np.minimum(rounded, self._greatest_scale)

    def _check_slice(self, body: Bytes, count: int, start: int, stop: int) -> None:
        self._open_slice(body, count, start, stop)

    def _open_slice(self, body: Bytes, count: int, start: int, stop: int) -> tuple[Float32, Int8Array]:
        """The scales and codes of the values `start` to `stop`. Raises PayloadError if one is out of bounds."""
        stored = self._stored_scales(body, start, stop)
        scales = stored.astype(np.uint32) << np.uint32(32 - 8 * self.scale_bytes)
        codes = self._unpack(self._packed_of(body, count, start, stop), stop - start)
        if not codes.size:
            return scales.view(np.float32), codes
        where = f"between {start} and {stop} of an {self.name} payload"
        tiny = (scales != 0) & (scales <= np.uint32(LEAST_NORMAL))
        if scales.max() > self._greatest_scale.view(np.uint32) or tiny.any():
            raise PayloadError(f"a scale {where} is not zero and not a positive normal number within bounds")
        if codes.min() < -self.greatest or codes.max() > self.greatest:
            raise PayloadError(f"a code {where} is out of bounds")
        if (scales == 0).any() and any(rows[scales[blocks] == 0].any() for blocks, rows, _ in self._rows(codes, codes)):
            raise PayloadError(f"a block {where} has codes but no scale")
        return scales.view(np.float32), codes

    def _decode_slice(self, body: Bytes, count: int, start: int, stop: int, out: Float32) -> None:
        scales, codes = self._open_slice(body, count, start, stop)
        out[:] = codes
        for blocks, rows, _ in self._rows(out, out):
            np.multiply(rows, scales[blocks, None], out=rows)

    @cached_property
    def _greatest_scale(self) -> np.float32:
        """The greatest scale that can be stored, and that every code can be multiplied by and stay finite."""
        most = float(np.finfo(np.float32).max)
        scale = np.float32(most / self.greatest)
        scale = scale if float(scale) * self.greatest <= most else np.nextafter(scale, np.float32(0))
        unused = np.uint32(32 - 8 * self.scale_bytes)
        return (scale.view(np.uint32) >> unused << unused).view(np.float32)

    def _rows(self, first: Array, second: Array) -> Iterator[tuple[slice, Array, Array]]:
        """Two equally long vectors as rows of one block each, with the blocks' places: whole, then a shorter one."""
        whole = first.size - first.size % self.block
        blocks = whole // self.block
        if whole:
            yield slice(0, blocks), first[:whole].reshape(-1, self.block), second[:whole].reshape(-1, self.block)
        if whole < first.size:
            yield slice(blocks, blocks + 1), first[whole:].reshape(1, -1), second[whole:].reshape(1, -1)


class Int8(Blockwise):
    """One byte a value and four a block of 256: codes -127 to 127 as two's complement."""

    name = "int8"
    codec_id = 3
    block = 256
    greatest = 127
    bits = 8
    scale_bytes = 4

    def _pack(self, codes: Int8Array, packed: Bytes) -> None:
        packed[:] = codes.view(np.uint8)

    def _unpack(self, packed: Bytes, count: int) -> Int8Array:
        return packed.view(np.int8)


class Int4(Blockwise):
    """Half a byte a value and two a block of 64: codes -7 to 7 as two's complement, the first value's in the low half.

    A scale in bfloat16 is off by 1/256 at most, which a code's own step of 1/7 hides.
    """

    name = "int4"
    codec_id = 4
    block = 64
    greatest = 7
    bits = 4
    scale_bytes = 2

    def _pack(self, codes: Int8Array, packed: Bytes) -> None:
        pairs = codes.size // 2
        nibbles = codes[: 2 * pairs].view("<u2") & np.uint16(0x0F0F)
        np.copyto(packed[:pairs], nibbles | nibbles >> np.uint16(4), casting="unsafe")
        if codes.size % 2:
            packed[pairs] = codes[-1] & 15

    def _unpack(self, packed: Bytes, count: int) -> Int8Array:
        pairs = packed.astype("<u2")
        pairs |= pairs << np.uint16(4)
        pairs &= np.uint16(0x0F0F)
        # Of four bits, the highest counts -8 and not 8.
        codes = pairs.view(np.int8)
        codes ^= np.int8(8)
        codes -= np.int8(8)
        if count % 2 and codes[-1]:
            raise PayloadError(f"the bits after the last of {count} codes are not zero")
        return codes[:count]
