"""From a delta to the payloads of its shards, with the norm and range that every decoder will measure."""

from typing import NamedTuple

from ravnest_fed import codecs
from ravnest_fed.aggregation.norms import combine, square_sum
from ravnest_fed.aggregation.reduce import BUFFER_CODEC
from ravnest_fed.codecs.counters import encode_counters
from ravnest_fed.parameters import ModelState, Schema


class EncodedDelta(NamedTuple):
    """One payload a shard; `norm` and `max_abs` are those of the decoded parameters."""

    payloads: tuple[bytes, ...]
    norm: float
    max_abs: float


def encode_delta(schema: Schema, codec_name: str, delta: ModelState) -> EncodedDelta:
    """Encode `delta` (base minus local vector, local minus base counters). Raises PayloadError for what cannot be."""
    codec = codecs.get(codec_name)
    payloads, squares = [], []
    for shard in schema.shards:
        if shard.kind == "counters":
            payloads.append(encode_counters(delta.counters[shard.start : shard.stop]))
        elif shard.kind == "buffers":
            payloads.append(BUFFER_CODEC.encode(delta.vector[shard.start : shard.stop]))
        else:
            payload = codec.encode(delta.vector[shard.start : shard.stop])
            payloads.append(payload)
            squares.append(square_sum(codec.decode(payload, shard.count)))
    return EncodedDelta(tuple(payloads), combine(squares), max(part.max_abs for part in squares))
