"""Blobs on disk or in memory, named by their hash.

A blob on disk is written to a temporary name chunk by chunk, fsynced, renamed, and its directory fsynced: after a kill
at any instruction it is there whole or not at all.
"""

import itertools
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from ravnest_fed.errors import LedgerError
from ravnest_fed.facts import BlobRef
from ravnest_fed.hashing import CHUNK_SIZE, blob_hash, blob_hash_of, chunk_hash, chunks
from ravnest_fed.messages import CHUNK_LIST

_BLOB_NAME = re.compile("[0-9a-f]{64}")


MAX_LISTS = 256
"""Chunk lists that a store keeps at hand, so that a large blob is hashed once and not for everybody who asks."""


class BlobMissing(LedgerError):
    """A blob that was asked for is not here, or no longer."""


class BlobStore(Protocol):
    """Where a node keeps blobs."""

    def has(self, blob: bytes) -> bool:
        """Whether the blob is here, whole."""

    def read(self, blob: bytes) -> bytes:
        """The whole blob. Raises LedgerError if it is not here."""

    def read_chunk(self, blob: bytes, index: int) -> bytes | None:
        """One chunk, or the chunk list for `CHUNK_LIST`; None if the blob or the chunk is not here."""

    def put(self, data: bytes) -> BlobRef:
        """Keep `data`, durably where the store is durable."""

    def put_pieces(self, pieces: Iterable[memoryview]) -> BlobRef:
        """Keep the blob that `pieces` make together, durably where the store is durable; never whole in memory on disk."""

    def view(self, blob: bytes) -> memoryview:
        """The whole blob's bytes, mapped and not hashed. Raises LedgerError if it is not here."""

    def sweep(self, named: set[bytes]) -> None:
        """Remove every blob that is not `named` and was not put, finished or asked about since the sweep before."""

    def keep_chunk(self, ref: BlobRef, index: int, data: bytes) -> None:
        """Keep a verified chunk of a blob that is being fetched."""

    def finish(self, ref: BlobRef) -> None:
        """Every chunk was kept: the blob is whole."""

    def discard(self, blob: bytes) -> None:
        """Forget the kept chunks of a blob that is not whole."""

    def remove(self, blob: bytes) -> None:
        """Forget a blob."""


class MemoryBlobs:
    """Blobs in memory: a client's contribution and the updates it folds."""

    def __init__(self) -> None:
        self._blobs: dict[bytes, bytes] = {}
        self._partial: dict[bytes, bytearray] = {}
        self._touched: set[bytes] = set()

    def has(self, blob: bytes) -> bool:
        self._touched.add(blob)
        return blob in self._blobs

    def read(self, blob: bytes) -> bytes:
        try:
            return self._blobs[blob]
        except KeyError:
            raise BlobMissing(f"blob {blob.hex()[:16]} is not here") from None

    def read_chunk(self, blob: bytes, index: int) -> bytes | None:
        data = self._blobs.get(blob)
        if data is None:
            return None
        if index == CHUNK_LIST:
            return b"".join(map(chunk_hash, chunks(data)))
        start = index * CHUNK_SIZE
        return data[start : start + CHUNK_SIZE] if 0 <= start < max(len(data), 1) else None

    def put(self, data: bytes) -> BlobRef:
        ref = BlobRef.of(data)
        self._blobs[ref.hash] = data
        self._touched.add(ref.hash)
        return ref

    def put_pieces(self, pieces: Iterable[memoryview]) -> BlobRef:
        return self.put(b"".join(pieces)).bare()

    def view(self, blob: bytes) -> memoryview:
        return memoryview(self.read(blob))

    def sweep(self, named: set[bytes]) -> None:
        for blob in self._blobs.keys() - named - self._touched:
            del self._blobs[blob]
        self._touched.clear()

    def keep_chunk(self, ref: BlobRef, index: int, data: bytes) -> None:
        partial = self._partial.setdefault(ref.hash, bytearray(ref.length))
        partial[index * CHUNK_SIZE : index * CHUNK_SIZE + len(data)] = data

    def finish(self, ref: BlobRef) -> None:
        partial = self._partial.pop(ref.hash, None)
        if partial is not None:
            self._blobs[ref.hash] = bytes(partial)
            self._touched.add(ref.hash)

    def discard(self, blob: bytes) -> None:
        self._partial.pop(blob, None)

    def remove(self, blob: bytes) -> None:
        self._blobs.pop(blob, None)
        self._partial.pop(blob, None)


class DiskBlobs:
    """Blobs as files below `folder`. With `tidy`, what an earlier process left half-written is removed.

    Without `durable` a power cut may lose or damage what was put: for what can be fetched again.
    """

    def __init__(self, folder: Path, tidy: bool = True, durable: bool = True) -> None:
        self._folder = folder
        self._durable = durable
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.part") if tidy else ():
            leftover.unlink()
        self._sizes: dict[bytes, int] = {}
        self._touched: set[bytes] = set()
        self._touching = threading.Lock()
        self._numbers = itertools.count()
        self._lists: dict[bytes, bytes] = {}
        for file in folder.iterdir():
            # What else lies there (a file manager's notes) is none of ours.
            if _BLOB_NAME.fullmatch(file.name):
                # Who only reads may find that the running broker has swept a file away meanwhile.
                with suppress(FileNotFoundError):
                    self._sizes[bytes.fromhex(file.name)] = file.stat().st_size

    def has(self, blob: bytes) -> bool:
        with self._touching:
            self._touched.add(blob)
            return blob in self._sizes

    def read(self, blob: bytes) -> bytes:
        try:
            data = self._path(blob).read_bytes()
        except FileNotFoundError:
            raise BlobMissing(f"blob {self._path(blob)} is not here", "copy it from another broker") from None
        except OSError as error:
            raise LedgerError(
                f"blob {self._path(blob)} cannot be read ({error.strerror})", "copy it from another broker"
            ) from None
        if blob_hash(data) != blob:
            raise LedgerError(f"blob {self._path(blob)} is damaged on disk", "copy it from another broker")
        return data

    def read_chunk(self, blob: bytes, index: int) -> bytes | None:
        size = self._sizes.get(blob)
        if size is None:
            return None
        if index == CHUNK_LIST:
            return self._chunk_list(blob)
        start = index * CHUNK_SIZE
        if not 0 <= start < max(size, 1):
            return None
        with self._path(blob).open("rb") as file:
            file.seek(start)
            return file.read(CHUNK_SIZE)

    def put(self, data: bytes) -> BlobRef:
        ref = BlobRef.of(data)
        if not self.has(ref.hash):
            # A name of its own: a fetch of the same blob may be writing at the same time.
            part = self._folder / f"{ref.hash.hex()}.{next(self._numbers)}.part"
            part.write_bytes(data)
            self._publish(part, ref)
        return ref

    def put_pieces(self, pieces: Iterable[memoryview]) -> BlobRef:
        # Named before its hash is known; like every unfinished file it is removed at the next start.
        part = self._folder / f"pieces.{next(self._numbers)}.part"
        hashes, length = [], 0
        with part.open("wb") as file:
            for chunk in _rechunked(pieces):
                hashes.append(chunk_hash(chunk))
                length += len(chunk)
                file.write(chunk)
        ref = BlobRef(blob_hash_of(length, hashes), length)
        if self.has(ref.hash):
            part.unlink()
        else:
            self._publish(part, ref)
        return ref

    def view(self, blob: bytes) -> memoryview:
        try:
            return np.memmap(self._path(blob), np.uint8, "r").data
        except (OSError, ValueError) as error:
            raise BlobMissing(
                f"blob {self._path(blob)} cannot be read ({error})", "copy it from another broker"
            ) from None

    def sweep(self, named: set[bytes]) -> None:
        with self._touching:
            unwanted = self._sizes.keys() - named - self._touched
            self._touched.clear()
            for blob in unwanted:
                self.remove(blob)

    def keep_chunk(self, ref: BlobRef, index: int, data: bytes) -> None:
        part = self._part(ref.hash)
        with part.open("r+b" if part.exists() else "wb") as file:
            file.seek(index * CHUNK_SIZE)
            file.write(data)

    def finish(self, ref: BlobRef) -> None:
        if not self.has(ref.hash):
            self._publish(self._part(ref.hash), ref)
        else:
            self.discard(ref.hash)

    def discard(self, blob: bytes) -> None:
        self._part(blob).unlink(missing_ok=True)

    def _publish(self, part: Path, ref: BlobRef) -> None:
        if self._durable:
            with part.open("r+b") as file:
                os.fsync(file.fileno())
        part.replace(self._path(ref.hash))
        if self._durable:
            sync_folder(self._folder)
        with self._touching:
            self._touched.add(ref.hash)
            self._sizes[ref.hash] = ref.length

    def remove(self, blob: bytes) -> None:
        if self._sizes.pop(blob, None) is not None:
            self._path(blob).unlink(missing_ok=True)

    def _chunk_list(self, blob: bytes) -> bytes:
        known = self._lists.get(blob)
        if known is None:
            known = b"".join(map(chunk_hash, chunks(self.read(blob))))
            while len(self._lists) >= MAX_LISTS:
                self._lists.pop(next(iter(self._lists)))
            self._lists[blob] = known
        return known

    def remove_damaged(self) -> None:
        """Remove every blob whose bytes are not those that its name says."""
        for blob in list(self._sizes):
            try:
                self.read(blob)
            except LedgerError:
                self.remove(blob)

    def retain(self, wanted: set[bytes]) -> None:
        """Remove every blob that is not `wanted`."""
        for blob in self._sizes.keys() - wanted:
            self.remove(blob)

    def _path(self, blob: bytes) -> Path:
        return self._folder / blob.hex()

    def _part(self, blob: bytes) -> Path:
        return self._folder / f"{blob.hex()}.part"


def _rechunked(pieces: Iterable[memoryview]) -> Iterator[bytes]:
    """The same bytes, in whole chunks but for the last."""
    waiting = bytearray()
    empty = True
    for piece in pieces:
        for start in range(0, len(piece), CHUNK_SIZE):
            waiting += piece[start : start + CHUNK_SIZE]
            if len(waiting) >= CHUNK_SIZE:
                yield bytes(waiting[:CHUNK_SIZE])
                del waiting[:CHUNK_SIZE]
                empty = False
    if waiting or empty:
        yield bytes(waiting)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
