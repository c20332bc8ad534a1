"""From a delta to the payloads of its shards, with the norm and range that every decoder will measure."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ravnest_fed import codecs
from ravnest_fed.aggregation.norms import combine, square_sum
from ravnest_fed.aggregation.reduce import BUFFER_CODEC
from ravnest_fed.codecs.counters import encode_counters
from ravnest_fed.parameters import Float32, Int64, Schema, Shard

T = TypeVar("T")


class EncodedDelta(NamedTuple, Generic[T]):
    """One payload a shard, or what `put` gave for it; `norm` and `max_abs` are those of the decoded parameters."""

    payloads: tuple[T, ...]
    norm: float
    max_abs: float


def _itself(payload: bytes) -> Any:
    return payload


class Deltas(Protocol):
    """A delta by shard, such as a `ModelState`: base minus local values, local minus base counters."""

    def shard(self, shard: Shard) -> Float32 | Int64:
        """The shard's values."""


class Feedback(Protocol):
    """What error feedback does around a codec, for one shard of parameters after the other."""

    def wanted(self, shard: Shard, delta: Float32) -> Float32:
        """The values to encode in the place of the shard's delta."""

    def sent(self, shard: Shard, wanted: Float32, decoded: Float32) -> None:
        """The shard's payload decodes to `decoded`."""


def encode_delta(
    schema: Schema,
    codec_name: str,
    delta: Deltas,
    feedback: Feedback | None = None,
    steps: int = 1,
    put: Callable[[bytes], T] = _itself,
) -> EncodedDelta[T]:
    """Encode `delta` shard by shard, parameters by way of `feedback`; `put` takes each payload, so that none need stay.

    Parameters are divided by `steps` first, in float32: see `Federation.steps_counted`. Buffers and counters are not.
    Raises PayloadError for what cannot be encoded.
    """
    codec = codecs.get(codec_name)
    payloads, squares = [], []
    for shard in schema.shards:
        if shard.kind == "counters":
            payloads.append(put(encode_counters(np.asarray(delta.shard(shard), np.int64))))
        elif shard.kind == "buffers":
            payloads.append(put(BUFFER_CODEC.encode(np.asarray(delta.shard(shard), np.float32))))
        else:
            values = np.asarray(delta.shard(shard), np.float32)
            if steps != 1:
                values = values / np.float32(steps)
            wanted = values if feedback is None else feedback.wanted(shard, values)
            payload = codec.encode(wanted)
            payloads.append(put(payload))
            decoded = codec.decode(payload, shard.count)
            squares.append(square_sum(decoded))
            if feedback is not None:
                feedback.sent(shard, wanted, decoded)
    return EncodedDelta(tuple(payloads), combine(squares), max(part.max_abs for part in squares))
