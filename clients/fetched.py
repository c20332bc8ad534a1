"""What a client has fetched: small blobs in memory until they are used, large ones on disk.

The initial model and the newest checkpoint stay on disk, so that a client that starts again need not fetch them again.
"""

from collections.abc import Iterable
from pathlib import Path

from ravnest_fed.blobs import DiskBlobs, MemoryBlobs
from ravnest_fed.facts import BlobRef

LARGE_BYTES = 2**18


class FetchedBlobs:
    """The blobs below `folder`, and those in memory. Which it is follows from a blob's length."""

    def __init__(self, folder: Path) -> None:
        self._memory = MemoryBlobs()
        self._disk = DiskBlobs(folder, durable=False)
        # A power cut may have left what was renamed before it was written.
        self._disk.remove_damaged()

    def has(self, blob: bytes) -> bool:
        """Whether the blob is here, whole."""
        return self._memory.has(blob) or self._disk.has(blob)

    def read(self, blob: bytes) -> bytes:
        """The whole blob. Raises LedgerError if it is not here, or damaged on disk."""
        return self._memory.read(blob) if self._memory.has(blob) else self._disk.read(blob)

    def view(self, blob: bytes) -> memoryview:
        """The whole blob, without reading it into memory where it is on disk."""
        return self._memory.view(blob) if self._memory.has(blob) else self._disk.view(blob)

    def keep_chunk(self, ref: BlobRef, index: int, data: bytes) -> None:
        """Keep a verified chunk of a blob that is being fetched."""
        self._of(ref).keep_chunk(ref, index, data)

    def finish(self, ref: BlobRef) -> None:
        """Every chunk was kept: the blob is whole."""
        self._of(ref).finish(ref)

    def discard(self, blob: bytes) -> None:
        """Forget the kept chunks of a blob that is not whole."""
        self._memory.discard(blob)
        self._disk.discard(blob)

    def forget(self, blob: bytes) -> None:
        """A blob in memory was used; one on disk stays."""
        self._memory.remove(blob)

    def drop(self, blob: bytes) -> None:
        """A blob was used, and will not be asked for again."""
        self._memory.remove(blob)
        self._disk.remove(blob)

    def put_pieces(self, pieces: Iterable[memoryview]) -> BlobRef:
        """Keep the blob that `pieces` make together on disk."""
        return self._disk.put_pieces(pieces)

    def retain(self, wanted: set[bytes]) -> None:
        """Remove every blob on disk that is not `wanted`."""
        self._disk.retain(wanted)

    def _of(self, ref: BlobRef) -> MemoryBlobs | DiskBlobs:
        return self._disk if ref.length >= LARGE_BYTES else self._memory
