"""What the trainer asks between its steps, and what the watch tells before it shows."""

import threading
from datetime import datetime, timedelta

from clients.politeness import When
from clients.watch import StepBoundary, Watch


def hours_from_now(first: int, last: int) -> str:
    """Hours of the day that begin and end so many hours from now."""
    now = datetime.now()
    return f"{now + timedelta(hours=first):%H:%M}-{now + timedelta(hours=last):%H:%M}"


def test_a_change_is_told_before_it_shows_and_once() -> None:
    seen: list[tuple[str, str]] = []
    watch = Watch(When("idle"), "cpu", lambda because: seen.append((because, watch.because)))
    for because in ("", "hot", "hot", "", ""):
        watch.take(because)
    assert seen == [("hot", ""), ("", "hot")]
    assert watch.because == ""


def test_a_watch_looks_at_once_and_ends() -> None:
    told = threading.Event()
    watch = Watch(When.parse(hours_from_now(2, 3)), "cpu", lambda because: told.set())
    watch.start()
    try:
        assert told.wait(30.0)
    finally:
        watch.stop()
    assert watch.because.startswith("it is outside ")
    assert "watch" not in {thread.name for thread in threading.enumerate()}


def test_who_may_always_work_is_not_watched() -> None:
    watch = Watch(When("always"), "cpu", lambda because: None)
    watch.start()
    assert "watch" not in {thread.name for thread in threading.enumerate()}
    watch.stop()
    assert watch.because == ""


def test_a_rest_follows_each_step_by_its_length() -> None:
    now, rests = [0.0], list[float]()

    def rest(seconds: float) -> None:
        rests.append(seconds)
        now[0] += seconds

    boundary = StepBoundary(0.5, lambda: "", rest, lambda: now[0])
    for step_seconds in (2.0, 4.0, 1.0):
        assert boundary()
        now[0] += step_seconds
    assert boundary()
    assert rests == [1.0, 2.0, 0.5]


def test_without_a_share_there_is_no_rest_and_a_need_ends_the_round() -> None:
    rests: list[float] = []
    answers = iter(["", "", "hot"])
    boundary = StepBoundary(0.0, lambda: next(answers), rests.append)
    assert [boundary() for _ in range(3)] == [True, True, False] and rests == []
