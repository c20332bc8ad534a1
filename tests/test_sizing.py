"""Orders sized to machines: they fill the target, keep the bounds, follow deliveries, and each number has its reason."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokers.history import DROP, RISE, Delivered, History, SpeedEstimator
from brokers.sizing import Bounds, Client, Sized, Transfer, auto_target, cut, plan, size
from ravnest_fed.capability import Capability, Speed

BOUNDS = Bounds(micro_batch=32, accumulation=1, local_steps=10, min_steps=1, max_steps=10_000)
NOTHING = Transfer()
SPEEDS = st.floats(1e-3, 1e9)


def machine(speed: float, micro_batch: int = 32, fits: int | None = None, up: float | None = None) -> Capability:
    return Capability(
        device="cpu",
        speeds=(Speed(micro_batch, speed),),
        micro_batch=micro_batch,
        max_micro_batch=fits,
        bandwidth_up=up,
        bandwidth_down=up,
    )


@dataclass
class Worker:
    """A client whose real speed, overhead and honesty are known; it does what it is ordered."""

    client: Client
    speed: float
    overhead: float = 0.0
    lie: float = 1.0
    seen_by_clock: bool = True

    def work(self, sized: Sized) -> float:
        """Do the round; how long it really took."""
        training = sized.max_examples / self.speed
        took = training + self.overhead
        told = Delivered(
            sized.local_steps, sized.max_examples, training / self.lie, took if self.seen_by_clock else None
        )
        self.client.history.delivered(told)
        return took


def rounds(worker: Worker, count: int, target: float = 10.0, bounds: Bounds = BOUNDS) -> list[float]:
    return [worker.work(size(worker.client, target, bounds, NOTHING)) for _ in range(count)]


# --- the speed -------------------------------------------------------------------------------------------------------


def test_a_speed_drops_quickly_and_rises_slowly() -> None:
    speed = SpeedEstimator()
    speed.observe(100.0)
    assert speed.value == 100.0
    speed.observe(20.0)
    assert speed.value == pytest.approx(100 - DROP * 80)
    before = speed.value
    speed.observe(100.0)
    assert speed.value == pytest.approx(before + RISE * (100 - before))
    assert DROP > RISE


@given(st.lists(SPEEDS, min_size=1, max_size=20))
def test_a_speed_stays_within_what_was_seen(seen: list[float]) -> None:
    speed = SpeedEstimator()
    for one in seen:
        speed.observe(one)
        assert speed.value is not None
        assert min(seen) * (1 - 1e-9) <= speed.value <= max(seen) * (1 + 1e-9)


@pytest.mark.parametrize("nonsense", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_speed_changes_nothing(nonsense: float) -> None:
    speed = SpeedEstimator()
    speed.observe(nonsense)
    assert speed.value is None
    speed.observe(5.0)
    speed.observe(nonsense)
    assert speed.value == 5.0


@pytest.mark.parametrize(
    "work",
    [
        Delivered(0, 10, 1.0),
        Delivered(1, 0, 1.0),
        Delivered(1, 1, 0.0),
        Delivered(1, 1, -1.0),
        Delivered(1, 1, math.nan),
    ],
)
def test_a_delivery_without_work_or_time_says_nothing_of_speed(work: Delivered) -> None:
    history = History()
    history.delivered(work)
    assert history.speed.value is None


# --- the steps -------------------------------------------------------------------------------------------------------


@given(speed=SPEEDS, target=st.floats(0.1, 1e4), overhead_share=st.floats(0.0, 0.5), batch=st.integers(1, 4096))
def test_a_round_of_a_machine_known_well_takes_the_target(
    speed: float, target: float, overhead_share: float, batch: int
) -> None:
    bounds = Bounds(batch, 1, 10, 1, 10_000)
    worker = Worker(Client(machine(speed, batch)), speed, overhead_share * target)
    took = rounds(worker, 12, target, bounds)[-1]
    sized = size(worker.client, target, bounds, NOTHING)
    if bounds.min_steps < sized.local_steps < bounds.max_steps:
        assert abs(took - target) <= max(0.15 * target, 0.51 * batch / speed)


@given(speeds=st.tuples(SPEEDS, SPEEDS), target=st.floats(0.1, 1e4), rounds_behind=st.integers(0, 3))
def test_a_faster_machine_never_gets_less_work(speeds: tuple[float, float], target: float, rounds_behind: int) -> None:
    steps = []
    for speed in sorted(speeds):
        worker = Worker(Client(machine(speed)), speed)
        rounds(worker, rounds_behind, target)
        steps.append(size(worker.client, target, BOUNDS, NOTHING).local_steps)
    assert steps[0] <= steps[1]


@given(
    speed=SPEEDS,
    claimed=SPEEDS,
    target=st.floats(1e-3, 1e6),
    overhead=st.floats(0, 1e3),
    least=st.integers(1, 20),
    more=st.integers(0, 1000),
    clock=st.booleans(),
)
def test_orders_keep_the_bounds_whatever_is_claimed(
    speed: float, claimed: float, target: float, overhead: float, least: int, more: int, clock: bool
) -> None:
    bounds = Bounds(32, 2, least + more // 2, least, least + more)
    worker = Worker(Client(machine(claimed)), speed, overhead, lie=claimed / speed, seen_by_clock=clock)
    for _ in range(5):
        sized = size(worker.client, target, bounds, NOTHING)
        assert bounds.min_steps <= sized.local_steps <= bounds.max_steps
        assert sized.micro_batch >= 1 and sized.accumulation >= 1
        assert sized.micro_batch * sized.accumulation <= bounds.batch
        assert set(sized.reasons) == {"micro_batch", "accumulation", "local_steps"} and all(sized.reasons.values())
        worker.work(sized)


def test_four_machines_of_different_speed_finish_together() -> None:
    workers = {f"c{slow}": Worker(Client(machine(3200.0 / slow)), 3200.0 / slow, 0.4) for slow in (1, 2, 4, 8)}
    for _ in range(3):
        sized = plan({name: one.client for name, one in workers.items()}, 10.0, BOUNDS, NOTHING)
        took = {name: worker.work(sized[name]) for name, worker in workers.items()}
    assert all(abs(seconds - 10.0) < 0.15 * 10 for seconds in took.values()), took
    steps = [sized[f"c{slow}"].local_steps for slow in (1, 2, 4, 8)]
    assert [steps[0] / one for one in steps] == pytest.approx([1, 2, 4, 8], rel=0.1)
    assert sum(one.max_examples for one in sized.values()) > 0.9 * 10 * sum(one.speed for one in workers.values())


@pytest.mark.parametrize("seen_by_clock", [True, False])
def test_a_machine_that_slows_down_and_recovers_is_followed_within_three_rounds(seen_by_clock: bool) -> None:
    worker = Worker(Client(machine(320.0)), 320.0, seen_by_clock=seen_by_clock)
    rounds(worker, 8)
    worker.speed = 64.0
    took = rounds(worker, 5)
    assert took[0] > 40.0 and all(abs(seconds - 10.0) < 1.5 for seconds in took[3:]), took
    worker.speed = 320.0
    took = rounds(worker, 5)
    assert all(abs(seconds - 10.0) < 1.5 for seconds in took[3:]), took


def test_one_slow_round_is_forgotten_in_three() -> None:
    worker = Worker(Client(machine(320.0)), 320.0)
    rounds(worker, 4)
    worker.speed = 64.0
    rounds(worker, 1)
    worker.speed = 320.0
    took = rounds(worker, 4)
    assert took[0] < 4.0 and took[3] > 8.5


def test_a_client_that_claims_a_thousand_times_its_speed_gets_what_it_delivers() -> None:
    worker = Worker(Client(machine(320_000.0)), 320.0, lie=1000.0)
    first = size(worker.client, 10.0, BOUNDS, NOTHING)
    assert first.local_steps == 40 and "first order" in first.reasons["local_steps"]
    took = rounds(worker, 10)
    assert max(took[1:]) <= 12.6, took
    # The same claims, where no clock of this broker's was by: the order doubles until nothing comes any more.
    unseen = Worker(Client(machine(320_000.0)), 320.0, lie=1000.0, seen_by_clock=False)
    assert rounds(unseen, 4) == [4.0, 8.0, 16.0, 32.0]
    unseen.client.history.missed(640, 640 * 32, 20.0)
    after = size(unseen.client, 10.0, BOUNDS, NOTHING)
    assert after.local_steps <= 1.25 * 640 / 20 * 10


def test_a_client_cannot_have_trained_longer_than_it_took() -> None:
    history = History()
    history.delivered(Delivered(10, 320, 100.0, 5.0))
    assert history.speed.value == 64.0


def test_an_order_that_was_missed_makes_the_next_one_smaller() -> None:
    worker = Worker(Client(machine(320.0)), 320.0)
    rounds(worker, 3)
    worker.client.history.missed(100, 3200, 60.0)
    assert size(worker.client, 10.0, BOUNDS, NOTHING).local_steps <= 21


def test_communication_is_taken_off_the_target() -> None:
    known = Client(machine(320.0, up=1e6))
    sized = size(known, 3.0, BOUNDS, Transfer(bytes_up=1_000_000, bytes_down=500_000))
    assert sized.local_steps == 15 and sized.seconds == pytest.approx(3.0)
    assert "1.5 s of communication (by measured bandwidth)" in sized.reasons["local_steps"]
    unknown = size(Client(machine(320.0)), 3.0, BOUNDS, Transfer(1_000_000, 500_000))
    assert unknown.local_steps == 30 and "bandwidth is not measured yet" in unknown.reasons["local_steps"]


def test_a_link_too_slow_for_the_target_leaves_the_least_work() -> None:
    sized = size(Client(machine(320.0, up=1e3)), 10.0, BOUNDS, Transfer(bytes_up=10**6))
    assert sized.local_steps == 1 and "communication alone takes 1e+03 s" in sized.reasons["local_steps"]


def test_a_machine_that_nothing_is_known_of_gets_the_federations_work() -> None:
    for capability in (None, Capability(device="cpu")):
        sized = size(Client(capability), 10.0, BOUNDS, NOTHING)
        assert (sized.micro_batch, sized.accumulation, sized.local_steps, sized.seconds) == (32, 1, 10, None)
        assert "no speed is known" in sized.reasons["local_steps"]


# --- the batch -------------------------------------------------------------------------------------------------------


@given(
    micro_batch=st.integers(1, 512),
    accumulation=st.integers(1, 64),
    fastest=st.integers(1, 4096),
    fits=st.none() | st.integers(1, 4096),
)
def test_a_cut_keeps_the_batch_and_the_memory(
    micro_batch: int, accumulation: int, fastest: int, fits: int | None
) -> None:
    bounds = Bounds(micro_batch, accumulation, 10, 1, 100)
    fastest = min(fastest, fits or fastest)
    cut_micro, cut_times, reasons = cut(machine(10.0, fastest, fits), bounds)
    assert bounds.batch - cut_times < cut_micro * cut_times <= bounds.batch
    assert cut_micro <= (fits or bounds.batch)
    assert set(reasons) == {"micro_batch", "accumulation"}


@pytest.mark.parametrize(
    ("fastest", "fits", "expected", "reason"),
    [
        (64, None, (64, 2), "fastest from 64"),
        (256, None, (128, 1), "fastest from 256"),
        (2, None, (32, 4), "it fits"),
        (16, 16, (16, 8), "memory takes 16"),
        (3, 3, (2, 43), "memory takes 3"),
        (64, 64, (64, 2), "memory takes 64"),
        (8, 64, (32, 4), "it fits"),
    ],
)
def test_the_batch_is_cut_by_memory_and_speed(
    fastest: int, fits: int | None, expected: tuple[int, int], reason: str
) -> None:
    micro_batch, accumulation, reasons = cut(machine(10.0, fastest, fits), Bounds(32, 4, 10, 1, 100))
    assert (micro_batch, accumulation) == expected
    assert reason in reasons["micro_batch"]


# --- the target ------------------------------------------------------------------------------------------------------


def test_an_automatic_target_is_the_median_machines_usual_work() -> None:
    clients = [Client(machine(speed)) for speed in (32.0, 320.0, 3200.0)]
    found = auto_target(clients, BOUNDS, NOTHING)
    assert found is not None and found[0] == pytest.approx(1.0) and "median" in found[1]
    orders = plan({str(n): one for n, one in enumerate(clients)}, None, BOUNDS, NOTHING)
    assert [orders[str(n)].local_steps for n in range(3)] == [1, 10, 40]


def test_an_automatic_target_keeps_communication_under_a_tenth() -> None:
    clients = [Client(machine(320.0, up=1e6)), Client(machine(320.0, up=2e5))]
    found = auto_target(clients, BOUNDS, Transfer(bytes_up=10**6))
    assert found is not None and found[0] == pytest.approx(50.0) and "a tenth" in found[1]


def test_an_automatic_target_is_not_longer_than_the_loss_allows() -> None:
    bounds = Bounds(32, 1, 10, 1, 40)
    clients = [Client(machine(320.0, up=1e3)), Client(machine(320.0, up=1e9)), Client(machine(320.0, up=1e9))]
    found = auto_target(clients, bounds, Transfer(bytes_up=10**6))
    assert found is not None and found[0] == pytest.approx(4.001) and "loss" in found[1]


@given(
    st.lists(st.tuples(SPEEDS, st.none() | st.floats(1, 1e9)), min_size=1, max_size=8),
    st.integers(0, 10**9),
    st.integers(1, 500),
)
def test_an_automatic_target_keeps_its_promises(
    machines: list[tuple[float, float | None]], bytes_up: int, more: int
) -> None:
    bounds = Bounds(32, 1, 10, 1, 10 + more)
    clients = [Client(machine(speed, up=up)) for speed, up in machines]
    transfer = Transfer(bytes_up)
    found = auto_target(clients, bounds, transfer)
    assert found is not None and found[0] > 0
    if "loss" not in found[1]:
        assert all(bytes_up / up <= found[0] * 0.1 * (1 + 1e-9) for _, up in machines if up)


def test_without_any_speed_there_is_no_automatic_target() -> None:
    assert auto_target([Client()], BOUNDS, NOTHING) is None
    assert plan({"c": Client()}, None, BOUNDS, NOTHING)["c"].local_steps == 10
