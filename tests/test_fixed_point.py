"""Exact sums, norms and weights against plain integers and fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest_fed.aggregation.fixed_point import (
    MAX_SCALE_BITS,
    MAX_WEIGHT,
    MIN_SCALE_BITS,
    Accumulator,
    OutOfRange,
    SplitAccumulator,
    choose_scale_bits,
    quantise,
    value_bits,
)
from ravnest_fed.aggregation.norms import clip_bound, combine, square_sum
from ravnest_fed.aggregation.weighting import Weight, weigh
from ravnest_fed.codecs.base import SLICE
from ravnest_fed.errors import LocalProtocolError, PayloadError

small = st.floats(-4.0, 4.0, width=32)
any_finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


@given(st.lists(small, max_size=20), st.integers(0, 40))
def test_quantise_rounds_to_nearest_even(values: list[float], scale_bits: int) -> None:
    assert quantise(np.float32(values), scale_bits).tolist() == [round(Fraction(v) * 2**scale_bits) for v in values]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 16.0, -16.0])
def test_values_past_the_reach_are_refused_before_the_cast(bad: float) -> None:
    sums = Accumulator(3, 26, 30)
    with pytest.raises(OutOfRange):
        sums.add(np.float32([1.0, bad, 2.0]), 1)
    assert sums.sums(0, 3).tolist() == [0, 0, 0]
    sums.add(np.float32([1.0, np.nextafter(np.float32(16), np.float32(0)), 2.0]), 1)


@given(
    st.lists(st.tuples(st.lists(small, min_size=3, max_size=3), st.integers(0, MAX_WEIGHT)), min_size=1, max_size=8),
    st.integers(1, 30),
)
def test_mean_is_the_exact_sum_rounded_in_the_documented_steps(
    contributions: list[tuple[list[float], int]], scale_bits: int
) -> None:
    sums = Accumulator(3, scale_bits, value_bits(1024))
    for values, weight in contributions:
        sums.add(np.float32(values), weight)
    total = max(1, sum(weight for _, weight in contributions))
    exact = [sum(w * round(Fraction(v[i]) * 2**scale_bits) for v, w in contributions) for i in range(3)]
    expected = np.float32([float(value) / total / 2.0**scale_bits for value in exact])
    assert sums.mean(total).tolist() == expected.tolist()


@given(st.permutations(range(6)), st.sets(st.integers(0, 5), max_size=4))
@settings(max_examples=40)
def test_order_does_not_matter_and_subtraction_is_exact(order: list[int], removed: set[int]) -> None:
    count = SLICE + 100
    values = [noise(count, seed) * np.float32(10.0 ** (seed - 3)) for seed in range(6)]
    for make in (lambda: Accumulator(count, 20, 34), lambda: SplitAccumulator(count, 34)):
        sums, plain = make(), make()
        for i in order:
            sums.add(values[i], 1000 + i)
        for i in removed:
            sums.subtract(values[i], 1000 + i)
        for i in sorted(set(range(6)) - removed):
            plain.add(values[i][:SLICE], 1000 + i)
            plain.add(values[i][SLICE:], 1000 + i, SLICE)
        assert sums.mean(7).tobytes() == plain.mean(7).tobytes()


@pytest.mark.parametrize("weight", [1, 3, 255, 65535, 65536])
def test_weighing_is_exact_on_both_sides_of_what_float64_holds(weight: int) -> None:
    values = np.float32([2.0**22, -(2.0**22) - 1, 2.0**21 + 0.5, 3.0, -1.0])
    for scale_bits in (8, 13, 14, 15, 16, 23):
        sums = Accumulator(values.size, scale_bits, 46)
        sums.add(values, weight)
        exact = [weight * int(Fraction(float(value)) * 2**scale_bits) for value in values]
        assert sums.sums(0, values.size).tolist() == [float(one) for one in exact]
        assert sums._sum.tolist() == exact


@pytest.mark.parametrize("contributions", [1, 3, 1024, 2**20])
def test_the_sum_cannot_overflow(contributions: int) -> None:
    most = 2 ** value_bits(contributions)
    assert contributions * MAX_WEIGHT * most < 2**63


@given(st.lists(st.floats(0, float(np.finfo(np.float32).max), width=32), max_size=5), st.integers(1, 2**20))
def test_the_chosen_scale_fits_what_was_recorded(maxima: list[float], contributions: int) -> None:
    scale_bits = choose_scale_bits(maxima, contributions)
    assert MIN_SCALE_BITS <= scale_bits <= MAX_SCALE_BITS
    greatest = max(maxima, default=0.0)
    # Raises if it does not fit.
    quantise(np.float32([greatest, -greatest]), scale_bits, value_bits(contributions))
    if 2.0**-100 < greatest < 2.0**60 and scale_bits < MAX_SCALE_BITS:
        assert (
            greatest * 2.0 ** (8 + scale_bits) < 2.0 ** value_bits(contributions) <= greatest * 2.0 ** (9 + scale_bits)
        )


def test_a_scale_is_chosen_without_sound_records() -> None:
    default = choose_scale_bits([], 1024)
    assert default == choose_scale_bits([0.0, -1.0, math.nan, math.inf], 1024) == choose_scale_bits([1.0], 1024)


def test_means_are_flushed_and_need_a_weight() -> None:
    sums = Accumulator(2, MAX_SCALE_BITS, 40)
    sums.add(np.float32([2.0**-120, -(2.0**-120)]), 1)
    assert sums.mean(2**10).view(np.uint32).tolist() == [0, 0]
    assert sums.mean(2).tolist() == [2.0**-121, -(2.0**-121)]
    with pytest.raises(LocalProtocolError):
        sums.mean(0)
    with pytest.raises(LocalProtocolError):
        sums.add(np.float32([1.0]), MAX_WEIGHT + 1)
    with pytest.raises(LocalProtocolError):
        sums.add(np.float32([1.0]), 1, 2)


@given(st.lists(st.floats(-(2.0**33), 2.0**33, width=32), min_size=1, max_size=9))
def test_split_sums_reach_far_and_step_finely(values: list[float]) -> None:
    sums = SplitAccumulator(len(values), 36)
    sums.add(np.float32(values), 5)
    error = np.abs(sums.mean(5).astype(np.float64) - np.float64(values))
    assert (error <= np.abs(values) * 2.0**-24 + 2.0**-37).all()


@given(st.lists(st.lists(any_finite, max_size=6), max_size=4))
def test_norm_is_close_and_independent_of_order(shards: list[list[float]]) -> None:
    parts = [square_sum(np.float32(shard)) for shard in shards]
    norm = combine(parts)
    exact = math.sqrt(sum(Fraction(value) ** 2 for shard in shards for value in shard))
    assert norm == pytest.approx(exact, rel=2.0**-18)
    assert norm == combine(parts[::-1])
    assert max((part.max_abs for part in parts), default=0.0) == max((abs(v) for s in shards for v in s), default=0.0)


def test_norm_is_correctly_rounded_where_nothing_is_lost() -> None:
    assert combine([square_sum(np.float32([3.0])), square_sum(np.float32([4.0]))]) == 5.0
    assert combine([square_sum(np.float32([1.0, 1.0]))]) == math.sqrt(2.0)
    long = noise(3 * SLICE + 5)
    assert combine([square_sum(long)]) == pytest.approx(float(np.linalg.norm(long.astype(np.float64))), rel=1e-8)
    with pytest.raises(PayloadError):
        square_sum(np.float32([np.inf]))


def test_clip_bound_is_the_median_times_the_factor() -> None:
    assert clip_bound([5.0, 1.0, 2.0], 4.0) == 8.0
    assert clip_bound([1.0, 2.0, 4.0, 100.0], 2.0) == 6.0
    assert clip_bound([1.0, 1.0], 4.0) == clip_bound([1.0] * 9, 0.0) == clip_bound([0.0] * 9, 4.0) == math.inf


def test_weights_by_hand() -> None:
    assert weigh(50, 100, "examples", 1.0, math.inf, 65536) == Weight(32768, 32768)
    assert weigh(1, 3, "examples", 1.0, 1.0, 65536) == Weight(21846, 21846)
    assert weigh(100, 100, "examples", 4.0, 1.0, 65536) == Weight(16384, 65536)
    assert weigh(100, 100, "examples", 3.0, 1.0, 100) == Weight(33, 100)
    assert weigh(1, 10**9, "examples", 2.0, 1.0, 65536) == Weight(0, 1)
    assert weigh(7, 100, "equal", 1.0, math.inf, 65536) == Weight(65536, 65536)
    assert weigh(100, 100, "examples", math.nan, 1.0, 65536) == Weight(0, 65536)


@given(
    st.integers(-(2**60), 2**60),
    st.integers(0, 2**50),
    st.sampled_from(["examples", "equal"]),
    st.floats(),
    st.floats(0, allow_nan=False),
    st.integers(1, MAX_WEIGHT),
)
def test_weights_stay_in_bounds_whatever_is_claimed(
    n: int, most: int, mode: str, norm: float, bound: float, cap: int
) -> None:
    weight, share = weigh(n, most, mode, norm, bound, cap)
    assert 0 <= weight <= share <= cap and share >= 1
