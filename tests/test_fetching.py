"""Fetches of the same bytes at the same time, into several stores, while the disk is slow."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from brokers.effects import Fetch, Store
from brokers.events import Event, Fetched, Missed
from brokers.fetching import Fetching
from ravnest_fed.blobs import BlobStore, DiskBlobs, MemoryBlobs
from ravnest_fed.facts import BlobRef
from ravnest_fed.messages import CHUNK_LIST, Absent, Chunk, Want
from ravnest_fed.transfer import serve


class HeldDisk(Executor):
    """Does its work only when it is let."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, task: Callable[..., Any], /, *args: Any, **named: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(task(*args, **named))
            except BaseException as error:
                future.set_exception(error)

        self.waiting.append(work)
        return future

    def let(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


class Broker:
    """A fetching broker, a donor that holds some blobs, and all that was told."""

    def __init__(self, folder: Path) -> None:
        self.disk = HeldDisk()
        self.donor = MemoryBlobs()
        self.told: list[Event] = []
        self.failures: list[BaseException] = []
        self.ledger, self.spool, memory = DiskBlobs(folder / "blobs"), DiskBlobs(folder / "spool"), MemoryBlobs()
        self.stores: dict[Store, BlobStore] = {"ledger": self.ledger, "spool": self.spool, "memory": memory}
        self.asked: list[Want] = []
        self.fetching = Fetching(
            self.stores, lambda donor, want: self.asked.append(want), self.told.append, self.failures.append, self.disk
        )

    def answer(self) -> None:
        while self.asked:
            for part in serve(self.asked.pop(0), self.donor):
                assert isinstance(part, Chunk | Absent)
                self.fetching.take("donor", part)

    def answer_one(self) -> int:
        """Answer the first request that waits, and that alone; returns the chunk's index."""
        want = self.asked.pop(0)
        part = serve(Want(want.blob, want.indices[:1]), self.donor)[0]
        assert isinstance(part, Chunk)
        if want.indices[1:]:
            self.asked.insert(0, Want(want.blob, want.indices[1:]))
        self.fetching.take("donor", part)
        return part.index

    def break_off(self) -> None:
        """The donor goes, and what it was asked for with it."""
        self.asked.clear()
        self.fetching.donor_gone("donor")

    async def settle(self) -> None:
        for _ in range(10):
            self.answer()
            self.disk.let()
            await asyncio.sleep(0)


def test_a_second_fetch_while_the_first_is_being_written_is_served_with_it(tmp_path: Path) -> None:
    async def story() -> None:
        broker = Broker(tmp_path)
        ref = broker.donor.put(b"the same counters" * 9000).bare()
        broker.fetching.fetch(Fetch(ref, ("donor",), "spool"))
        broker.answer()
        for into in ("spool", "ledger", "memory"):
            broker.fetching.fetch(Fetch(ref, ("donor",), into))
        await broker.settle()
        assert broker.failures == []
        assert {event.into for event in broker.told if isinstance(event, Fetched)} == {"spool", "ledger", "memory"}
        assert broker.spool.read(ref.hash) == broker.ledger.read(ref.hash) == broker.donor.read(ref.hash)

    asyncio.run(story())


@pytest.mark.parametrize("times", [2, 5])
def test_inline_blobs_that_come_twice_do_no_harm(tmp_path: Path, times: int) -> None:
    async def story() -> None:
        broker = Broker(tmp_path)
        ref = BlobRef.of(b"zeros")
        for _ in range(times):
            broker.fetching.fetch(Fetch(ref, (), "spool"))
        await broker.settle()
        broker.fetching.fetch(Fetch(ref, (), "spool"))
        await broker.settle()
        assert broker.failures == [] and broker.spool.has(ref.hash)
        assert broker.told[-1] == Fetched(ref.hash, "spool")

    asyncio.run(story())


def test_a_blob_that_is_put_while_it_is_fetched_is_whole(tmp_path: Path) -> None:
    async def story() -> None:
        broker = Broker(tmp_path)
        data = b"x" * 600_000
        ref = broker.donor.put(data).bare()
        broker.fetching.fetch(Fetch(ref, ("donor",), "ledger"))
        broker.answer()
        broker.ledger.put(data)
        await broker.settle()
        assert broker.failures == [] and broker.ledger.read(ref.hash) == data
        assert [file.name for file in (tmp_path / "blobs").iterdir()] == [ref.hash.hex()]

    asyncio.run(story())


LARGE = b"".join(bytes([number]) * 150_000 for number in range(6))
"""Four chunks, all different."""


@pytest.mark.parametrize("then", ["spool", "ledger", "memory"])
def test_a_fetch_that_broke_off_goes_on_from_there_into_any_store(tmp_path: Path, then: Store) -> None:
    async def story() -> None:
        broker = Broker(tmp_path)
        ref = broker.donor.put(LARGE).bare()
        broker.fetching.fetch(Fetch(ref, ("donor",), "spool"))
        assert [broker.answer_one() for _ in range(3)] == [CHUNK_LIST, 0, 1]
        broker.break_off()
        await asyncio.sleep(0)
        assert broker.told == [Missed(ref.hash, "spool", ())]
        broker.fetching.fetch(Fetch(ref, ("donor",), then))
        assert [index for want in broker.asked for index in want.indices] == [2, 3]
        await broker.settle()
        assert broker.failures == []
        assert broker.told[1:] == [Fetched(ref.hash, then, LARGE if then == "memory" else None)]
        assert broker.stores[then].read(ref.hash) == LARGE
        assert list(tmp_path.rglob("*.part")) == []

    asyncio.run(story())


def test_a_fetch_into_memory_that_broke_off_leaves_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        broker = Broker(tmp_path)
        ref = broker.donor.put(LARGE).bare()
        broker.fetching.fetch(Fetch(ref, ("donor",), "memory"))
        assert [broker.answer_one() for _ in range(2)] == [CHUNK_LIST, 0]
        broker.break_off()
        broker.fetching.fetch(Fetch(ref, ("donor",), "memory"))
        assert broker.asked == [Want(ref.hash, (CHUNK_LIST,))]

    asyncio.run(story())


def test_the_oldest_of_too_many_that_broke_off_give_way_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brokers.fetching.MOST_INTERRUPTED", 2)

    async def story() -> None:
        broker = Broker(tmp_path)
        refs = [broker.donor.put(bytes([number]) + LARGE).bare() for number in range(4)]
        for ref in refs:
            broker.fetching.fetch(Fetch(ref, ("donor",), "spool"))
            assert [broker.answer_one() for _ in range(2)] == [CHUNK_LIST, 0]
            broker.break_off()
        left = {file.name for file in (tmp_path / "spool").iterdir()}
        assert left == {f"{ref.hash.hex()}.part" for ref in refs[2:]}

    asyncio.run(story())


def test_what_is_abandoned_is_asked_for_no_more_and_leaves_nothing_on_disk(tmp_path: Path) -> None:
    async def story() -> None:
        broker = Broker(tmp_path)
        broken, running, other = (broker.donor.put(bytes([number]) + LARGE).bare() for number in range(3))
        broker.fetching.fetch(Fetch(broken, ("donor",), "spool"))
        assert [broker.answer_one() for _ in range(2)] == [CHUNK_LIST, 0]
        broker.break_off()
        broker.fetching.fetch(Fetch(running, ("donor",), "spool"))
        assert [broker.answer_one() for _ in range(2)] == [CHUNK_LIST, 0]
        late = broker.asked.copy()
        broker.fetching.fetch(Fetch(other, ("donor",), "ledger"))
        broker.fetching.abandon("spool", frozenset())
        assert list((tmp_path / "spool").iterdir()) == []
        broker.asked = [want for want in broker.asked if want not in late] + late
        broker.fetching.tick()
        await broker.settle()
        assert list((tmp_path / "spool").iterdir()) == []
        assert broker.told == [Missed(broken.hash, "spool", ()), Fetched(other.hash, "ledger")]
        # Neither is remembered as begun: a fetch starts with the list.
        broker.fetching.fetch(Fetch(broken, ("donor",), "spool"))
        broker.fetching.fetch(Fetch(running, ("donor",), "spool"))
        assert broker.asked == [Want(broken.hash, (CHUNK_LIST,)), Want(running.hash, (CHUNK_LIST,))]

    asyncio.run(story())


def test_what_two_stores_want_is_abandoned_for_one_alone(tmp_path: Path) -> None:
    async def story() -> None:
        broker = Broker(tmp_path)
        ref = broker.donor.put(LARGE).bare()
        for into in ("spool", "ledger"):
            broker.fetching.fetch(Fetch(ref, ("donor",), into))
        broker.fetching.abandon("spool", frozenset())
        await broker.settle()
        assert broker.told == [Fetched(ref.hash, "ledger")]
        assert broker.ledger.read(ref.hash) == LARGE

    asyncio.run(story())
