"""Chunked transfer of blobs: who asks whom for which chunk. No socket, no file, no clock.

Every blob is pulled: whoever needs it asks a donor for chunks, checks each against the blob's hash and asks for the
next, so that a slow receiver slows its source and no buffer grows. Outstanding requests are the credit window: it aims
at about one and a half seconds of bytes and is kept for each donor over all its blobs. A donor that makes no progress
for `STALL_SECONDS` is left for the others; chunks that arrived are kept. Where no donor is left, the transfer has broken
off: what arrived stays for a while (`ravnest_fed.interrupted`), and a later transfer of the same blob asks for the rest.
"""

from dataclasses import dataclass, field
from typing import Protocol

from ravnest_fed.facts import BlobRef
from ravnest_fed.hashing import CHUNK_SIZE, DIGEST_SIZE, blob_hash, blob_hash_of, chunk_count, chunk_hash, chunks
from ravnest_fed.interrupted import MOST_BYTES, MOST_TRANSFERS, Interrupted, Progress
from ravnest_fed.messages import CHUNK_LIST, MAX_WANTED, Absent, Chunk, Want

STALL_SECONDS = 8.0
MIN_WINDOW = 3
MAX_WINDOW = 10
WINDOW_SECONDS = 1.5
SLOWER = 3.0
"""How many times longer than another donor one may need for the end of a transfer, before the other takes it over."""


@dataclass(frozen=True)
class Ask:
    """Effect: send `want` to `donor`."""

    donor: str
    want: Want


@dataclass(frozen=True)
class Keep:
    """Effect: store a verified chunk of the blob `ref` names."""

    ref: BlobRef
    index: int
    data: bytes


@dataclass(frozen=True)
class Fetched:
    """Effect: every chunk of the blob was kept; make it durable and use it."""

    ref: BlobRef


@dataclass(frozen=True)
class FetchFailed:
    """Effect: no donor is left that holds the blob. `lying` names donors whose bytes had the wrong hash.

    If `resumable`, the chunks that arrived must stay until a later transfer makes the blob whole, or `Drop`; else they
    are to be forgotten.
    """

    ref: BlobRef
    lying: tuple[str, ...]
    resumable: bool = False


@dataclass(frozen=True)
class Drop:
    """Effect: forget the chunks of a blob whose transfer broke off; none will ask for the rest."""

    ref: BlobRef


TransferEffect = Ask | Keep | Fetched | FetchFailed | Drop


@dataclass
class _Donor:
    outstanding: dict[tuple[bytes, int], float] = field(default_factory=dict)
    progress: float = 0.0
    rate: float = 0.0

    def room(self) -> int:
        window = int(self.rate * WINDOW_SECONDS / CHUNK_SIZE)
        return max(MIN_WINDOW, min(MAX_WINDOW, window)) - len(self.outstanding)


@dataclass
class _Download:
    progress: Progress
    donors: list[str] = field(default_factory=list)
    lying: list[str] = field(default_factory=list)
    taken_over: set[int] = field(default_factory=set)

    @property
    def ref(self) -> BlobRef:
        return self.progress.ref


class Downloads:
    """All transfers that one node receives. Methods take what happened and the time (s), and return effects in order."""

    def __init__(self, most_interrupted: int = MOST_TRANSFERS, most_interrupted_bytes: int = MOST_BYTES) -> None:
        """The bounds are on what is kept of transfers that broke off."""
        self._downloads: dict[bytes, _Download] = {}
        self._donors: dict[str, _Donor] = {}
        self._interrupted = Interrupted(most_interrupted, most_interrupted_bytes)

    def __contains__(self, blob: bytes) -> bool:
        return blob in self._downloads

    def start(self, ref: BlobRef, donors: list[str], now: float) -> list[TransferEffect]:
        """Fetch `ref` from any of `donors`: begin, go on where it broke off, or add them to a transfer that runs."""
        if ref.inline:
            if len(ref.inline) == ref.length and blob_hash(ref.inline) == ref.hash:
                self.cancel(ref.hash)
                kept = [Keep(ref, index, bytes(chunk)) for index, chunk in enumerate(chunks(ref.inline))]
                return [*kept, Fetched(ref)]
            return [] if ref.hash in self._downloads else [FetchFailed(ref, tuple(donors))]
        running = self._downloads.get(ref.hash)
        if running is None:
            progress = self._interrupted.take(ref)
            if progress is None:
                progress = Progress(ref.bare())
                progress.missing.append(0 if chunk_count(ref.length) == 1 else CHUNK_LIST)
            running = self._downloads[ref.hash] = _Download(progress)
        running.donors += [donor for donor in donors if donor not in running.donors]
        if not running.donors:
            return self._fail(running, now)
        return self._ask(now)

    def cancel(self, blob: bytes) -> None:
        """Forget the transfer of `blob`, also one that broke off; its kept chunks are the caller's to forget."""
        self._interrupted.forget(blob)
        self._stop(blob)

    def _stop(self, blob: bytes) -> None:
        self._downloads.pop(blob, None)
        for donor in self._donors.values():
            for key in [key for key in donor.outstanding if key[0] == blob]:
                del donor.outstanding[key]

    def on_chunk(self, donor: str, chunk: Chunk, now: float) -> list[TransferEffect]:
        """A chunk arrived; one that nobody asked this donor for is ignored."""
        source = self._donors.get(donor)
        if source is None or source.outstanding.pop((chunk.blob, chunk.index), None) is None:
            return []
        elapsed = max(now - source.progress, 1e-4)
        rate = len(chunk.data) / elapsed
        source.rate = rate if source.rate == 0.0 else 0.8 * source.rate + 0.2 * rate
        source.progress = now
        running = self._downloads.get(chunk.blob)
        if running is None:
            return self._ask(now)
        effects: list[TransferEffect] = []
        if chunk.index == CHUNK_LIST:
            size = len(chunk.data)
            hashes = [bytes(chunk.data[i : i + DIGEST_SIZE]) for i in range(0, size, DIGEST_SIZE)]
            if (
                size != chunk_count(running.ref.length) * DIGEST_SIZE
                or blob_hash_of(running.ref.length, hashes) != running.ref.hash
            ):
                return self._liar(running, donor, chunk.index, now)
            running.progress.hashes = hashes
            running.progress.missing.extend(range(len(hashes)))
        else:
            if not self._genuine(running, chunk):
                return self._liar(running, donor, chunk.index, now)
            running.progress.arrived += 1
            effects.append(Keep(running.ref, chunk.index, chunk.data))
            if running.progress.arrived == chunk_count(running.ref.length):
                del self._downloads[chunk.blob]
                effects.append(Fetched(running.ref))
        return effects + self._ask(now)

    def on_absent(self, donor: str, absent: Absent, now: float) -> list[TransferEffect]:
        """A donor does not hold the blob after all."""
        running = self._downloads.get(absent.blob)
        return self._leave(running, donor, now) if running else []

    def donor_gone(self, donor: str, now: float) -> list[TransferEffect]:
        """The connection to a donor is lost: others take over what it owed."""
        effects: list[TransferEffect] = []
        left = [running for running in self._downloads.values() if donor in running.donors]
        for running in left:
            # From all first: leaving one transfer asks anew for the others.
            running.donors.remove(donor)
        for running in left:
            effects += self._leave(running, donor, now)
        self._donors.pop(donor, None)
        return effects

    def tick(self, now: float) -> list[TransferEffect]:
        """Leave donors that owe chunks and made no progress for `STALL_SECONDS`; drop what broke off long ago."""
        effects: list[TransferEffect] = []
        for name, donor in list(self._donors.items()):
            if donor.outstanding and now - donor.progress > STALL_SECONDS:
                effects += self.donor_gone(name, now)
        effects += [Drop(ref) for ref in self._interrupted.expire(now)]
        return effects + self._ask(now) + self._relieve(now)

    def _genuine(self, running: _Download, chunk: Chunk) -> bool:
        hashes = running.progress.hashes
        if hashes is None:
            length = running.ref.length
            return len(chunk.data) == length and blob_hash_of(length, [chunk_hash(chunk.data)]) == running.ref.hash
        # The length is checked as well: whoever made the blob may have listed chunks that do not cut it as agreed.
        size = min(CHUNK_SIZE, running.ref.length - chunk.index * CHUNK_SIZE)
        return len(chunk.data) == size and chunk_hash(chunk.data) == hashes[chunk.index]

    def _liar(self, running: _Download, donor: str, index: int, now: float) -> list[TransferEffect]:
        running.progress.missing.appendleft(index)
        running.lying.append(donor)
        return self._leave(running, donor, now)

    def _leave(self, running: _Download, donor: str, now: float) -> list[TransferEffect]:
        if donor in running.donors:
            running.donors.remove(donor)
        source = self._donors.get(donor)
        for key in [key for key in source.outstanding if key[0] == running.ref.hash] if source else []:
            assert source is not None
            del source.outstanding[key]
            running.progress.missing.appendleft(key[1])
        # The window of a donor is shared: what this transfer leaves free, another may wait for.
        failed = [] if running.donors else self._fail(running, now)
        return failed + self._ask(now)

    def _fail(self, running: _Download, now: float) -> list[TransferEffect]:
        self._stop(running.ref.hash)
        # What a liar began is not worth the space, although each chunk that arrived is genuine.
        if running.lying or not running.progress.arrived:
            return [FetchFailed(running.ref, tuple(running.lying))]
        gone = self._interrupted.keep(running.progress, now)
        return [FetchFailed(running.ref, (), resumable=True), *(Drop(ref) for ref in gone)]

    def _ask(self, now: float) -> list[TransferEffect]:
        effects: list[TransferEffect] = []
        for running in self._downloads.values():
            progressed = True
            missing = running.progress.missing
            while missing and progressed:
                progressed = False
                for name in running.donors:
                    donor = self._donors.setdefault(name, _Donor())
                    room = min(donor.room(), len(missing), MAX_WANTED)
                    if room <= 0:
                        continue
                    share = max(1, min(room, -(-len(missing) // len(running.donors))))
                    indices = tuple(missing.popleft() for _ in range(share))
                    if not donor.outstanding:
                        donor.progress = now
                    for index in indices:
                        donor.outstanding[(running.ref.hash, index)] = now
                    effects.append(Ask(name, Want(running.ref.hash, indices)))
                    progressed = True
        return effects

    def _relieve(self, now: float) -> list[TransferEffect]:
        """Let idle donors take over half of what a much slower one still owes of a blob that nothing else is missing of.

        What the slow one sends of it later is ignored, as anything that it was not asked for.
        """
        effects: list[TransferEffect] = []
        for running in self._downloads.values():
            known = [name for name in running.donors if name in self._donors]
            # Who was never seen to be fast takes nothing over: two slow donors would take from each other for ever.
            idle = [name for name in known if not self._donors[name].outstanding and self._donors[name].rate]
            owed = {name: self._owed(running, name) for name in known if self._donors[name].outstanding}
            if running.progress.missing or not idle or not owed:
                continue
            fast = max(idle, key=lambda name: self._donors[name].rate)
            slow = max(owed, key=lambda name: self._seconds(name, len(owed[name]), now))
            taken = owed[slow][len(owed[slow]) // 2 :]
            if (
                not taken
                or self._seconds(slow, len(owed[slow]), now) < SLOWER * self._seconds(fast, len(taken), now) + 1.0
            ):
                continue
            for index in taken:
                del self._donors[slow].outstanding[(running.ref.hash, index)]
                self._donors[fast].outstanding[(running.ref.hash, index)] = now
                running.taken_over.add(index)
            self._donors[fast].progress = now
            effects.append(Ask(fast, Want(running.ref.hash, tuple(taken))))
        return effects

    def _owed(self, running: _Download, name: str) -> list[int]:
        keys = self._donors[name].outstanding
        return [index for blob, index in keys if blob == running.ref.hash and index not in running.taken_over]

    def _seconds(self, name: str, chunks_owed: int, now: float) -> float:
        """How long a donor is likely to need for so many chunks: by its rate, or by how long it has been silent."""
        donor = self._donors[name]
        silent = now - donor.progress if donor.outstanding else 0.0
        return max(chunks_owed * CHUNK_SIZE / donor.rate if donor.rate else 0.0, silent)


class BlobSource(Protocol):
    """Where chunks to serve are read from."""

    def read_chunk(self, blob: bytes, index: int) -> bytes | None:
        """Chunk `index` of `blob`, its chunk list for `CHUNK_LIST`, or None if it is not held."""


def serve(want: Want, source: BlobSource) -> list[Chunk | Absent]:
    """The answers to a `want` from what `source` holds."""
    answers: list[Chunk | Absent] = []
    for index in want.indices[:MAX_WANTED]:
        data = source.read_chunk(want.blob, index)
        if data is None:
            return [*answers, Absent(want.blob)]
        answers.append(Chunk(want.blob, index, data))
    return answers
