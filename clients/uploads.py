"""Answers to `Want` within the owner's upload limit: what was asked for, in order, and when the next may go. No I/O."""

from collections import deque

from ravnest_fed.messages import MAX_WANTED, Want

MIN_RATE = 64_000
"""Bytes a second. Below it a chunk takes so long that a broker could hold the transfer for stalled."""
MOST_QUEUED = 4 * MAX_WANTED
"""More than this no broker has reason to ask for at once; what is past it is not remembered."""


class Uploads:
    """Chunks that brokers asked for, leaving at `rate` bytes a second. Times are in seconds."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._queue: deque[tuple[str, bytes, int]] = deque()
        self._free_at = 0.0

    def ask(self, broker: str, want: Want) -> None:
        """A broker asks; what it asks for a second time before it was served is served once."""
        queued = set(self._queue)
        for index in want.indices:
            asked = (broker, want.blob, index)
            if asked not in queued and len(queued) < MOST_QUEUED:
                self._queue.append(asked)
                queued.add(asked)

    def forget(self, broker: str) -> None:
        """A broker is gone: it asks anew when it comes back."""
        self._queue = deque(asked for asked in self._queue if asked[0] != broker)

    def next(self, now: float) -> tuple[str, Want] | None:
        """Who gets which chunk now; None while the limit forbids it, or where nothing is asked for."""
        if not self._queue or now < self._free_at:
            return None
        broker, blob, index = self._queue.popleft()
        return broker, Want(blob, (index,))

    def sent(self, size: int, now: float) -> None:
        """So many bytes have left: the next may go once they have had their time."""
        self._free_at = max(self._free_at, now) + size / self._rate

    def wait(self, now: float) -> float | None:
        """In how many seconds `next` has something; None where nothing is asked for."""
        return max(0.0, self._free_at - now) if self._queue else None
