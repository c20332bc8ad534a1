"""How a probe climbs: where it goes on, where it ends and why, and which micro-batch it chooses."""

from collections.abc import Callable

from clients.ramp import Climbed, Ramp
from ravnest_fed.capability import MAX_MICRO_BATCH


def climbed(
    seconds_of: Callable[[int], float], budget: float = 10.0, least: int = 1, data: int = 2**30, memory: int = 2**30
) -> tuple[Climbed, float]:
    """The climb over steps that take `seconds_of` their examples, and how long it all took."""
    ramp, spent = Ramp(budget, least), 0.0
    while (size := ramp.next()) is not None:
        if size > memory:
            ramp.refused()
            continue
        examples = min(size, data)
        ramp.stepped(examples, seconds_of(examples))
        spent += seconds_of(examples)
    return ramp.result(), spent


def gpu(examples: int) -> float:
    """As long for one example as for 64, then linear: 6,400 samples/s at best."""
    return max(0.01, examples * 0.01 / 64)


def sizes(found: Climbed) -> list[int]:
    return [speed.micro_batch for speed in found.speeds]


def test_it_doubles_until_speed_flattens_and_chooses_the_smallest_of_the_fast_ones() -> None:
    found, spent = climbed(gpu)
    assert sizes(found) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert found.micro_batch == 64 and found.fits is None
    assert [speed.samples_per_second for speed in found.speeds[:3]] == [100.0, 200.0, 400.0]
    assert "6400" in found.chosen and "flattened" in found.ended
    assert spent < 5.0


def test_one_flat_doubling_does_not_end_it() -> None:
    rates = {1: 10.0, 2: 10.5, 4: 40.0, 8: 40.0, 16: 40.0}
    found, _ = climbed(lambda examples: examples / rates[examples])
    assert sizes(found) == [1, 2, 4, 8, 16] and found.micro_batch == 4


def test_the_recipes_own_micro_batch_is_measured_even_where_speed_is_flat() -> None:
    found, _ = climbed(lambda examples: examples / 1000, least=24)
    assert sizes(found) == [1, 2, 4, 8, 16, 32]


def test_memory_that_is_refused_is_the_bound() -> None:
    found, _ = climbed(gpu, memory=16)
    assert sizes(found) == [1, 2, 4, 8, 16]
    assert (found.micro_batch, found.fits) == (16, 16)
    assert found.ended == "32 at once does not fit into memory; 16 does"


def test_memory_that_holds_not_even_one_example_leaves_nothing_measured() -> None:
    found, _ = climbed(gpu, memory=0)
    assert found.speeds == () and found.micro_batch == 1 and found.fits is None
    assert found.ended == "1 at once does not fit into memory"


def test_data_that_is_smaller_than_a_micro_batch_is_measured_whole() -> None:
    found, _ = climbed(gpu, data=11)
    assert sizes(found) == [1, 2, 4, 8, 11] and found.micro_batch == 11
    assert found.ended == "the data gives no more than 11 at once"


def test_a_loader_keeps_its_own_batches() -> None:
    ramp = Ramp()
    while ramp.next() is not None:
        ramp.stepped(48, 0.05)
    found = ramp.result()
    assert sizes(found) == [48] and found.micro_batch == 48
    assert "own loader makes batches of 48" in found.ended


def test_it_ends_within_its_time_on_machines_of_any_speed() -> None:
    for slowness in (0.001, 0.1, 0.4, 1.0, 2.4):
        found, spent = climbed(lambda examples, each=slowness: examples * each, least=2**20)  # type: ignore[misc]
        assert spent <= 10.0 and found.speeds, slowness
        assert "not fit into the 10 s" in found.ended


def test_a_first_step_that_takes_all_the_time_is_the_measure() -> None:
    found, spent = climbed(lambda examples: 60.0 * examples)
    assert spent == 60.0 and sizes(found) == [1]
    assert found.speeds[0].samples_per_second == 1 / 60


def test_steps_without_duration_and_a_clock_that_steps_back_end_too() -> None:
    for seconds in (0.0, -5.0):
        found, _ = climbed(lambda examples, took=seconds: took)  # type: ignore[misc]
        assert found.speeds and "flattened" not in found.ended
        assert sizes(found)[-1] == MAX_MICRO_BATCH


def test_a_step_that_was_held_up_does_not_spoil_a_speed() -> None:
    ramp, taken = Ramp(), 0
    while ramp.next() == 1:
        ramp.stepped(1, 3.0 if taken == 4 else 0.02)
        taken += 1
    assert ramp.result().speeds[0].samples_per_second == 50.0


def test_memory_that_would_be_killed_for_is_foreseen() -> None:
    """100 MB at the start and 1 GB an example, on a machine with 40 GB."""
    ramp = Ramp(least=1024)
    while (size := ramp.next()) is not None:
        used = 10**8 + size * 10**9
        assert used < 40 * 10**9
        ramp.stepped(size, 0.01, peak=used, free=40 * 10**9 - used)
    found = ramp.result()
    assert (found.micro_batch, found.fits) == (16, 16)
    assert found.ended == "32 at once would take about 16 GB more of the 24 GB free"
