"""The shell's side of fetching blobs: from a donor's chunks to a durable file, in every store that wants it."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from brokers.effects import Fetch, Store
from brokers.events import Event, Fetched, Missed
from ravnest_fed import transfer
from ravnest_fed.blobs import BlobStore
from ravnest_fed.facts import BlobRef
from ravnest_fed.ledger import is_full
from ravnest_fed.messages import Absent, Chunk, Want

MAX_MEMORY_BLOB = 2**26
"""Most bytes of a blob that is fetched into memory."""
MOST_INTERRUPTED, MOST_INTERRUPTED_BYTES = 1024, 2**30
"""How many fetches that broke off are kept on disk to be taken up again, and how large they may become in all."""


@dataclass
class _Fetch:
    """A blob on its way: chunks go to the store `first`, and when it is whole, to all that are `wanted`."""

    first: Store
    wanted: set[Store]
    finishing: bool = False


class Fetching:
    """All fetches of one broker. Its methods run on the event loop; files are finished by `disk`."""

    def __init__(
        self,
        stores: Mapping[Store, BlobStore],
        ask: Callable[[str, Want], None],
        tell: Callable[[Event], None],
        fail: Callable[[BaseException], None],
        disk: Executor,
    ) -> None:
        """`ask` sends a request to a donor, `tell` feeds the core, `fail` ends the broker."""
        self._stores = stores
        self._ask = ask
        self._tell = tell
        self._fail = fail
        self._disk = disk
        self._loop = asyncio.get_running_loop()
        self._downloads = transfer.Downloads(MOST_INTERRUPTED, MOST_INTERRUPTED_BYTES)
        self._fetches: dict[bytes, _Fetch] = {}
        self._interrupted: dict[bytes, Store] = {}

    def fetch(self, effect: Fetch) -> None:
        """Begin to fetch a blob, go on where an earlier fetch broke off, or join one that runs."""
        ref, into = effect.ref, effect.into
        if into == "memory" and ref.length > MAX_MEMORY_BLOB:
            self._loop.call_soon(self._tell, Missed(ref.hash, into, effect.donors))
        elif self._stores[into].has(ref.hash):
            self._arrived(ref.hash, into)
        else:
            running = self._fetches.get(ref.hash)
            if running is None:
                # Chunks of an earlier fetch lie where that one put them.
                first = self._interrupted.pop(ref.hash, into)
                running = self._fetches[ref.hash] = _Fetch(first, set())
            running.wanted.add(into)
            if not running.finishing:
                self._apply(self._downloads.start(ref, list(effect.donors), time.monotonic()))

    def abandon(self, into: Store, keep: frozenset[bytes]) -> None:
        """Stop fetching into a store all but `keep`, and forget what of earlier fetches lies there in part."""
        for blob, running in list(self._fetches.items()):
            if blob in keep:
                continue
            running.wanted.discard(into)
            if not running.wanted and not running.finishing:
                self._forget(blob, self._fetches.pop(blob).first)
        for blob, first in list(self._interrupted.items()):
            if first == into and blob not in keep:
                self._forget(blob, self._interrupted.pop(blob))

    def _forget(self, blob: bytes, first: Store) -> None:
        self._downloads.cancel(blob)
        self._stores[first].discard(blob)

    def take(self, donor: str, message: Chunk | Absent) -> None:
        """A donor's answer."""
        now = time.monotonic()
        if isinstance(message, Chunk):
            self._apply(self._downloads.on_chunk(donor, message, now))
        else:
            self._apply(self._downloads.on_absent(donor, message, now))

    def donor_gone(self, donor: str) -> None:
        """The connection to a donor is lost."""
        self._apply(self._downloads.donor_gone(donor, time.monotonic()))

    def tick(self) -> None:
        """Time has passed."""
        self._apply(self._downloads.tick(time.monotonic()))

    def _apply(self, effects: list[transfer.TransferEffect]) -> None:
        for effect in effects:
            match effect:
                case transfer.Ask(donor, want):
                    self._ask(donor, want)
                case transfer.Keep(ref, index, data):
                    self._keep(ref, index, data)
                case transfer.Fetched(ref):
                    if ref.hash in self._fetches:
                        self._fetches[ref.hash].finishing = True
                        self._finish(ref)
                case transfer.FetchFailed(ref, lying, resumable):
                    gone = self._fetches.pop(ref.hash)
                    if resumable and gone.first != "memory":
                        self._interrupted[ref.hash] = gone.first
                    else:
                        self._forget(ref.hash, gone.first)
                    for into in sorted(gone.wanted):
                        self._loop.call_soon(self._tell, Missed(ref.hash, into, lying))
                case transfer.Drop(ref):
                    self._stores[self._interrupted.pop(ref.hash)].discard(ref.hash)

    def _keep(self, ref: BlobRef, index: int, data: bytes) -> None:
        running = self._fetches.get(ref.hash)
        if running is None:
            return  # given up: the disk was full
        try:
            self._stores[running.first].keep_chunk(ref, index, data)
        except OSError as error:
            if not is_full(error):
                raise
            self._give_up(ref.hash)

    def _give_up(self, blob: bytes) -> None:
        """The disk is full: as if nobody had the blob, which is asked for again after a while."""
        gone = self._fetches.pop(blob)
        self._forget(blob, gone.first)
        for into in sorted(gone.wanted):
            self._loop.call_soon(self._tell, Missed(blob, into, ()))

    def _finish(self, ref: BlobRef) -> None:
        running = self._fetches[ref.hash]
        future = self._disk.submit(self._store, ref, running.first, frozenset(running.wanted))
        future.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._stored, done, ref))

    def _store(self, ref: BlobRef, first: Store, wanted: frozenset[Store]) -> frozenset[Store]:
        """On the disk's thread."""
        self._stores[first].finish(ref)
        for into in wanted - {first}:
            self._stores[into].put(self._stores[first].read(ref.hash))
        return wanted

    def _stored(self, done: "Future[frozenset[Store]]", ref: BlobRef) -> None:
        if error := done.exception():
            if is_full(error):
                self._give_up(ref.hash)
            else:
                self._fail(error)
            return
        running = self._fetches[ref.hash]
        if running.wanted - done.result():
            self._finish(ref)  # another store came to want it meanwhile
            return
        del self._fetches[ref.hash]
        for into in sorted(running.wanted):
            self._arrived(ref.hash, into)

    def _arrived(self, blob: bytes, into: Store) -> None:
        data = self._stores["memory"].read(blob) if into == "memory" else None
        self._loop.call_soon(self._tell, Fetched(blob, into, data))
