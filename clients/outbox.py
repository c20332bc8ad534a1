"""A client's own contribution on disk, from the moment it is signed until a commit has moved past it.

A client that was killed finds it here and offers the same bytes again, instead of signing a second delta for the round.
"""

from pathlib import Path

from ravnest_fed.blobs import DiskBlobs
from ravnest_fed.errors import RavnestError
from ravnest_fed.facts import BlobRef, decode, encode
from ravnest_fed.messages import Offer
from ravnest_fed.model_files import write_durably

FILE_NAME = "contribution"


class Outbox:
    """The contribution in `folder`, which is made on first use."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = folder / FILE_NAME
        self._blobs = DiskBlobs(folder / "blobs")

    def kept(self) -> Offer | None:
        """The offer that an earlier life left; None if there is none, or if it is not whole."""
        try:
            offer = decode(Offer, self._file.read_bytes())
        except (OSError, RavnestError):
            return None
        return offer if all(self._blobs.has(ref.hash) for ref in offer.shards) else None

    def put(self, payload: bytes) -> BlobRef:
        """Keep a payload durably."""
        return self._blobs.put(payload)

    def keep(self, offer: Offer) -> None:
        """Keep the offer whose payloads were put, durably, in the place of any other."""
        bare = Offer(offer.manifest, tuple(ref.bare() for ref in offer.shards))
        write_durably(self._file, encode(bare))
        self._blobs.retain({ref.hash for ref in offer.shards})

    def clear(self) -> None:
        """A commit has moved past the contribution."""
        self._file.unlink(missing_ok=True)
        self._blobs.retain(set())

    def read_chunk(self, blob: bytes, index: int) -> bytes | None:
        """A chunk for the broker that fetches the contribution."""
        return self._blobs.read_chunk(blob, index)
