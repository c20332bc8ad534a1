"""LZ4 frames for what it makes smaller: evidence and commits. Never expands beyond a bound that the reader names.

A frame is one byte that says how (0: as it is, 1: LZ4 block), the length of the content as uint32 little-endian, and the
content.
"""

import struct

import lz4.block

from ravnest_fed.errors import PayloadError
from ravnest_fed.hashing import Buffer

_HEADER = struct.Struct("<BI")
_PLAIN, _LZ4 = 0, 1


def pack(content: bytes) -> bytes:
    """Frame `content`, compressed if that makes it smaller."""
    compressed = lz4.block.compress(content, store_size=False)
    how, body = (_LZ4, compressed) if len(compressed) < len(content) else (_PLAIN, content)
    return _HEADER.pack(how, len(content)) + body


def unpack(frame: Buffer, bound: int) -> bytes:
    """The content of `frame`, of at most `bound` bytes. Raises PayloadError for anything else."""
    if len(frame) < _HEADER.size:
        raise PayloadError(f"a frame of {len(frame)} bytes is cut short")
    how, length = _HEADER.unpack_from(frame)
    if length > bound:
        raise PayloadError(f"a frame declares {length} bytes, the bound is {bound}")
    body = bytes(memoryview(frame)[_HEADER.size :])
    if how == _PLAIN and len(body) == length:
        return body
    if how == _LZ4:
        try:
            content: bytes = lz4.block.decompress(body, uncompressed_size=length)
        except (lz4.block.LZ4BlockError, ValueError):
            content = b""
        if len(content) == length:
            return content
    raise PayloadError("a frame is damaged")
