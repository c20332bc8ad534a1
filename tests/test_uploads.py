"""The upload limit, by a clock that the test moves."""

from clients.uploads import MIN_RATE, MOST_QUEUED, Uploads
from ravnest_fed.hashing import CHUNK_SIZE
from ravnest_fed.messages import MAX_WANTED, Want
from ravnest_fed.transfer import STALL_SECONDS

BLOB, OTHER = b"a" * 32, b"b" * 32


def drain(uploads: Uploads, until: float, size: int = 1000, now: float = 0.0) -> list[tuple[float, str, int]]:
    """What leaves by `until`, and when: the shell comes back whenever it is told to."""
    left = []
    while (wait := uploads.wait(now)) is not None and now + wait <= until:
        now += wait
        following = uploads.next(now)
        assert following is not None
        broker, want = following
        uploads.sent(size, now)
        left.append((now, broker, want.indices[0]))
    return left


def test_chunks_leave_no_faster_than_the_limit_and_in_order() -> None:
    uploads = Uploads(500.0)
    uploads.ask("b1", Want(BLOB, (4, 5, 6)))
    uploads.ask("b1", Want(OTHER, (0,)))
    assert drain(uploads, 100.0) == [(0.0, "b1", 4), (2.0, "b1", 5), (4.0, "b1", 6), (6.0, "b1", 0)]
    assert uploads.next(100.0) is None and uploads.wait(100.0) is None


def test_before_its_time_nothing_leaves() -> None:
    uploads = Uploads(500.0)
    uploads.ask("b1", Want(BLOB, (0, 1)))
    assert uploads.next(10.0) == ("b1", Want(BLOB, (0,)))
    uploads.sent(1000, 10.0)
    assert uploads.next(11.99) is None and uploads.wait(11.5) == 0.5
    assert uploads.next(12.0) == ("b1", Want(BLOB, (1,)))


def test_a_long_silence_saves_nothing_up() -> None:
    uploads = Uploads(500.0)
    uploads.ask("b1", Want(BLOB, (0,)))
    drain(uploads, 0.0)
    uploads.ask("b1", Want(BLOB, (1, 2, 3)))
    assert [at for at, _, _ in drain(uploads, 1000.0, now=900.0)] == [900.0, 902.0, 904.0]


def test_what_is_asked_for_twice_leaves_once_and_again_after_it_has_left() -> None:
    uploads = Uploads(500.0)
    for _ in range(3):
        uploads.ask("b1", Want(BLOB, (1, 2)))
    assert [index for _, _, index in drain(uploads, 100.0)] == [1, 2]
    uploads.ask("b1", Want(BLOB, (1,)))
    assert [index for _, _, index in drain(uploads, 200.0, now=100.0)] == [1]


def test_a_broker_that_is_gone_gets_nothing_more() -> None:
    uploads = Uploads(500.0)
    uploads.ask("b1", Want(BLOB, (0, 1)))
    uploads.ask("b2", Want(BLOB, (0,)))
    uploads.forget("b1")
    assert [broker for _, broker, _ in drain(uploads, 100.0)] == ["b2"]


def test_a_broker_that_asks_without_end_fills_no_memory() -> None:
    uploads = Uploads(500.0)
    for first in range(0, 100 * MAX_WANTED, MAX_WANTED):
        uploads.ask("b1", Want(BLOB, tuple(range(first, first + MAX_WANTED))))
    assert len(drain(uploads, 1e9)) == MOST_QUEUED


def test_at_the_lowest_limit_no_broker_takes_an_upload_for_stalled() -> None:
    assert CHUNK_SIZE / MIN_RATE < 0.6 * STALL_SECONDS
