"""Blobs in memory and on disk: the same behaviour, and on disk whole or not at all."""

from collections.abc import Callable
from pathlib import Path

import pytest

from clients.fetched import LARGE_BYTES, FetchedBlobs
from ravnest_fed.blobs import BlobStore, DiskBlobs, MemoryBlobs
from ravnest_fed.errors import LedgerError
from ravnest_fed.facts import BlobRef
from ravnest_fed.hashing import CHUNK_SIZE, blob_hash, blob_hash_of, chunk_hash, chunks
from ravnest_fed.messages import CHUNK_LIST

CONTENTS = (b"", b"small", b"\1" * CHUNK_SIZE, b"\2" * CHUNK_SIZE + b"tail")
Make = Callable[[Path], BlobStore]
both = pytest.mark.parametrize("make", [lambda folder: MemoryBlobs(), DiskBlobs], ids=["memory", "disk"])
each = pytest.mark.parametrize("content", CONTENTS, ids=["empty", "small", "one chunk", "two chunks"])


@both
@each
def test_what_is_put_is_read(make: Make, content: bytes, tmp_path: Path) -> None:
    store = make(tmp_path)
    ref = store.put(content)
    assert (ref.hash, ref.length) == (blob_hash(content), len(content))
    assert store.has(ref.hash)
    assert store.read(ref.hash) == content
    assert store.put(content) == ref


@both
@each
def test_chunks_and_their_list_prove_the_blob(make: Make, content: bytes, tmp_path: Path) -> None:
    store = make(tmp_path)
    ref = store.put(content)
    parts = [bytes(part) for part in chunks(content)]
    assert [store.read_chunk(ref.hash, index) for index in range(len(parts))] == parts
    listed = store.read_chunk(ref.hash, CHUNK_LIST)
    assert listed == b"".join(map(chunk_hash, parts))
    assert blob_hash_of(len(content), map(chunk_hash, parts)) == ref.hash
    for beyond in (len(parts), 2**40, -2):
        assert store.read_chunk(ref.hash, beyond) is None


@both
def test_chunks_may_arrive_in_any_order(make: Make, tmp_path: Path) -> None:
    content = b"\1" * CHUNK_SIZE + b"\2" * CHUNK_SIZE + b"tail"
    store, ref = make(tmp_path), BlobRef.of(content)
    parts = [bytes(part) for part in chunks(content)]
    for index in (2, 0, 1):
        store.keep_chunk(ref, index, parts[index])
        assert not store.has(ref.hash)
        assert store.read_chunk(ref.hash, index) is None
    store.finish(ref)
    assert store.read(ref.hash) == content


@both
def test_what_is_not_here_is_none_or_an_error(make: Make, tmp_path: Path) -> None:
    store, unknown = make(tmp_path), b"\7" * 32
    assert not store.has(unknown)
    assert store.read_chunk(unknown, 0) is None
    assert store.read_chunk(unknown, CHUNK_LIST) is None
    with pytest.raises(LedgerError, match=unknown.hex()[:16]):
        store.read(unknown)
    store.remove(unknown)


@both
def test_what_is_removed_is_gone(make: Make, tmp_path: Path) -> None:
    store = make(tmp_path)
    ref, other = store.put(b"one"), store.put(b"other")
    store.remove(ref.hash)
    assert not store.has(ref.hash)
    assert store.read(other.hash) == b"other"
    with pytest.raises(LedgerError):
        store.read(ref.hash)


def test_blobs_on_disk_are_found_again(tmp_path: Path) -> None:
    refs = [DiskBlobs(tmp_path / "blobs").put(content) for content in CONTENTS]
    again = DiskBlobs(tmp_path / "blobs")
    assert [again.read(ref.hash) for ref in refs] == list(CONTENTS)
    assert again.read_chunk(refs[3].hash, 1) == b"tail"


def test_the_leftovers_of_a_kill_are_cleaned(tmp_path: Path) -> None:
    content = b"\1" * CHUNK_SIZE + b"tail"
    killed, ref = DiskBlobs(tmp_path), BlobRef.of(content)
    whole = killed.put(b"whole")
    killed.keep_chunk(ref, 0, content[:CHUNK_SIZE])
    assert len(list(tmp_path.iterdir())) == 2
    again = DiskBlobs(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [whole.hash.hex()]
    assert not again.has(ref.hash)
    assert again.put(content) == ref.bare()
    assert again.read(ref.hash) == content


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"X" + data[1:]])
def test_a_damaged_file_is_refused_by_name(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    ref = DiskBlobs(tmp_path).put(b"a blob of some bytes")
    file = tmp_path / ref.hash.hex()
    file.write_bytes(damage(file.read_bytes()))
    store = DiskBlobs(tmp_path)
    with pytest.raises(LedgerError, match=ref.hash.hex()) as caught:
        store.read(ref.hash)
    assert "damaged" in caught.value.what
    with pytest.raises(LedgerError, match=ref.hash.hex()):
        store.read_chunk(ref.hash, CHUNK_LIST)


def test_files_that_are_no_blobs_are_left_alone(tmp_path: Path) -> None:
    ref = DiskBlobs(tmp_path).put(b"blob")
    stray = tmp_path / ".DS_Store"
    stray.write_bytes(b"made by a file manager")
    store = DiskBlobs(tmp_path)
    store.retain(set())
    assert not store.has(ref.hash)
    assert list(tmp_path.iterdir()) == [stray]


def test_retaining_removes_all_others(tmp_path: Path) -> None:
    store = DiskBlobs(tmp_path)
    first, second, third = (store.put(content) for content in (b"1", b"2", b"3"))
    store.retain({first.hash, third.hash, b"\7" * 32})
    assert [store.has(ref.hash) for ref in (first, second, third)] == [True, False, True]
    assert {file.name for file in tmp_path.iterdir()} == {first.hash.hex(), third.hash.hex()}


def test_what_a_client_fetched_and_a_power_cut_damaged_is_fetched_again(tmp_path: Path) -> None:
    data = bytes(range(256)) * (LARGE_BYTES // 256)
    first = FetchedBlobs(tmp_path)
    refs = []
    for whole in (data, data[::-1]):
        ref = BlobRef.of(whole)
        for index, chunk in enumerate(chunks(whole)):
            first.keep_chunk(ref, index, chunk)
        first.finish(ref)
        refs.append(ref)
    (tmp_path / refs[0].hash.hex()).write_bytes(b"")
    again = FetchedBlobs(tmp_path)
    assert not again.has(refs[0].hash)
    assert again.read(refs[1].hash) == data[::-1]
    again.drop(refs[1].hash)
    assert not again.has(refs[1].hash) and not list(tmp_path.iterdir())
