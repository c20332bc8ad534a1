"""What a round needs to have on this broker's disk: which blobs are here, which were asked for, which to ask for again."""

from brokers.effects import Effect, Fetch, Store
from brokers.events import Fetched, Missed
from ravnest_fed.facts import BlobRef

RETRY_SECONDS = 1.0


class Supply:
    """The blobs of one round. The same bytes may be wanted in two stores; each is seen to by itself."""

    def __init__(self) -> None:
        self._present: dict[Store, set[bytes]] = {"ledger": set(), "spool": set(), "memory": set()}
        self._loaded: dict[bytes, bytes] = {}
        self._asked: dict[tuple[bytes, Store], BlobRef] = {}
        self._retry_at: dict[tuple[bytes, Store], float] = {}

    def has(self, blob: bytes, into: Store) -> bool:
        """Whether a blob is known to be here."""
        return blob in self._present[into]

    def add(self, blob: bytes, into: Store) -> None:
        """A blob came here in another way than by a fetch."""
        self._present[into].add(blob)

    def load(self, blob: bytes, data: bytes) -> None:
        """The bytes of a small blob are at hand."""
        self._present["memory"].add(blob)
        self._loaded[blob] = data

    def loaded(self, blob: bytes) -> bytes | None:
        """The bytes of a small blob, if they are at hand."""
        return self._loaded.get(blob)

    def want(self, ref: BlobRef, donors: tuple[str, ...], into: Store) -> list[Effect]:
        """Ask for a blob, unless it is here or was asked for."""
        if self.has(ref.hash, into) or (ref.hash, into) in self._asked:
            return []
        self._asked[(ref.hash, into)] = ref.bare()
        return [Fetch(ref, donors, into)]

    def arrived(self, event: Fetched) -> None:
        """A blob is here."""
        self._asked.pop((event.blob, event.into), None)
        if event.data is not None:
            self.load(event.blob, event.data)
        self._present[event.into].add(event.blob)

    def missed(self, event: Missed, now: float) -> None:
        """Nobody asked had the blob; it is asked for again after a while."""
        if (event.blob, event.into) in self._asked:
            self._retry_at[(event.blob, event.into)] = now + RETRY_SECONDS

    def retries(self, donors: tuple[str, ...], now: float) -> list[Effect]:
        """Ask `donors` for what was missed and is due."""
        effects: list[Effect] = []
        for key in [key for key, at in self._retry_at.items() if now >= at]:
            del self._retry_at[key]
            if key in self._asked:
                effects.append(Fetch(self._asked[key], donors, key[1]))
        return effects
