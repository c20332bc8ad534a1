"""Transfers that broke off, each with the chunks it still lacks: the next transfer of the same blob goes on from there.

What is kept is bounded in number, in bytes and in time, since whoever breaks transfers off on purpose costs space. The
oldest give way; the newest one stays whatever its size, since it had its space already while it ran.
"""

from collections import deque
from dataclasses import dataclass, field

from ravnest_fed.facts import BlobRef

KEPT_SECONDS = 600.0
"""How long a transfer that broke off may be taken up again."""
MOST_TRANSFERS = 64
MOST_BYTES = 2**28


@dataclass
class Progress:
    """How far the transfer of `ref` has come: the hashes of its chunks once they are known, and the indices missing."""

    ref: BlobRef
    hashes: list[bytes] | None = None
    missing: deque[int] = field(default_factory=deque)
    arrived: int = 0


class Interrupted:
    """The transfers of one node that broke off. Times are in seconds; each blob counts with its full length."""

    def __init__(self, most_transfers: int = MOST_TRANSFERS, most_bytes: int = MOST_BYTES) -> None:
        self._most_transfers = most_transfers
        self._most_bytes = most_bytes
        self._kept: dict[bytes, tuple[Progress, float]] = {}
        self._bytes = 0

    def keep(self, progress: Progress, now: float) -> list[BlobRef]:
        """Remember a transfer that broke off; returns those that give way to it."""
        self.forget(progress.ref.hash)
        progress.missing = deque(sorted(progress.missing))
        self._kept[progress.ref.hash] = (progress, now)
        self._bytes += progress.ref.length
        gone: list[BlobRef] = []
        while len(self._kept) > 1 and (len(self._kept) > self._most_transfers or self._bytes > self._most_bytes):
            gone.append(self._drop(next(iter(self._kept))))
        return gone

    def take(self, ref: BlobRef) -> Progress | None:
        """The transfer of `ref` that broke off, which is remembered no longer."""
        kept = self._kept.get(ref.hash)
        if kept is None or kept[0].ref.length != ref.length:
            # A reference with another length cannot be true; it must not use up what the true one kept.
            return None
        self._drop(ref.hash)
        return kept[0]

    def forget(self, blob: bytes) -> None:
        """Remember the transfer of `blob` no longer, if it is remembered."""
        if blob in self._kept:
            self._drop(blob)

    def expire(self, now: float) -> list[BlobRef]:
        """Forget those that nobody took up for `KEPT_SECONDS`; returns them."""
        return [self._drop(blob) for blob, (_, at) in list(self._kept.items()) if now - at > KEPT_SECONDS]

    def _drop(self, blob: bytes) -> BlobRef:
        ref = self._kept.pop(blob)[0].ref
        self._bytes -= ref.length
        return ref
