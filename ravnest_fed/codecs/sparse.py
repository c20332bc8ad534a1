"""The codecs `topk128`, `topk64` and `topk40`: of every block of 4096 values, the k of greatest magnitude.

Sources: the block-wise choice with error feedback follows Sarfi et al., "Communication Efficient LLM Pre-training with
SparseLoCo" (2025); the indices are coded after Elias, "Efficient Storage and Retrieval by Content and Address of Static
Files" (1974), and Fano (1971). Values keep their sign and one of two magnitudes.

The body holds one record a block, all of one size:

    levels   two bfloat16, the small and the large magnitude
    upper    k + 4096 / 2^l bits: for the j-th index kept (from 0), the bit at j + (index >> l) is set
    lower    l bits an index: index mod 2^l
    signs    one bit an index, 1 for minus
    larges   one bit an index, 1 for the large magnitude

A block with fewer than k values that are not zero keeps only those; what follows in each section is zero.
"""

from typing import ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ravnest_fed.codecs.base import SLICE, Bytes, Codec, Entries, require_range, slices
from ravnest_fed.codecs.float_bits import (
    GREATEST_HALF,
    LEAST_HALF,
    LEAST_NORMAL,
    MAGNITUDE,
    from_upper_halves,
    upper_halves,
)
from ravnest_fed.errors import PayloadError
from ravnest_fed.hashing import Buffer
from ravnest_fed.parameters import BLOCK, Float32, Int64

Bools = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]

LEVEL_BYTES: Final = 4


class _Kept(NamedTuple):
    """What is kept of a slice, by entry: block, rank in it and place in it; and how many by block."""

    block: Int64
    rank: Int64
    place: Int64
    counts: Int64


class TopK(Codec):
    """What the sparse codecs share. A subclass names k; its sections are whole bytes."""

    feedback_decay = 0.95
    warmup_rounds = 3
    step = 8 * SLICE
    kept: ClassVar[int]
    """k: values kept of a block, at most."""
    low_bits: ClassVar[int]
    """l: bits of an index that stand as they are, floor(log2(4096 / k))."""

    def _sections(self) -> tuple[slice, slice, slice, slice]:
        """Where upper, lower, signs and larges lie in a record."""
        sizes = (self._upper_bits // 8, self.kept * self.low_bits // 8, self.kept // 8, self.kept // 8)
        edges = [LEVEL_BYTES + sum(sizes[:number]) for number in range(5)]
        upper, lower, signs, larges = (slice(*edges[number : number + 2]) for number in range(4))
        return upper, lower, signs, larges

    @property
    def _upper_bits(self) -> int:
        return self.kept + (BLOCK >> self.low_bits)

    @property
    def _record_size(self) -> int:
        return int(self._sections()[-1].stop)

    def _body_size(self, count: int) -> int:
        return self._record_size * -(-count // BLOCK)

    def _records_of(self, body: Bytes, start: int, stop: int) -> Bytes:
        first, last = start // BLOCK, -(-stop // BLOCK)
        return body[self._record_size * first : self._record_size * last].reshape(-1, self._record_size)

    # --- encoding ----------------------------------------------------------------------------------------------------

    def _encode_slice(self, values: Float32, body: Bytes, count: int, start: int) -> None:
        records = self._records_of(body, start, start + values.size)
        if values.size % BLOCK:
            values = np.concatenate([values, np.zeros(-values.size % BLOCK, np.float32)])
        rows = values.reshape(-1, BLOCK)
        kept = self._choose(rows)
        chosen = rows[kept.block, kept.place]
        magnitudes = np.zeros((len(rows), self.kept), np.float64)
        magnitudes[kept.block, kept.rank] = np.abs(chosen)
        large, levels = _two_levels(magnitudes, kept.counts)
        negative = np.zeros(large.shape, np.bool_)
        negative[kept.block, kept.rank] = chosen < 0
        heads = np.zeros((len(rows), self._upper_bits), np.bool_)
        heads[kept.block, kept.rank + (kept.place >> self.low_bits)] = True
        low = np.zeros(large.shape, np.uint8)
        low[kept.block, kept.rank] = kept.place & ((1 << self.low_bits) - 1)
        upper, lower, signs, larges = self._sections()
        records[:, :LEVEL_BYTES] = levels.astype("<u2").view(np.uint8)
        records[:, upper] = np.packbits(heads, axis=1, bitorder="little")
        low_bits = np.unpackbits(low[:, :, None], axis=2, count=self.low_bits, bitorder="little")
        records[:, lower] = np.packbits(low_bits.reshape(len(rows), -1), axis=1, bitorder="little")
        records[:, signs] = np.packbits(negative, axis=1, bitorder="little")
        records[:, larges] = np.packbits(large, axis=1, bitorder="little")

    def _choose(self, rows: Float32) -> _Kept:
        """The k greatest magnitudes above 2^-126 of each row, ties to the lower index."""
        parts = [self._places(rows[start // BLOCK : stop // BLOCK]) for start, stop in slices(rows.size)]
        counts = np.concatenate([part_counts for _, part_counts in parts])
        places = np.concatenate([part + number * SLICE for number, (part, _) in enumerate(parts)])
        block = places // BLOCK
        return _Kept(block, _ranks(block, counts), places % BLOCK, counts)

    def _places(self, rows: Float32) -> tuple[Int64, Int64]:
        """Of a few rows, where the values kept lie in them as one vector, and how many they are by row."""
        magnitudes = rows.view(np.int32) & MAGNITUDE
        threshold = np.partition(magnitudes, BLOCK - self.kept, axis=1)[:, BLOCK - self.kept]
        mask = magnitudes >= np.maximum(threshold, LEAST_NORMAL + np.int32(1))[:, None]
        counts = mask.sum(axis=1)
        for row in np.flatnonzero(counts > self.kept).tolist():
            tied = np.flatnonzero(magnitudes[row] == threshold[row])
            mask[row, tied[self.kept - counts[row] :]] = False
            counts[row] = self.kept
        return np.flatnonzero(mask), counts

    # --- decoding ----------------------------------------------------------------------------------------------------

    def entries(self, payload: Buffer, count: int, start: int, stop: int) -> Entries:
        body = self._open(payload, count)
        require_range(count, start, stop)
        return self._entries(body, start, stop)

    def _check_slice(self, body: Bytes, count: int, start: int, stop: int) -> None:
        self._entries(body, start, stop)

    def _decode_slice(self, body: Bytes, count: int, start: int, stop: int, out: Float32) -> None:
        places, values = self._entries(body, start, stop)
        out[:] = 0
        out[places] = values

    def _entries(self, body: Bytes, start: int, stop: int) -> Entries:
        """What is kept of the values `start` to `stop`. Raises PayloadError for anything that is not well-formed."""
        records = self._records_of(body, start, stop)
        where = f"between {start} and {stop} of a {self.name} payload"
        upper, lower, signs, larges = self._sections()
        heads = np.unpackbits(records[:, upper], axis=1, bitorder="little")
        block, position = np.divmod(np.flatnonzero(heads), self._upper_bits)
        counts = np.bincount(block, minlength=len(records))
        if (counts > self.kept).any():
            raise PayloadError(f"a block {where} keeps more than {self.kept} values")
        rank = _ranks(block, counts)
        bucket = position - rank
        low_bits = np.unpackbits(records[:, lower], axis=1, bitorder="little").reshape(-1, self.kept, self.low_bits)
        low = np.packbits(low_bits, axis=2, bitorder="little")[:, :, 0]
        negative = np.unpackbits(records[:, signs], axis=1, bitorder="little")
        large = np.unpackbits(records[:, larges], axis=1, bitorder="little")
        places = block * BLOCK + (bucket << self.low_bits) + low[block, rank]
        if (bucket >= BLOCK >> self.low_bits).any() or (places >= stop - start).any():
            raise PayloadError(f"an index {where} is out of range")
        if (np.diff(places) <= 0).any():
            raise PayloadError(f"indices {where} do not increase")
        if ((low | negative | large) * (np.arange(self.kept) >= counts[:, None])).any():
            raise PayloadError(f"a block {where} holds more than the values that its indices name")
        levels = np.ascontiguousarray(records[:, :LEVEL_BYTES]).view("<u2").astype(np.uint16)
        used = counts > 0
        if levels[~used].any():
            raise PayloadError(f"a block {where} has levels but no values")
        small_large = levels[used]
        if (small_large < LEAST_HALF).any() or (small_large > GREATEST_HALF).any():
            raise PayloadError(f"a level {where} is not a positive normal number within bounds")
        if (small_large[:, 0] > small_large[:, 1]).any():
            raise PayloadError(f"the levels of a block {where} are out of order")
        values = from_upper_halves(levels[block, large[block, rank]])
        bits = values.view(np.uint32)
        bits |= negative[block, rank].astype(np.uint32) << np.uint32(31)
        return Entries(places, values)


class TopK128(TopK):
    """148 bytes a block of 4096."""

    name = "topk128"
    codec_id = 6
    kept = 128
    low_bits = 5


class TopK64(TopK):
    """84 bytes a block of 4096."""

    name = "topk64"
    codec_id = 7
    kept = 64
    low_bits = 6


class TopK40(TopK):
    """57 bytes a block of 4096."""

    name = "topk40"
    codec_id = 8
    kept = 40
    low_bits = 6


def _ranks(block: Int64, counts: Int64) -> Int64:
    """The rank of each entry within its block, where `block` is in order and block b has counts[b] entries."""
    return np.arange(block.size) - (np.cumsum(counts) - counts)[block]


def _two_levels(magnitudes: Float64, counts: Int64) -> tuple[Bools, npt.NDArray[np.uint16]]:
    """Which of the kept magnitudes (one row a block, zeros after the row's count) are large, and both levels' bits.

    The parting with the least squared error: each level is the mean of its part. Sums run from the greatest down.
    """
    rows = np.arange(len(magnitudes))
    ordered = np.sort(magnitudes, axis=1)[:, ::-1]
    sums = np.cumsum(ordered, axis=1)
    total = sums[:, -1]
    taken = np.arange(1, magnitudes.shape[1] + 1)
    left = counts[:, None] - taken
    gain = sums * sums / taken + (total[:, None] - sums) ** 2 / np.maximum(left, 1)
    best = np.where(left > 0, gain, -1.0).argmax(axis=1)
    # Without two values there is nothing to part; equal values are never parted.
    boundary = np.where(counts > 1, ordered[rows, np.minimum(best + 1, magnitudes.shape[1] - 1)], np.inf)
    large = magnitudes > boundary[:, None]
    above = large.sum(axis=1)
    above_sum = np.where(above > 0, sums[rows, above - 1], 0.0)
    small_mean = (total - above_sum) / np.maximum(counts - above, 1)
    large_mean = np.where(above > 0, above_sum / np.maximum(above, 1), small_mean)
    levels = upper_halves(np.stack([small_mean, large_mean], axis=1).astype(np.float32))
    return large, np.where(counts[:, None] > 0, np.maximum(levels, LEAST_HALF), np.uint16(0))
