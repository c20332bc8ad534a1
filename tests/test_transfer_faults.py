"""Transfers under random orders, drops, lies, absences and losses: the right bytes or a failure, nothing in between."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest_fed.blobs import MemoryBlobs
from ravnest_fed.facts import BlobRef
from ravnest_fed.hashing import CHUNK_SIZE
from ravnest_fed.messages import Absent, Chunk, Want
from ravnest_fed.transfer import (
    MAX_WINDOW,
    STALL_SECONDS,
    Ask,
    Downloads,
    Drop,
    Fetched,
    FetchFailed,
    Keep,
    TransferEffect,
    serve,
)

BLOBS = (b"", b"one chunk", bytes(range(256)) * (3 * CHUNK_SIZE // 256) + b"tail", b"\1" * CHUNK_SIZE + b"\2")
DONORS = ("a", "b", "c")


class Fetching:
    """A receiver and its donors: requests that are under way, what was kept, and how each transfer ended."""

    def __init__(self) -> None:
        self.downloads = Downloads(most_interrupted=1)
        self.source = MemoryBlobs()
        self.refs = [BlobRef.of(self.source.put(blob) and blob, inline=False) for blob in BLOBS]
        self.content = {ref.hash: blob for ref, blob in zip(self.refs, BLOBS, strict=True)}
        self.held = MemoryBlobs()
        self.pending: list[tuple[str, bytes, int]] = []
        self.kept: set[tuple[bytes, int]] = set()
        self.ended: dict[bytes, TransferEffect] = {}
        self.now = 0.0
        for ref in self.refs:
            self.apply(self.downloads.start(ref, list(DONORS), 0.0))

    def apply(self, effects: list[TransferEffect]) -> None:
        """Take the effects as a node would, and check each."""
        for effect in effects:
            match effect:
                case Ask(donor, want):
                    assert want.blob not in self.ended
                    assert not any((want.blob, index) in self.kept for index in want.indices)
                    self.pending += [(donor, want.blob, index) for index in want.indices]
                case Keep(ref, index, data):
                    assert (ref.hash, index) not in self.kept
                    assert data == self.content[ref.hash][index * CHUNK_SIZE : (index + 1) * CHUNK_SIZE]
                    self.kept.add((ref.hash, index))
                    self.held.keep_chunk(ref, index, data)
                case Fetched(ref):
                    assert ref.hash not in self.ended
                    self.held.finish(ref)
                    assert self.held.read(ref.hash) == self.content[ref.hash]
                    self.ended[ref.hash] = effect
                case FetchFailed(ref, _, resumable):
                    assert ref.hash not in self.ended
                    self.ended[ref.hash] = effect
                    if not resumable:
                        self.forget_chunks(ref)
                case Drop(ref):
                    assert isinstance(self.ended[ref.hash], FetchFailed)
                    self.forget_chunks(ref)

    def forget_chunks(self, ref: BlobRef) -> None:
        """As a node must: what it kept of the blob is gone."""
        self.held.discard(ref.hash)
        self.kept = {one for one in self.kept if one[0] != ref.hash}

    def begin_again(self) -> None:
        """Every transfer that failed is begun anew with all donors; what was kept must not be asked for again."""
        for ref in self.refs:
            if isinstance(self.ended.get(ref.hash), FetchFailed):
                del self.ended[ref.hash]
                self.apply(self.downloads.start(ref, list(DONORS), self.now))

    def answer(self, which: int, lie: str) -> None:
        """Answer one of the requests under way: truly, by a lie of this kind, or as absent; or lose the answer."""
        donor, blob, index = self.pending.pop(which % len(self.pending))
        self.now += 0.01
        (honest,) = serve(Want(blob, (index,)), self.source)
        assert isinstance(honest, Chunk)
        lies = {
            "flipped": bytes([honest.data[0] ^ 1]) + honest.data[1:] if honest.data else b"\0",
            "short": honest.data[:-1] if honest.data else b"\0",
            "long": honest.data + b"\0",
        }
        if lie == "absent":
            self.forget(donor, blob)
            self.apply(self.downloads.on_absent(donor, Absent(blob), self.now))
        elif lie in lies:
            self.forget(donor, blob)
            self.apply(self.downloads.on_chunk(donor, Chunk(blob, index, lies[lie]), self.now))
        elif lie != "lost":
            self.apply(self.downloads.on_chunk(donor, honest, self.now))

    def forget(self, donor: str, blob: bytes) -> None:
        """What was asked of a donor that is left."""
        self.pending = [one for one in self.pending if one[:2] != (donor, blob)]

    def lose(self, donor: str) -> None:
        """The connection to a donor goes."""
        self.pending = [one for one in self.pending if one[0] != donor]
        self.apply(self.downloads.donor_gone(donor, self.now))

    def finish(self) -> None:
        """Answer all the rest truly; what was lost comes back into play once its donor has stalled."""
        for _ in range(4 * len(DONORS)):
            while self.pending:
                self.answer(0, "")
            self.now += STALL_SECONDS + 1
            self.apply(self.downloads.tick(self.now))
        assert set(self.ended) == set(self.content)
        assert not any(ref.hash in self.downloads for ref in self.refs)


answers = st.tuples(
    st.integers(0, 1000), st.sampled_from(["", "", "", "", "", "lost", "absent", "flipped", "short", "long"])
)
losses = st.sampled_from(DONORS)


@given(st.lists(st.one_of(answers, answers, answers, losses), max_size=40))
@settings(max_examples=60, deadline=None)
def test_a_transfer_gives_the_right_bytes_or_fails(steps: list[tuple[int, str] | str]) -> None:
    fetching = Fetching()
    for step in steps:
        if isinstance(step, str):
            fetching.lose(step)
        elif fetching.pending:
            fetching.answer(*step)
        for donor in DONORS:
            assert sum(one[0] == donor for one in fetching.pending) <= MAX_WINDOW
    fetching.finish()
    fetching.begin_again()
    fetching.finish()
    assert all(isinstance(end, Fetched) for end in fetching.ended.values())


@given(st.lists(st.integers(0, 1000), max_size=30))
@settings(max_examples=20, deadline=None)
def test_any_order_of_true_answers_gives_every_blob(order: list[int]) -> None:
    fetching = Fetching()
    for which in order:
        if fetching.pending:
            fetching.answer(which, "")
    fetching.finish()
    assert all(isinstance(end, Fetched) for end in fetching.ended.values())


@given(st.lists(answers, max_size=40))
@settings(max_examples=40, deadline=None)
def test_one_true_donor_among_liars_is_enough(steps: list[tuple[int, str]]) -> None:
    fetching = Fetching()
    for which, lie in steps:
        if fetching.pending:
            donor = fetching.pending[which % len(fetching.pending)][0]
            fetching.answer(which, "" if donor == "c" else lie)
    fetching.finish()
    assert all(isinstance(end, Fetched) for end in fetching.ended.values())
