"""A client's own contribution and residual on disk: the blobs that a `Standing` names, and the standing itself.

A client that was killed finds its contribution here and offers the same bytes again, instead of signing a second delta
for the round. Every step is one durable write of the standing; what it no longer names is removed afterwards.
"""

from pathlib import Path

from clients.residual import Standing
from ravnest_fed.blobs import DiskBlobs
from ravnest_fed.errors import RavnestError
from ravnest_fed.facts import BlobRef, decode, encode
from ravnest_fed.messages import Offer
from ravnest_fed.model_files import write_durably

FILE_NAME = "contribution"


class Outbox:
    """What member `client` of `federation` (the fingerprint) has in `folder`, which is made on first use."""

    def __init__(self, folder: Path, federation: bytes, client: str) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = folder / FILE_NAME
        self._blobs = DiskBlobs(folder / "blobs")
        self._nothing = Standing(federation, client)
        self.standing = self._found()

    def _found(self) -> Standing:
        try:
            found = decode(Standing, self._file.read_bytes())
        except FileNotFoundError:
            self._blobs.retain(set())
            return self._nothing
        except (OSError, RavnestError):
            return self._nothing
        if (found.federation, found.client) != (self._nothing.federation, self._nothing.client):
            return self._nothing
        # A kill may have come between the standing and the removal of what it no longer names.
        self._blobs.retain(found.blobs)
        if found.offer is not None and not all(self._blobs.has(ref.hash) for ref in found.offer.shards):
            # What is not whole can be offered no more, and whether it was counted cannot be told by it.
            return found.forget(counted=True)
        return found

    def put(self, payload: bytes) -> BlobRef:
        """Keep a payload, or a shard of the residual, durably."""
        return self._blobs.put(payload)

    def read(self, blob: bytes) -> bytes:
        """A blob that was put. Raises LedgerError if it is missing or damaged."""
        return self._blobs.read(blob)

    def keep(
        self, offer: Offer, residual: tuple[BlobRef, ...] | None, control: tuple[BlobRef, ...] | None = None
    ) -> None:
        """Keep the offer whose payloads were put, with what it leaves and renews, in the place of any other."""
        self._stand(self.standing.keep(offer, residual, control))

    def forget(self, counted: bool) -> None:
        """The contribution was counted, or never will be; then what it sent is owed again."""
        self._stand(self.standing.forget(counted))

    def _stand(self, standing: Standing) -> None:
        if standing == self._nothing:
            # Should this not last, the next life settles the same contribution the same way.
            self._file.unlink(missing_ok=True)
        else:
            write_durably(self._file, encode(standing))
        self.standing = standing
        self._blobs.retain(standing.blobs)

    def read_chunk(self, blob: bytes, index: int) -> bytes | None:
        """A chunk for the broker that fetches the contribution."""
        return self._blobs.read_chunk(blob, index)
