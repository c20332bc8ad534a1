"""Transfers as events and times: what is asked of whom, what is kept, and how a transfer ends."""

import pytest

from ravnest_fed.blobs import MemoryBlobs
from ravnest_fed.facts import MAX_INLINE, BlobRef
from ravnest_fed.hashing import CHUNK_SIZE, DIGEST_SIZE, blob_hash_of, chunk_hash
from ravnest_fed.interrupted import KEPT_SECONDS
from ravnest_fed.messages import CHUNK_LIST, MAX_WANTED, Absent, Chunk, Want
from ravnest_fed.transfer import (
    MAX_WINDOW,
    MIN_WINDOW,
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


def blob_of(chunks: int, tail: int = 100, seed: int = 1) -> bytes:
    """A blob of `chunks` chunks that all differ, the last of `tail` bytes."""
    parts = [bytes([seed, index % 256]) * (CHUNK_SIZE // 2) for index in range(chunks - 1)]
    return b"".join(parts) + bytes([seed, 255]) * (tail // 2)


def chunk_of(blob: bytes, index: int) -> Chunk:
    source = MemoryBlobs()
    ref = source.put(blob)
    data = source.read_chunk(ref.hash, index)
    assert data is not None
    return Chunk(ref.hash, index, data)


def bare(blob: bytes) -> BlobRef:
    return BlobRef.of(blob, inline=False)


def asked(effects: list[TransferEffect], donor: str | None = None) -> list[int]:
    """The indices that the effects ask for, of `donor` or anybody."""
    asks = [effect for effect in effects if isinstance(effect, Ask) and donor in (None, effect.donor)]
    return [index for ask in asks for index in ask.want.indices]


def kept(effects: list[TransferEffect]) -> list[int]:
    return [effect.index for effect in effects if isinstance(effect, Keep)]


def ends(effects: list[TransferEffect]) -> list[TransferEffect]:
    return [effect for effect in effects if isinstance(effect, Fetched | FetchFailed)]


def test_an_inline_blob_needs_no_donor() -> None:
    ref = BlobRef.of(b"small")
    assert Downloads().start(ref, [], 0.0) == [Keep(ref, 0, b"small"), Fetched(ref)]


def test_an_inline_blob_with_another_hash_or_length_fails() -> None:
    ref = BlobRef.of(b"small")
    for wrong in (BlobRef(ref.hash, 5, b"smell"), BlobRef(ref.hash, 6, b"small")):
        assert Downloads().start(wrong, ["a"], 0.0) == [FetchFailed(wrong, ("a",))]


def test_an_inline_blob_ends_the_transfer_that_ran() -> None:
    blob = b"x" * MAX_INLINE
    downloads = Downloads()
    downloads.start(bare(blob), ["a"], 0.0)
    assert ends(downloads.start(BlobRef.of(blob), [], 1.0)) == [Fetched(BlobRef.of(blob))]
    assert bare(blob).hash not in downloads
    assert downloads.on_chunk("a", chunk_of(blob, 0), 2.0) == []


@pytest.mark.parametrize("length", [0, 1, CHUNK_SIZE])
def test_a_blob_of_one_chunk_is_asked_for_without_a_list(length: int) -> None:
    blob = b"z" * length
    downloads = Downloads()
    assert downloads.start(bare(blob), ["a"], 0.0) == [Ask("a", Want(bare(blob).hash, (0,)))]
    assert downloads.on_chunk("a", chunk_of(blob, 0), 1.0) == [Keep(bare(blob), 0, blob), Fetched(bare(blob))]
    assert bare(blob).hash not in downloads


def test_a_blob_of_many_chunks_begins_with_its_list() -> None:
    blob = blob_of(3)
    downloads = Downloads()
    assert asked(downloads.start(bare(blob), ["a"], 0.0)) == [CHUNK_LIST]
    assert asked(downloads.on_chunk("a", chunk_of(blob, CHUNK_LIST), 0.1)) == [0, 1, 2]
    assert kept(downloads.on_chunk("a", chunk_of(blob, 2), 0.2)) == [2]
    assert kept(downloads.on_chunk("a", chunk_of(blob, 0), 0.3)) == [0]
    last = downloads.on_chunk("a", chunk_of(blob, 1), 0.4)
    assert kept(last) == [1]
    assert ends(last) == [Fetched(bare(blob))]


def test_several_donors_share_the_chunks_and_none_is_asked_twice() -> None:
    blob = blob_of(6)
    downloads = Downloads()
    downloads.start(bare(blob), ["a", "b"], 0.0)
    effects = downloads.on_chunk("a", chunk_of(blob, CHUNK_LIST), 0.1)
    assert sorted(asked(effects)) == list(range(6))
    assert len(asked(effects, "a")) == len(asked(effects, "b")) == 3


def test_a_second_start_adds_donors_only() -> None:
    blob = blob_of(12)
    downloads = Downloads()
    downloads.start(bare(blob), ["a"], 0.0)
    first = asked(downloads.on_chunk("a", chunk_of(blob, CHUNK_LIST), 0.1))
    second = downloads.start(bare(blob), ["a", "b"], 0.2)
    assert {effect.donor for effect in second if isinstance(effect, Ask)} == {"b"}
    assert not set(first) & set(asked(second))


def test_without_a_donor_a_transfer_fails_at_once() -> None:
    assert Downloads().start(bare(b"blob"), [], 0.0) == [FetchFailed(bare(b"blob"), ())]


@pytest.mark.parametrize("lie", [b"", b"wrong", b"y" * 99])
def test_a_donor_that_lies_is_named_and_left_for_another(lie: bytes) -> None:
    blob = b"x" * 99
    downloads = Downloads()
    liar = next(effect for effect in downloads.start(bare(blob), ["a", "b"], 0.0) if isinstance(effect, Ask)).donor
    honest = "b" if liar == "a" else "a"
    effects = downloads.on_chunk(liar, Chunk(bare(blob).hash, 0, lie), 1.0)
    assert effects == [Ask(honest, Want(bare(blob).hash, (0,)))]
    assert downloads.on_chunk(honest, Chunk(bare(blob).hash, 0, lie), 2.0) == [FetchFailed(bare(blob), (liar, honest))]


def test_a_forged_chunk_list_is_a_lie() -> None:
    blob = blob_of(3)
    honest = chunk_of(blob, CHUNK_LIST).data
    for forged in (honest[:-DIGEST_SIZE], honest + honest[:DIGEST_SIZE], honest[::-1], honest[:-1], b""):
        downloads = Downloads()
        downloads.start(bare(blob), ["a"], 0.0)
        lying = downloads.on_chunk("a", Chunk(bare(blob).hash, CHUNK_LIST, forged), 1.0)
        assert lying == [FetchFailed(bare(blob), ("a",))]


def test_chunks_that_do_not_cut_the_blob_as_agreed_are_never_kept() -> None:
    parts = [b"short", b"y" * CHUNK_SIZE]
    hashes = [chunk_hash(part) for part in parts]
    ref = BlobRef(blob_hash_of(CHUNK_SIZE + 5, hashes), CHUNK_SIZE + 5)
    downloads = Downloads()
    downloads.start(ref, ["a"], 0.0)
    downloads.on_chunk("a", Chunk(ref.hash, CHUNK_LIST, b"".join(hashes)), 0.1)
    assert downloads.on_chunk("a", Chunk(ref.hash, 0, parts[0]), 0.2) == [FetchFailed(ref, ("a",))]


def test_a_donor_without_the_blob_is_left_for_another() -> None:
    blob = b"x" * 99
    downloads = Downloads()
    downloads.start(bare(blob), ["a", "b"], 0.0)
    assert downloads.on_absent("a", Absent(bare(blob).hash), 1.0) == [Ask("b", Want(bare(blob).hash, (0,)))]
    assert downloads.on_absent("b", Absent(bare(blob).hash), 2.0) == [FetchFailed(bare(blob), ())]
    assert downloads.on_absent("b", Absent(bare(blob).hash), 3.0) == []


def test_what_a_gone_donor_owed_is_asked_of_the_others_and_arrived_chunks_are_not() -> None:
    blob = blob_of(6)
    downloads = Downloads()
    downloads.start(bare(blob), ["a", "b"], 0.0)
    effects = downloads.on_chunk("a", chunk_of(blob, CHUNK_LIST), 0.1)
    owed, waiting = asked(effects, "a"), asked(effects, "b")
    downloads.on_chunk("a", chunk_of(blob, owed[0]), 0.2)
    effects = downloads.donor_gone("a", 0.3)
    assert asked(effects, "a") == []
    waiting += asked(effects)
    while waiting:
        effects = downloads.on_chunk("b", chunk_of(blob, waiting.pop(0)), 0.4)
        waiting += asked(effects)
        assert owed[0] not in kept(effects) + waiting
    assert ends(effects) == [Fetched(bare(blob))]


def test_a_gone_donor_is_asked_for_nothing_more() -> None:
    downloads = Downloads()
    blobs = [bytes([number]) * 50 for number in range(8)]
    for blob in blobs:
        downloads.start(bare(blob), ["a", "b"], 0.0)
    assert asked(downloads.donor_gone("a", 1.0), "a") == []


def test_a_donor_that_stalls_is_left_and_its_late_chunk_ignored() -> None:
    blob = b"x" * 99
    downloads = Downloads()
    downloads.start(bare(blob), ["a", "b"], 0.0)
    assert downloads.tick(STALL_SECONDS) == []
    assert downloads.tick(STALL_SECONDS + 0.1) == [Ask("b", Want(bare(blob).hash, (0,)))]
    assert downloads.on_chunk("a", chunk_of(blob, 0), STALL_SECONDS + 0.2) == []
    assert downloads.tick(2 * STALL_SECONDS + 0.3) == [FetchFailed(bare(blob), ())]


def test_a_slow_donor_that_makes_progress_is_kept() -> None:
    blob = blob_of(4)
    downloads = Downloads()
    downloads.start(bare(blob), ["a"], 0.0)
    now = 0.0
    for index in (CHUNK_LIST, 0, 1, 2):
        now += STALL_SECONDS - 0.5
        assert not ends(downloads.tick(now))
        downloads.on_chunk("a", chunk_of(blob, index), now)
    assert ends(downloads.on_chunk("a", chunk_of(blob, 3), now + 1.0)) == [Fetched(bare(blob))]


def test_what_a_much_slower_donor_owes_at_the_end_is_taken_over_by_an_idle_one() -> None:
    blob, downloads = blob_of(7), Downloads()
    downloads.start(bare(blob), ["fast", "slow"], 0.0)
    effects = downloads.on_chunk("fast", chunk_of(blob, CHUNK_LIST), 0.1)
    mine, slows = asked(effects, "fast"), asked(effects, "slow")
    assert slows
    while mine:
        effects = downloads.on_chunk("fast", chunk_of(blob, mine.pop(0)), 0.2)
        mine += asked(effects, "fast")
    assert asked(downloads.tick(0.3)) == []  # there is no telling yet
    taken: list[int] = []
    now = 0.3
    while len(taken) < len(slows):
        now += 2.0
        more = asked(downloads.tick(now), "fast")
        assert more and set(more) <= set(slows)
        for index in more:
            effects = downloads.on_chunk("fast", chunk_of(blob, index), now + 0.1)
        taken += more
    assert ends(effects) == [Fetched(bare(blob))]
    assert downloads.on_chunk("slow", chunk_of(blob, slows[0]), now + 1.0) == []


def test_the_only_donor_is_never_too_slow() -> None:
    blob, downloads = blob_of(3), Downloads()
    downloads.start(bare(blob), ["slow"], 0.0)
    downloads.on_chunk("slow", chunk_of(blob, CHUNK_LIST), 5.0)
    assert downloads.tick(5.0 + STALL_SECONDS - 1.0) == []


def test_an_idle_donor_does_not_stall() -> None:
    downloads = Downloads()
    downloads.start(bare(b"one"), ["a"], 0.0)
    downloads.on_chunk("a", chunk_of(b"one", 0), 1.0)
    downloads.start(bare(b"two"), ["a"], 500.0)
    assert downloads.tick(500.0 + STALL_SECONDS - 0.1) == []


def test_the_window_is_kept_for_a_donor_over_all_its_blobs() -> None:
    downloads = Downloads()
    blobs = [bytes([number]) * 50 for number in range(MAX_WINDOW + 5)]
    outstanding = sum(len(asked(downloads.start(bare(blob), ["a"], 0.0))) for blob in blobs)
    assert outstanding == MIN_WINDOW


def test_the_window_grows_with_the_rate_and_is_bounded() -> None:
    blob = blob_of(60)
    downloads = Downloads()
    waiting = asked(downloads.start(bare(blob), ["a"], 0.0))
    most, now = 0, 0.0
    while waiting:
        now += 0.001
        effects = downloads.on_chunk("a", chunk_of(blob, waiting.pop(0)), now)
        waiting += asked(effects)
        most = max(most, len(waiting))
    assert most == MAX_WINDOW
    assert ends(effects) == [Fetched(bare(blob))]


def test_a_transfer_that_fails_makes_room_for_those_that_wait() -> None:
    downloads = Downloads()
    blobs = [bytes([number]) * 50 for number in range(MIN_WINDOW + 1)]
    for blob in blobs:
        downloads.start(bare(blob), ["a"], 0.0)
    freed = downloads.on_absent("a", Absent(bare(blobs[0]).hash), 1.0)
    assert freed == [FetchFailed(bare(blobs[0]), ()), Ask("a", Want(bare(blobs[-1]).hash, (0,)))]


def test_a_cancelled_transfer_makes_room_at_the_next_tick() -> None:
    downloads = Downloads()
    blobs = [bytes([number]) * 50 for number in range(MIN_WINDOW + 1)]
    for blob in blobs:
        downloads.start(bare(blob), ["a"], 0.0)
    downloads.cancel(bare(blobs[0]).hash)
    assert bare(blobs[0]).hash not in downloads
    assert downloads.tick(1.0) == [Ask("a", Want(bare(blobs[-1]).hash, (0,)))]


def test_chunks_that_nobody_asked_for_are_ignored() -> None:
    blob = blob_of(3)
    downloads = Downloads()
    assert downloads.on_chunk("a", chunk_of(blob, 0), 0.0) == []
    downloads.start(bare(blob), ["a"], 0.0)
    for index in (0, 1, 2):
        assert downloads.on_chunk("a", chunk_of(blob, index), 0.1) == []
    assert downloads.on_chunk("b", chunk_of(blob, CHUNK_LIST), 0.1) == []


def broken_off(downloads: Downloads, blob: bytes, arrived: int, now: float = 0.0) -> list[TransferEffect]:
    """Fetch the first chunks of a blob from a donor that then goes; what its going brings."""
    downloads.start(bare(blob), ["a"], now)
    for index in (CHUNK_LIST, *range(arrived)):
        assert not ends(downloads.on_chunk("a", chunk_of(blob, index), now))
    return downloads.donor_gone("a", now)


def test_a_transfer_that_broke_off_goes_on_from_there() -> None:
    blob = blob_of(6)
    downloads = Downloads()
    assert broken_off(downloads, blob, arrived=4) == [FetchFailed(bare(blob), (), resumable=True)]
    assert bare(blob).hash not in downloads
    assert sorted(asked(downloads.start(bare(blob), ["b"], 100.0))) == [4, 5]
    downloads.on_chunk("b", chunk_of(blob, 5), 100.1)
    assert ends(downloads.on_chunk("b", chunk_of(blob, 4), 100.2)) == [Fetched(bare(blob))]
    assert asked(downloads.start(bare(blob), ["b"], 101.0)) == [CHUNK_LIST]


def test_a_transfer_may_break_off_many_times() -> None:
    blob = blob_of(6)
    downloads = Downloads()
    downloads.start(bare(blob), ["0"], 0.0)
    downloads.on_chunk("0", chunk_of(blob, CHUNK_LIST), 0.0)
    for index in range(5):
        downloads.on_chunk(str(index), chunk_of(blob, index), float(index))
        assert downloads.donor_gone(str(index), float(index)) == [FetchFailed(bare(blob), (), resumable=True)]
        assert index not in asked(downloads.start(bare(blob), [str(index + 1)], float(index)))
    assert ends(downloads.on_chunk("5", chunk_of(blob, 5), 9.0)) == [Fetched(bare(blob))]


def test_a_transfer_without_a_chunk_is_not_kept() -> None:
    blob = blob_of(6)
    downloads = Downloads()
    assert broken_off(downloads, blob, arrived=0) == [FetchFailed(bare(blob), ())]
    assert asked(downloads.start(bare(blob), ["b"], 1.0)) == [CHUNK_LIST]


def test_a_transfer_that_ended_in_a_lie_is_not_kept() -> None:
    blob = blob_of(6)
    downloads = Downloads()
    downloads.start(bare(blob), ["a"], 0.0)
    downloads.on_chunk("a", chunk_of(blob, CHUNK_LIST), 0.0)
    downloads.on_chunk("a", chunk_of(blob, 0), 0.0)
    assert downloads.on_chunk("a", Chunk(bare(blob).hash, 1, b"lie"), 0.0) == [FetchFailed(bare(blob), ("a",))]
    assert asked(downloads.start(bare(blob), ["b"], 1.0)) == [CHUNK_LIST]


def test_a_reference_with_another_length_neither_goes_on_nor_spoils_what_broke_off() -> None:
    blob = blob_of(6)
    downloads = Downloads()
    broken_off(downloads, blob, arrived=4)
    false = BlobRef(bare(blob).hash, len(blob) + 1)
    assert asked(downloads.start(false, ["b"], 1.0)) == [CHUNK_LIST]
    assert ends(downloads.on_chunk("b", chunk_of(blob, CHUNK_LIST), 1.1)) == [FetchFailed(false, ("b",))]
    assert sorted(asked(downloads.start(bare(blob), ["c"], 1.2))) == [4, 5]


def test_what_broke_off_is_dropped_once_nobody_came_back_for_it_in_time() -> None:
    blob = blob_of(6)
    downloads = Downloads()
    broken_off(downloads, blob, arrived=4, now=5.0)
    assert downloads.tick(5.0 + KEPT_SECONDS) == []
    assert downloads.tick(5.1 + KEPT_SECONDS) == [Drop(bare(blob))]
    assert downloads.tick(9.0 + KEPT_SECONDS) == []
    assert asked(downloads.start(bare(blob), ["b"], 999.0)) == [CHUNK_LIST]


def test_too_many_that_broke_off_drop_the_oldest() -> None:
    downloads = Downloads(most_interrupted=2)
    blobs = [blob_of(3, seed=seed) for seed in range(1, 4)]
    ended = [broken_off(downloads, blob, arrived=1) for blob in blobs]
    assert [effect for effects in ended for effect in effects if isinstance(effect, Drop)] == [Drop(bare(blobs[0]))]
    assert Drop(bare(blobs[0])) in ended[2]
    assert CHUNK_LIST in asked(downloads.start(bare(blobs[0]), ["b"], 1.0))
    assert sorted(asked(downloads.start(bare(blobs[1]), ["b"], 1.0))) == [1, 2]


def test_what_broke_off_is_bounded_in_bytes_and_the_newest_stays() -> None:
    small, large = blob_of(3, seed=1), blob_of(9, seed=2)
    downloads = Downloads(most_interrupted_bytes=4 * CHUNK_SIZE)
    broken_off(downloads, small, arrived=1)
    assert Drop(bare(small)) in broken_off(downloads, large, arrived=1)
    assert Drop(bare(large)) in broken_off(downloads, small, arrived=1)
    # The account is right after all that: two small ones have room.
    other = blob_of(2, seed=3)
    assert not [effect for effect in broken_off(downloads, other, arrived=1) if isinstance(effect, Drop)]


def test_a_cancelled_transfer_does_not_go_on() -> None:
    blob = blob_of(6)
    downloads = Downloads()
    broken_off(downloads, blob, arrived=4)
    downloads.cancel(bare(blob).hash)
    assert downloads.tick(5.0 + KEPT_SECONDS) == []
    assert asked(downloads.start(bare(blob), ["b"], 1.0)) == [CHUNK_LIST]


def test_serving_gives_chunks_the_list_or_says_that_the_blob_is_absent() -> None:
    blob = blob_of(3)
    source = MemoryBlobs()
    ref = source.put(blob)
    wanted = serve(Want(ref.hash, (CHUNK_LIST, 2)), source)
    assert wanted == [chunk_of(blob, CHUNK_LIST), chunk_of(blob, 2)]
    assert serve(Want(ref.hash, (0, 3, 1)), source) == [chunk_of(blob, 0), Absent(ref.hash)]
    assert serve(Want(b"?" * 32, (0,)), source) == [Absent(b"?" * 32)]
    assert len(serve(Want(ref.hash, (0,) * (MAX_WANTED + 9)), source)) == MAX_WANTED
