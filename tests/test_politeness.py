"""When a client pauses for its owner, and when it goes on: every cause, the hysteresis, and the hours."""

import itertools
from datetime import time

import pytest

from clients.politeness import CALM_SECONDS, Politeness, Sample, When, most_threads, rest_factor
from ravnest_fed.errors import UsageError

NOON = time(12, 0)
QUIET = Sample(gpu_others=0.0, cpu_others=3.0, on_battery=False, headroom=40.0)

BUSY = [
    (Sample(gpu_others=40.0), "another process uses 40% of the GPU", 3.0),
    (Sample(cpu_others=62.4), "other processes use 62% of the CPU", 5.0),
    (Sample(on_battery=True), "the machine runs on battery", 0.0),
    (Sample(headroom=4.0), "the machine is 4 degrees from its limit", 0.0),
]


class Owner:
    """One machine's verdicts, each a second after the one before."""

    def __init__(self, when: str = "idle") -> None:
        self.politeness = Politeness(When.parse(when))
        self.now = 1000.0

    def see(self, sample: Sample = QUIET, seconds: float = 1.0, local: time = NOON) -> str:
        self.now += seconds
        return self.politeness.observe(sample, local, self.now)

    def see_for(self, sample: Sample, seconds: int) -> list[str]:
        return [self.see(sample) for _ in range(seconds)]


@pytest.mark.parametrize(("sample", "because", "lasting"), BUSY)
def test_each_need_pauses_once_it_has_lasted_and_says_why(sample: Sample, because: str, lasting: float) -> None:
    owner = Owner()
    assert owner.see(QUIET) == ""
    first = owner.see_for(sample, int(lasting) + 1)
    assert first == [""] * int(lasting) + [because]


@pytest.mark.parametrize(("sample", "because", "lasting"), BUSY)
def test_work_goes_on_only_after_a_calm_while(sample: Sample, because: str, lasting: float) -> None:
    owner = Owner()
    owner.see_for(sample, int(lasting) + 1)
    assert set(owner.see_for(QUIET, int(CALM_SECONDS) - 1)) == {because}
    assert owner.see(QUIET) == ""


@pytest.mark.parametrize(
    ("calmer", "calm"),
    [
        (Sample(gpu_others=6.0), Sample(gpu_others=4.0)),
        (Sample(cpu_others=20.0), Sample(cpu_others=14.0)),
        (Sample(headroom=12.0), Sample(headroom=16.0)),
    ],
)
def test_a_need_is_over_only_well_below_where_it_began(calmer: Sample, calm: Sample) -> None:
    owner = Owner()
    assert set(owner.see_for(calmer, 60)) == {""}
    busy = Sample(gpu_others=90.0) if calmer.gpu_others else Sample(cpu_others=90.0) if calmer.cpu_others else None
    owner.see_for(busy or Sample(headroom=2.0), 6)
    assert "" not in owner.see_for(calmer, 120)
    assert owner.see_for(calm, int(CALM_SECONDS) + 1)[-1] == ""


def test_a_load_that_comes_and_goes_is_one_pause() -> None:
    owner = Owner()
    verdicts: list[str] = []
    for _ in range(10):
        verdicts += owner.see_for(Sample(cpu_others=50.0), 8) + owner.see_for(QUIET, 20)
    changes = [after for before, after in itertools.pairwise(verdicts) if before != after]
    assert changes == ["other processes use 50% of the CPU"]


def test_a_short_burst_is_no_reason() -> None:
    owner = Owner()
    for _ in range(5):
        assert set(owner.see_for(Sample(cpu_others=100.0, gpu_others=100.0), 3) + owner.see_for(QUIET, 1)) == {""}


def test_a_reason_keeps_its_number_while_it_lasts() -> None:
    owner = Owner()
    owner.see_for(Sample(cpu_others=40.0), 6)
    assert {owner.see(Sample(cpu_others=number)) for number in (55.0, 99.0, 31.0)} == {
        "other processes use 40% of the CPU"
    }


def test_several_needs_are_all_named() -> None:
    assert Owner().see(Sample(on_battery=True, headroom=1.0)) == (
        "the machine runs on battery, the machine is 1 degrees from its limit"
    )


def test_what_a_machine_does_not_tell_is_no_reason_and_ends_one() -> None:
    owner = Owner()
    assert set(owner.see_for(Sample(), 60)) == {""}
    owner.see_for(Sample(gpu_others=50.0), 5)
    assert owner.see_for(Sample(), int(CALM_SECONDS) + 1)[-1] == ""


def test_always_is_always() -> None:
    owner = Owner("always")
    assert set(owner.see_for(Sample(100.0, 100.0, True, -3.0), 60)) == {""}


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("09:00-17:30", [time(9, 0), time(17, 29, 59)], [time(8, 59, 59), time(17, 30), time(0, 0)]),
        ("22:00-06:30", [time(22, 0), time(23, 59), time(0, 0), time(6, 29)], [time(6, 30), NOON, time(21, 59)]),
        ("0:00-6:00", [time(0, 0), time(5, 59)], [time(6, 0), time(23, 59)]),
        ("18:00-00:00", [time(18, 0), time(23, 59)], [time(0, 0), NOON]),
    ],
)
def test_hours_are_local_and_may_go_past_midnight(hours: str, inside: list[time], outside: list[time]) -> None:
    owner = Owner(hours)
    assert {owner.see(local=local) for local in inside} == {""}
    (because,) = {owner.see(local=local) for local in outside}
    assert because.startswith("it is outside ") and because.endswith(str(When.parse(hours)))


def test_within_its_hours_a_client_yields_too_and_work_begins_when_they_do() -> None:
    owner = Owner("22:00-06:30")
    assert owner.see(local=time(21, 59, 59)) == "it is outside 22:00-06:30"
    assert owner.see(local=time(22, 0)) == ""
    assert owner.see(Sample(on_battery=True), local=time(22, 1)) == "the machine runs on battery"
    assert owner.see(Sample(on_battery=True), local=time(7, 0)) == (
        "it is outside 22:00-06:30, the machine runs on battery"
    )


@pytest.mark.parametrize("text", ["", "never", "22-6", "24:00-06:00", "22:60-06:00", "22:00", "08:00-08:00", "Idle"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--when"):
        When.parse(text)


def test_a_share_of_the_processor_is_threads_and_below_one_core_rests() -> None:
    assert [most_threads(share, 8) for share in (1.0, 0.5, 0.3, 0.01)] == [8, 4, 2, 1]
    assert most_threads(0.29, 100) == 29
    assert rest_factor(None, 8, 8) == 0.0
    assert rest_factor(0.5, 8, 4) == 0.0
    # A quarter of two cores is half of one: as long a rest as a step.
    assert rest_factor(0.25, 2, 1) == pytest.approx(1.0)
