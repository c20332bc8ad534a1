"""What all codecs share: the interface, the header, and the walk over a vector in slices that fit the cache.

A payload is an 8-byte header and a body whose length follows from the codec and the count, all little-endian. A payload
comes from outside: its length is checked before anything is allocated, every value's bounds before it is used.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ravnest_fed.codecs.float_bits import all_finite
from ravnest_fed.errors import LocalProtocolError, PayloadError
from ravnest_fed.hashing import Buffer
from ravnest_fed.parameters import BLOCK, Float32, Int64

Bytes = npt.NDArray[np.uint8]

MAGIC: Final = b"RF"
VERSION: Final = 1
HEADER: Final = struct.Struct("<2sBBI")
"""Magic, codec id, version, count of values."""
SLICE: Final = 8 * BLOCK
"""Values that are worked on at once: their float32 and int64 forms fit a core's cache together."""


def slices(count: int, step: int = SLICE) -> Iterator[tuple[int, int]]:
    """The ranges (start, stop) that cover `count` values, each at most `step` long and starting at a whole block."""
    for start in range(0, count, step):
        yield start, min(start + step, count)


class Entries(NamedTuple):
    """Decoded values, float32, and their places in the range asked for; None: all of it, in order."""

    places: Int64 | None
    values: Float32


def write_header(codec_id: int, count: int) -> Bytes:
    """The header of a payload of `count` values. Raises LocalProtocolError if the count does not fit it."""
    if count >= 2**32:
        raise LocalProtocolError(f"{count} values do not fit one payload", "cut the vector into shards")
    return np.frombuffer(HEADER.pack(MAGIC, codec_id, VERSION, count), np.uint8)


def open_payload(payload: Buffer, codec_id: int, count: int, size: int, name: str) -> Bytes:
    """The body of a payload that must hold `count` values of codec `codec_id` in `size` bytes, header included.

    Raises PayloadError otherwise. No byte is copied.
    """
    length = memoryview(payload).nbytes
    if length != size:
        raise PayloadError(f"a {name} payload of {count} values has {length} bytes, not {size}", "send it again")
    raw = np.frombuffer(payload, np.uint8)
    found = HEADER.unpack(raw[: HEADER.size].tobytes())
    if found != (MAGIC, codec_id, VERSION, count):
        raise PayloadError(
            f"the header of a {name} payload of {count} values says {found[0]!r}, codec {found[1]}, "
            f"version {found[2]}, {found[3]} values",
            "use the codec and the schema of the federation",
        )
    return raw[HEADER.size :]


class Codec(ABC):
    """One way to encode float32 vectors. Stateless: one object serves all threads.

    A decoded vector is finite, and holds neither -0 nor a magnitude of at most 2^-126 (see `flush_tiny`).
    """

    name: ClassVar[str]
    """What federation files and manifests call it."""
    codec_id: ClassVar[int]
    """The codec in a payload's header; never given to another."""
    feedback_decay: ClassVar[float | None] = None
    """What a client's residual is multiplied by before it joins the next delta; None for a codec that loses so little
    that no residual is kept."""
    warmup_rounds: ClassVar[int] = 0
    """In how many first rounds, unless a federation says otherwise, contributions travel in a denser codec."""

    step: ClassVar[int] = SLICE
    """Values that one call of `_encode_slice`, `_check_slice` or `_decode_slice` gets at most: whole blocks."""

    def encoded_size(self, count: int) -> int:
        """Bytes of a payload of `count` values, header included. A codec of variable size gives its upper bound."""
        return HEADER.size + self._body_size(count)

    def encode(self, vector: Float32) -> bytes:
        """The payload of a one-dimensional float32 vector. Raises PayloadError if a value is not finite."""
        _require_vector(vector)
        count = vector.size
        header = write_header(self.codec_id, count)
        payload = np.empty(self.encoded_size(count), np.uint8)
        payload[: HEADER.size] = header
        for start, stop in slices(count, self.step):
            values = np.ascontiguousarray(vector[start:stop])
            if not all_finite(values):
                raise PayloadError(
                    f"a value between {start} and {stop} of the vector to encode is not finite",
                    "lower the learning rate if training diverged",
                )
            self._encode_slice(values, payload[HEADER.size :], count, start)
        return payload.tobytes()

    def decode(self, payload: Buffer, count: int) -> Float32:
        """The `count` values of a payload. Raises PayloadError if it is damaged or out of bounds."""
        return self.decode_range(payload, count, 0, count)

    def decode_into(self, payload: Buffer, count: int, out: Float32) -> None:
        """Like `decode`, into `out`: contiguous, float32, of `count` values. After an error, `out` holds anything."""
        self.decode_range(payload, count, 0, count, out)

    def decode_range(self, payload: Buffer, count: int, start: int, stop: int, out: Float32 | None = None) -> Float32:
        """Values `start` to `stop` of a payload of `count`, into `out` if one is given.

        `start` and `stop` are multiples of 4096, or `count`. The header, the length and these values are checked, not
        those outside the range. Raises PayloadError for damage, LocalProtocolError for a range or an `out` that does
        not fit.
        """
        body = self._open(payload, count)
        require_range(count, start, stop)
        if out is None:
            out = np.empty(stop - start, np.float32)
        _require_vector(out)
        if out.size != stop - start or not out.flags.c_contiguous:
            raise LocalProtocolError(f"{stop - start} values do not go into an array of {out.size}")
        for first, last in slices(stop - start, self.step):
            self._decode_slice(body, count, start + first, start + last, out[first:last])
        return out

    def entries(self, payload: Buffer, count: int, start: int, stop: int) -> Entries:
        """Like `decode_range`, but of a sparse codec only the values that it kept; every other one is zero."""
        return Entries(None, self.decode_range(payload, count, start, stop))

    def check(self, payload: Buffer, count: int) -> None:
        """Raise PayloadError unless `decode` would succeed; decodes nothing and allocates one slice at most."""
        body = self._open(payload, count)
        for start, stop in slices(count, self.step):
            self._check_slice(body, count, start, stop)

    def _open(self, payload: Buffer, count: int) -> Bytes:
        return open_payload(payload, self.codec_id, count, self.encoded_size(count), self.name)

    @abstractmethod
    def _body_size(self, count: int) -> int:
        """Bytes that follow the header."""

    @abstractmethod
    def _encode_slice(self, values: Float32, body: Bytes, count: int, start: int) -> None:
        """Write finite `values`, which start at value `start` of `count`, to their places in `body`."""

    @abstractmethod
    def _check_slice(self, body: Bytes, count: int, start: int, stop: int) -> None:
        """Raise PayloadError if values `start` to `stop` are out of bounds."""

    @abstractmethod
    def _decode_slice(self, body: Bytes, count: int, start: int, stop: int, out: Float32) -> None:
        """Fill `out` with the values `start` to `stop`; raise PayloadError if they are out of bounds."""


def require_range(count: int, start: int, stop: int) -> None:
    """Raise LocalProtocolError unless `start` to `stop` is a range of whole blocks of `count` values."""
    if not 0 <= start <= stop <= count or any(edge % BLOCK and edge != count for edge in (start, stop)):
        raise LocalProtocolError(f"the range {start} to {stop} of {count} values is not one of whole blocks")


def _require_vector(vector: Float32) -> None:
    if vector.dtype != np.float32 or vector.ndim != 1:
        raise LocalProtocolError(f"a codec takes float32 vectors, not {vector.dtype} of shape {vector.shape}")
