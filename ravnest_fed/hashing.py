"""BLAKE3 digests, Merkle roots, and the identity of blobs.

Every digest is 256 bits. Each use has a domain tag of its own, so that bytes hashed for one purpose can never pass
for another. Source of the hash: O'Connor et al., "BLAKE3: one function, fast everywhere" (2020).
"""

from collections.abc import Iterable, Iterator, Sequence

from blake3 import blake3

DIGEST_SIZE = 32
CHUNK_SIZE = 256 * 1024
"""Bytes of a chunk, the unit of transfer. The last chunk of a blob may be shorter."""

Buffer = bytes | bytearray | memoryview


def digest(domain: str, *parts: Buffer) -> bytes:
    """Hash `parts`, one after the other, under `domain`; the caller frames parts of variable length."""
    hasher = blake3(derive_key_context=f"ravnest-fed 1 {domain}")
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def merkle_root(domain: str, leaves: Sequence[bytes]) -> bytes:
    """Merkle root over 32-byte `leaves`; an odd node moves up unpaired, the count is hashed in at the root."""
    level = list(leaves)
    while len(level) > 1:
        pairs = [digest(f"{domain} node", level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return digest(f"{domain} root", len(leaves).to_bytes(8, "little"), *level)


def chunks(blob: Buffer) -> Iterator[memoryview]:
    """Cut `blob` into chunks of `CHUNK_SIZE`; an empty blob is one empty chunk."""
    view = memoryview(blob).cast("B") if len(blob) else memoryview(b"")
    for start in range(0, max(len(view), 1), CHUNK_SIZE):
        yield view[start : start + CHUNK_SIZE]


def chunk_hash(chunk: Buffer) -> bytes:
    """Digest of one chunk."""
    return digest("chunk", chunk)


def blob_hash_of(length: int, chunk_hashes: Iterable[bytes]) -> bytes:
    """Identity of a blob of `length` bytes whose chunks have these hashes."""
    return digest("blob", length.to_bytes(8, "little"), merkle_root("chunk list", list(chunk_hashes)))


def blob_hash(blob: Buffer) -> bytes:
    """Identity of a blob: its length and the Merkle root over its chunks, so that each chunk can be checked alone."""
    return blob_hash_of(len(memoryview(blob).cast("B")) if len(blob) else 0, map(chunk_hash, chunks(blob)))


def chunk_count(length: int) -> int:
    """How many chunks a blob of `length` bytes has."""
    return max(1, -(-length // CHUNK_SIZE))
