"""The reduction of a shard: from the payloads of a set of contributions to the encoded mean.

Parameters and buffers are averaged by exact sums, counters take the greatest growth. The result depends on the set and
its weights alone, never on the order of arrival or on what was added and removed on the way.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from ravnest_fed import codecs
from ravnest_fed.aggregation.fixed_point import Accumulator, SplitAccumulator, require_in_range, value_bits
from ravnest_fed.aggregation.weighting import Weight
from ravnest_fed.codecs import Codec
from ravnest_fed.codecs.base import slices
from ravnest_fed.codecs.counters import decode_counters, encode_counters
from ravnest_fed.errors import LocalProtocolError, PayloadError, RavnestError
from ravnest_fed.hashing import Buffer
from ravnest_fed.parameters import Kind

BUFFER_CODEC: Final = codecs.get("fp32")
"""What buffers are encoded with, both ways."""

ReadPayload = Callable[[bytes], Buffer]
"""Gives a contribution's payload of the shard by the contribution's id."""


def check_shard(kind: Kind, payload: Buffer, count: int, codec_up: Codec, max_contributions: int) -> None:
    """Raise PayloadError unless `payload` decodes; OutOfRange for a buffer past what `ShardAccumulator` can sum.

    The range of parameters follows from the round's scale and the greatest magnitude, see `fixed_point`.
    """
    if kind == "counters":
        decode_counters(payload, count)
    elif kind == "parameters":
        codec_up.check(payload, count)
    else:
        require_in_range(BUFFER_CODEC.decode(payload, count), 0, value_bits(max_contributions))


class ShardAccumulator:
    """The sums over one shard of the contributions that arrived, brought to any wanted set at the end.

    Buffers are always in fp32 and count by their share, unclipped. For counters only the arrival is noted. A
    contribution's id is any bytes that name it, such as its manifest's hash. Not thread-safe.
    """

    def __init__(
        self, kind: Kind, count: int, scale_bits: int, max_contributions: int, codec_up: Codec, codec_down: Codec
    ) -> None:
        self.kind = kind
        self.count = count
        self.scale_bits = scale_bits
        self._limit_bits = value_bits(max_contributions)
        self._codec_up = BUFFER_CODEC if kind == "buffers" else codec_up
        self._codec_down = BUFFER_CODEC if kind == "buffers" else codec_down
        self._held: dict[bytes, Weight] = {}
        self._sums = self._empty()

    @property
    def held(self) -> Mapping[bytes, Weight]:
        """The contributions that the sums hold now."""
        return self._held

    def add(self, contribution: bytes, payload: Buffer, weight: Weight) -> None:
        """Add a contribution; one that is held already with this weight is left as it is.

        Raises PayloadError (OutOfRange if a value is past the scale's reach), and then holds what it held before.
        """
        if contribution in self._held:
            if self._held[contribution] == weight:
                return
            self.remove(contribution, payload)
        if self._sums is None:
            decode_counters(payload, self.count)
        else:
            done = 0
            try:
                for start, stop in slices(self.count, self._codec_up.step):
                    places, values = self._codec_up.entries(payload, self.count, start, stop)
                    self._sums.add(values, self._factor(weight), start, places)
                    done = stop
            except PayloadError:
                self._take_back(payload, weight, done)
                raise
        self._held[contribution] = weight

    def remove(self, contribution: bytes, payload: Buffer) -> None:
        """Take a contribution out again, exactly; `payload` must be the bytes that were added.

        Raises PayloadError if it does not decode any more, and then holds nothing at all.
        """
        try:
            self._take_back(payload, self._held.pop(contribution), self.count)
        except PayloadError:
            self._clear()
            raise

    def finish(
        self, chosen: Mapping[bytes, Weight], total_share: int, read: ReadPayload, effective_steps: float = 1.0
    ) -> bytes:
        """The encoded mean over exactly the contributions `chosen`; the sums hold them afterwards, and no other.

        The mean is the sum of weight * value over `total_share`, the sum of the shares; of parameters, times
        `effective_steps` (FedNova). Payloads are read where one is
        missing or too many. Raises PayloadError if a chosen one is damaged, and what `read` raises for one.
        """
        if not chosen:
            raise LocalProtocolError("a mean over no contribution is not defined")
        if self._sums is None:
            greatest = np.zeros(self.count, np.int64)
            for contribution in chosen:
                np.maximum(greatest, decode_counters(read(contribution), self.count), out=greatest)
            self._held = dict(chosen)
            return encode_counters(greatest)
        surplus = [key for key, weight in self._held.items() if chosen.get(key) != weight]
        if len(surplus) > len(self._held) - len(surplus):
            self._clear()
        else:
            try:
                for contribution in surplus:
                    self.remove(contribution, read(contribution))
            except RavnestError:
                # What is not wanted need not be kept: without its bytes, the sums are made anew from what is.
                self._clear()
        for contribution, weight in chosen.items():
            if contribution not in self._held:
                self.add(contribution, read(contribution), weight)
        assert self._sums is not None
        if isinstance(self._sums, Accumulator):
            return self._codec_down.encode(self._sums.mean(total_share, effective_steps))
        return self._codec_down.encode(self._sums.mean(total_share))

    def _empty(self) -> Accumulator | SplitAccumulator | None:
        if self.kind == "counters":
            return None
        if self.kind == "buffers":
            return SplitAccumulator(self.count, self._limit_bits)
        return Accumulator(self.count, self.scale_bits, self._limit_bits)

    def _clear(self) -> None:
        self._held.clear()
        self._sums = self._empty()

    def _factor(self, weight: Weight) -> int:
        return weight.share if self.kind == "buffers" else weight.weight

    def _take_back(self, payload: Buffer, weight: Weight, end: int) -> None:
        if self._sums is not None:
            for start, stop in slices(end, self._codec_up.step):
                places, values = self._codec_up.entries(payload, self.count, start, stop)
                self._sums.subtract(values, self._factor(weight), start, places)


def reduce_shard(
    kind: Kind,
    count: int,
    contributions: Mapping[bytes, Weight],
    total_share: int,
    read: ReadPayload,
    scale_bits: int,
    max_contributions: int,
    codec_up: Codec,
    codec_down: Codec,
    effective_steps: float = 1.0,
) -> bytes:
    """The encoded mean of a shard of `count` values over a whole set at once; see `ShardAccumulator` for its terms."""
    sums = ShardAccumulator(kind, count, scale_bits, max_contributions, codec_up, codec_down)
    return sums.finish(contributions, total_share, read, effective_steps)
