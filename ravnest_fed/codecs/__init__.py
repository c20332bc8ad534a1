"""Codecs: from a float32 vector to the bytes of a payload and back, each shard by itself.

Here belongs whatever turns values into payload bytes: one module for each family of codecs, the layout that they share
(`base`), and the registry below. What is done with the values (residuals, weights, sums) belongs elsewhere.
"""

from ravnest_fed.codecs.base import Codec
from ravnest_fed.codecs.blockwise import Int4, Int8
from ravnest_fed.codecs.dense import Fp16, Fp32
from ravnest_fed.codecs.sign import Sign
from ravnest_fed.codecs.sparse import TopK40, TopK64, TopK128
from ravnest_fed.errors import UsageError

__all__ = ["Codec", "get", "names"]

_ALL: tuple[Codec, ...] = (Fp32(), Fp16(), Int8(), Int4(), Sign(), TopK128(), TopK64(), TopK40())
_CODECS: dict[str, Codec] = {codec.name: codec for codec in _ALL}


def get(name: str) -> Codec:
    """The codec called `name`. Raises UsageError if there is none."""
    try:
        return _CODECS[name]
    except KeyError:
        raise UsageError(f"there is no codec {name!r}", f"use one of {', '.join(names())}") from None


def names() -> tuple[str, ...]:
    """The names of all codecs."""
    return tuple(_CODECS)
