"""How long a view has before the broker goes on to the next one. Times in seconds."""

from ravnest_fed.hashing import digest

VIEW_SECONDS = 4.0
MAX_VIEW_SECONDS = 60.0


class ViewTime:
    """The time of one round's views, from the side of broker `me`. It runs from when the broker itself could close."""

    def __init__(self, me: str, server_round: int) -> None:
        self._salt = me.encode(), server_round.to_bytes(8, "little")
        self._deadline: float | None = None
        self._changes = 0

    @property
    def running(self) -> bool:
        """Whether the time runs."""
        return self._deadline is not None

    def start(self, now: float) -> None:
        """Give the view its time, which doubles with each change. Jitter is a hash, so that a replay gives the same times."""
        span = min(VIEW_SECONDS * 2.0 ** min(self._changes, 8), MAX_VIEW_SECONDS)
        jitter = digest("view jitter", *self._salt, bytes([self._changes % 256]))[0] / 512.0
        self._deadline = now + span * (1.0 + jitter)

    def progress(self, now: float) -> None:
        """Something moved: the view's time, where it runs, begins anew."""
        if self.running:
            self.start(now)

    def changed(self, now: float) -> None:
        """The next view is entered, as time ran out."""
        self._changes += 1
        self.progress(now)

    def over(self, now: float) -> bool:
        """Whether the view's time has run out."""
        return self._deadline is not None and now >= self._deadline
