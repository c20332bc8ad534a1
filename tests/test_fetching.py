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
from ravnest_fed.messages import Absent, Chunk, Want
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
        stores: dict[Store, BlobStore] = {"ledger": self.ledger, "spool": self.spool, "memory": memory}
        self.asked: list[Want] = []
        self.fetching = Fetching(
            stores, lambda donor, want: self.asked.append(want), self.told.append, self.failures.append, self.disk
        )

    def answer(self) -> None:
        while self.asked:
            for part in serve(self.asked.pop(0), self.donor):
                assert isinstance(part, Chunk | Absent)
                self.fetching.take("donor", part)

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


def test_a_fetch_that_fails_leaves_nothing_on_disk(tmp_path: Path) -> None:
    async def story() -> None:
        broker = Broker(tmp_path)
        ref = broker.donor.put(b"y" * 600_000).bare()
        broker.fetching.fetch(Fetch(ref, ("donor",), "spool"))
        part = serve(broker.asked.pop(0), broker.donor)[0]
        assert isinstance(part, Chunk)
        broker.fetching.take("donor", part)
        chunk = serve(broker.asked.pop(0), broker.donor)[0]
        assert isinstance(chunk, Chunk)
        broker.fetching.take("donor", chunk)
        broker.fetching.donor_gone("donor")
        await broker.settle()
        assert broker.told == [Missed(ref.hash, "spool", ())]
        assert list((tmp_path / "spool").iterdir()) == []

    asyncio.run(story())
