"""The codec `sign`: one bit a value, and a scale for each block of 512 neighbours.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (2019): a value becomes
its sign times the mean magnitude of its block. Only error feedback makes it converge.

The body holds the scales of all blocks, then one bit a value.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from ravnest_fed.codecs.base import Bytes, Codec
from ravnest_fed.codecs.float_bits import GREATEST_HALF, LEAST_HALF, from_upper_halves, upper_halves
from ravnest_fed.errors import PayloadError
from ravnest_fed.parameters import Float32

Halves = npt.NDArray[np.uint16]

BLOCK: Final = 512


class Sign(Codec):
    """One bit a value and two bytes a block of 512: 0 for plus, 1 for minus, the scale in bfloat16.

    A block of zeros has the scale 0 and decodes to zeros. In any other block, a zero counts as positive.
    """

    name = "sign"
    codec_id = 5
    feedback_decay = 1.0

    def _body_size(self, count: int) -> int:
        return self._bits_start(count) + -(-count // 8)

    def _bits_start(self, count: int) -> int:
        return 2 * -(-count // BLOCK)

    def _halves_of(self, body: Bytes, start: int, stop: int) -> Halves:
        return body[2 * (start // BLOCK) : 2 * -(-stop // BLOCK)].view("<u2")

    def _bits_of(self, body: Bytes, count: int, start: int, stop: int) -> Bytes:
        base = self._bits_start(count)
        return body[base + start // 8 : base + -(-stop // 8)]

    def _encode_slice(self, values: Float32, body: Bytes, count: int, start: int) -> None:
        stop = start + values.size
        blocks = -(-values.size // BLOCK)
        halves = upper_halves(_mean_magnitudes(values, blocks))
        halves[halves < LEAST_HALF] = 0
        negative = np.zeros(blocks * BLOCK, np.bool_)
        np.less(values, np.float32(0), out=negative[: values.size])
        negative.reshape(blocks, BLOCK)[halves == 0] = False
        self._halves_of(body, start, stop)[:] = halves
        self._bits_of(body, count, start, stop)[:] = np.packbits(negative[: values.size], bitorder="little")

    def _check_slice(self, body: Bytes, count: int, start: int, stop: int) -> None:
        halves = self._halves_of(body, start, stop)
        bits = self._bits_of(body, count, start, stop)
        if not bits.size:
            return
        where = f"between {start} and {stop} of a sign payload"
        if halves.max() > GREATEST_HALF or ((halves != 0) & (halves < LEAST_HALF)).any():
            raise PayloadError(f"a scale {where} is not zero and not a positive normal number within bounds")
        if stop % 8 and bits[-1] >> np.uint8(stop % 8):
            raise PayloadError(f"the bits after the last value {where} are not zero")
        for block in np.flatnonzero(halves == 0).tolist():
            if bits[block * BLOCK // 8 : (block + 1) * BLOCK // 8].any():
                raise PayloadError(f"a block {where} has signs but no scale")

    def _decode_slice(self, body: Bytes, count: int, start: int, stop: int, out: Float32) -> None:
        self._check_slice(body, count, start, stop)
        scales = from_upper_halves(self._halves_of(body, start, stop))
        negative = np.unpackbits(self._bits_of(body, count, start, stop), count=out.size, bitorder="little")
        signs = negative.astype(np.uint32)
        signs <<= np.uint32(31)
        bits, scale_bits = out.view(np.uint32), scales.view(np.uint32)
        whole = out.size - out.size % BLOCK
        np.bitwise_or(
            signs[:whole].reshape(-1, BLOCK),
            scale_bits[: whole // BLOCK, None],
            out=bits[:whole].reshape(-1, BLOCK),
        )
        if whole < out.size:
            np.bitwise_or(signs[whole:], scale_bits[-1], out=bits[whole:])


def _mean_magnitudes(values: Float32, blocks: int) -> Float32:
    """Mean |value| of each block: float64 sums of neighbouring halves, so that the order of additions is fixed."""
    padded = np.zeros(blocks * BLOCK, np.float64)
    np.abs(values, out=padded[: values.size])
    sums: npt.NDArray[np.float64] = padded.reshape(blocks, BLOCK)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    counts = np.full(blocks, BLOCK, np.float64)
    if values.size % BLOCK:
        counts[-1] = values.size % BLOCK
    return (sums[:, 0] / counts).astype(np.float32)
