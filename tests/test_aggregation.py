"""Reduction of shards and outer optimisers: identities, independence of order, and the committed vectors."""

import json
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest_fed import codecs
from ravnest_fed.aggregation import outer
from ravnest_fed.aggregation.fixed_point import OutOfRange
from ravnest_fed.aggregation.reduce import ShardAccumulator, check_shard, reduce_shard
from ravnest_fed.aggregation.weighting import Weight
from ravnest_fed.codecs.base import SLICE
from ravnest_fed.codecs.counters import decode_counters, encode_counters
from ravnest_fed.errors import LedgerError, LocalProtocolError, PayloadError, UsageError

VECTORS = Path(__file__).parent / "vectors"
MAKE = runpy.run_path(str(VECTORS / "make.py"))
ADAPTIVE = tuple(outer.ADAPTIVE)
COUNT = SLICE + 4096
FP32, INT8 = codecs.get("fp32"), codecs.get("int8")
WEIGHTS = {bytes([i]): Weight(100 * i, 70 * i + 1000) for i in range(6)}


def noise(seed: int, count: int = COUNT) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def payloads(kind: str) -> dict[bytes, bytes]:
    if kind == "counters":
        return {key: encode_counters(np.arange(COUNT) % (7 + key[0])) for key in WEIGHTS}
    codec = FP32 if kind == "buffers" else INT8
    return {key: codec.encode(noise(key[0])) for key in WEIGHTS}


PAYLOADS = {kind: payloads(kind) for kind in ("parameters", "buffers", "counters")}


def reduced(kind: str, chosen: dict[bytes, Weight]) -> bytes:
    total = sum(weight.share for weight in chosen.values())
    return reduce_shard(kind, COUNT, chosen, total, PAYLOADS[kind].__getitem__, 24, 8, INT8, INT8)


@pytest.mark.parametrize("kind", PAYLOADS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_history_of_arrivals_ends_in_the_same_bytes(kind: str, data: st.DataObject) -> None:
    sums = ShardAccumulator(kind, COUNT, 24, 8, INT8, INT8)
    for key in data.draw(st.permutations(sorted(WEIGHTS)))[: data.draw(st.integers(0, 6))]:
        sums.add(key, PAYLOADS[kind][key], data.draw(st.sampled_from([WEIGHTS[key], Weight(1, 2)])))
    for key in data.draw(st.sets(st.sampled_from(sorted(sums.held)))) if sums.held else ():
        sums.remove(key, PAYLOADS[kind][key])
    names = data.draw(st.sets(st.sampled_from(sorted(WEIGHTS)), min_size=1))
    chosen = {key: WEIGHTS[key] for key in names}
    total = sum(weight.share for weight in chosen.values())
    assert sums.finish(chosen, total, PAYLOADS[kind].__getitem__) == reduced(kind, dict(sorted(chosen.items())))
    assert dict(sums.held) == chosen


def test_parameters_average_by_weight_over_shares() -> None:
    mean = INT8.decode(reduced("parameters", WEIGHTS), COUNT)
    total = sum(weight.share for weight in WEIGHTS.values())
    exact = sum(w.weight * INT8.decode(PAYLOADS["parameters"][k], COUNT).astype(np.float64) for k, w in WEIGHTS.items())
    assert np.abs(mean - exact / total).max() < np.abs(exact / total).max() / 250


def test_buffers_average_by_share_in_fp32() -> None:
    mean = FP32.decode(reduced("buffers", WEIGHTS), COUNT)
    total = sum(weight.share for weight in WEIGHTS.values())
    exact = sum(w.share * noise(key[0]).astype(np.float64) for key, w in WEIGHTS.items()) / total
    np.testing.assert_allclose(mean, exact, rtol=2e-7, atol=1e-10)


def test_counters_take_the_greatest() -> None:
    assert decode_counters(reduced("counters", WEIGHTS), COUNT).tolist() == [
        max(i % (7 + key[0]) for key in WEIGHTS) for i in range(COUNT)
    ]


def test_one_contribution_comes_back_to_the_fixed_point_s_step() -> None:
    values = noise(9)
    payload = FP32.encode(values)
    mean = reduce_shard("parameters", COUNT, {b"c": Weight(77, 77)}, 77, lambda _: payload, 30, 1, FP32, FP32)
    error = np.abs(FP32.decode(mean, COUNT).astype(np.float64) - values)
    assert (error <= np.spacing(np.abs(values)) + 2.0**-30).all()


def test_a_contribution_that_fails_leaves_nothing_behind() -> None:
    sums = ShardAccumulator("parameters", COUNT, 24, 8, FP32, FP32)
    sums.add(b"good", FP32.encode(noise(1)), Weight(5, 5))
    far = noise(2)
    far[-1] = 2.0**30
    with pytest.raises(OutOfRange):
        sums.add(b"far", FP32.encode(far), Weight(5, 5))
    damaged = bytearray(FP32.encode(noise(3)))
    damaged[-4:] = np.float32([np.nan]).tobytes()
    with pytest.raises(PayloadError):
        sums.add(b"damaged", damaged, Weight(5, 5))
    with pytest.raises(PayloadError):
        sums.add(b"short", bytes(damaged[:-1]), Weight(5, 5))
    assert set(sums.held) == {b"good"}
    mean = FP32.decode(sums.finish({b"good": Weight(5, 5)}, 5, {}.__getitem__), COUNT)
    assert np.abs(mean - noise(1)).max() < 2.0**-23


def test_a_payload_that_went_bad_clears_the_sums() -> None:
    sums = ShardAccumulator("parameters", COUNT, 24, 8, FP32, FP32)
    sums.add(b"a", FP32.encode(noise(1)), Weight(5, 5))
    with pytest.raises(PayloadError):
        sums.remove(b"a", FP32.encode(noise(1))[:-1])
    assert not sums.held
    with pytest.raises(LocalProtocolError):
        sums.finish({}, 0, {}.__getitem__)


def test_a_surplus_contribution_whose_payload_is_gone_does_not_stop_the_round() -> None:
    def read(key: bytes) -> bytes:
        if key == b"\x05":
            raise LedgerError("this payload is gone")
        return PAYLOADS["parameters"][key]

    sums = ShardAccumulator("parameters", COUNT, 24, 8, INT8, INT8)
    for key, weight in WEIGHTS.items():
        sums.add(key, PAYLOADS["parameters"][key], weight)
    chosen = {key: weight for key, weight in WEIGHTS.items() if key != b"\x05"}
    total = sum(weight.share for weight in chosen.values())
    assert sums.finish(chosen, total, read) == reduced("parameters", chosen)


def test_check_shard_refuses_what_cannot_be_summed() -> None:
    for kind, kept in PAYLOADS.items():
        check_shard(kind, kept[b"\x00"], COUNT, INT8, 8)
        with pytest.raises(PayloadError):
            check_shard(kind, kept[b"\x00"][:-1], COUNT, INT8, 8)
    with pytest.raises(OutOfRange):
        check_shard("buffers", FP32.encode(np.float32([1e30])), 1, INT8, 8)


def test_momentum_zero_and_rate_one_equal_fedavg_bit_for_bit() -> None:
    plain = noise(1)
    expected = plain - noise(2)
    for nesterov in (False, True):
        heavy, velocity = noise(1), np.zeros(COUNT, np.float32)
        plain = noise(1)
        outer.get("fedavg", 1.0).step(plain, noise(2))
        outer.get("fedavgm", 1.0, 0.0, nesterov).step(heavy, noise(2), (velocity,))
        assert plain.tobytes() == heavy.tobytes() == expected.tobytes()


@pytest.mark.parametrize("nesterov", [False, True])
def test_fedavgm_follows_torch_s_sgd(nesterov: bool) -> None:
    torch = pytest.importorskip("torch")
    parameters, velocity = noise(0, 500), np.zeros(500, np.float32)
    theirs = torch.nn.Parameter(torch.from_numpy(parameters.copy()))
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=nesterov)
    for seed in (1, 2, 3):
        update = noise(seed, 500)
        outer.get("fedavgm", 0.7, 0.9, nesterov).step(parameters, update, (velocity,))
        theirs.grad = torch.from_numpy(update)
        sgd.step()
    np.testing.assert_allclose(parameters, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


def adapted(name: str, updates: list[np.ndarray], rate: float, momentum: float, beta2: float) -> np.ndarray:
    """Parameters from noise(0) on, after these updates."""
    optimizer = outer.get(name, rate, momentum, beta2=beta2)
    parameters = noise(0, updates[0].size)
    state = tuple(np.zeros(parameters.size, np.float32) for _ in optimizer.state_names())
    scalars: tuple[np.float32, ...] = ()
    for update in updates:
        scalars = optimizer.scalars(scalars)
        optimizer.step(parameters, update, state, scalars)
    return parameters


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedadam_follows_torch_s_adam_in_float64(momentum: float) -> None:
    torch = pytest.importorskip("torch")
    updates = [noise(seed, 500) for seed in range(1, 41)]
    theirs = torch.nn.Parameter(torch.from_numpy(noise(0, 500)).double())
    adam = torch.optim.Adam([theirs], lr=0.02, betas=(momentum, 0.95), eps=1e-3)
    for update in updates:
        theirs.grad = torch.from_numpy(update).double()
        adam.step()
    ours = adapted("fedadam", updates, 0.02, momentum, 0.95)
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", ["fedyogi", "fedadagrad"])
def test_yogi_and_adagrad_follow_their_papers_in_float64(name: str) -> None:
    updates = [noise(seed, 500) * np.float32(0.5 ** (seed % 5)) for seed in range(1, 41)]
    expected, first, second = noise(0, 500).astype(np.float64), np.zeros(500), np.zeros(500)
    for number, update in enumerate(updates, 1):
        wide = update.astype(np.float64)
        first = 0.9 * first + 0.1 * wide
        if name == "fedyogi":
            second = second - 0.05 * wide**2 * np.sign(second - wide**2)
            freed = second / (1 - 0.95**number)
        else:
            freed = second = second + wide**2
        expected -= 0.02 * first / (1 - 0.9**number) / (np.sqrt(freed) + 1e-3)
    np.testing.assert_allclose(adapted(name, updates, 0.02, 0.9, 0.95), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_the_first_adaptive_round_moves_each_parameter_by_the_rate_and_an_empty_one_by_nothing(name: str) -> None:
    update = np.float32([3.0, -0.5, 0.0, 2.0**63, -(2.0**63)])
    moved = noise(0, 5) - adapted(name, [update], 0.01, 0.9, 0.99)
    np.testing.assert_allclose(moved, 0.01 * np.sign(update), rtol=0.003, atol=0)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_moments_stay_finite_for_the_greatest_deltas(name: str) -> None:
    updates = [np.full(300, sign * 2.0**64, np.float32) for sign in (1, -1, 1, 1)] + [noise(1, 300)] * 2
    assert np.isfinite(adapted(name, updates, 0.01, 0.9, 0.5)).all()


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", *ADAPTIVE])
def test_any_cut_into_slices_gives_the_same_bits(name: str) -> None:
    optimizer = outer.get(name, 0.7, 0.9, True)
    scalars: tuple[np.float32, ...] = ()
    whole, cut = noise(1), noise(1)
    states = [tuple(np.zeros(COUNT, np.float32) for _ in optimizer.state_names()) for _ in range(2)]
    for seed in (2, 3):
        scalars = optimizer.scalars(scalars)
        optimizer.step(whole, noise(seed), states[0], scalars)
        for edge in (slice(0, 100), slice(100, None)):
            optimizer.step(cut[edge], noise(seed)[edge], tuple(vector[edge] for vector in states[1]), scalars)
    assert whole.tobytes() == cut.tobytes()
    assert [v.tobytes() for v in states[0]] == [v.tobytes() for v in states[1]]


def test_buffers_follow_the_mean_within_their_minimum() -> None:
    values = np.float32([1.0, 1.0, 0.5])
    outer.fold_buffers(values, np.float32([0.25, 3.0, 3.0]), np.float32([0.0, 0.0, -np.inf]))
    assert values.tolist() == [0.75, 0.0, -2.5]
    most = np.finfo(np.float32).max
    with pytest.raises(PayloadError):
        outer.fold_buffers(np.float32([most]), np.float32([-most]), np.float32([0.0]))


def test_counters_grow_and_do_not_overflow() -> None:
    values = np.array([5, 2**63 - 10])
    outer.fold_counters(values, np.array([3, 9]))
    assert values.tolist() == [8, 2**63 - 1]
    with pytest.raises(PayloadError):
        outer.fold_counters(values, np.array([0, 1]))
    assert values.tolist() == [8, 2**63 - 1]


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(UsageError, match="fedsgdx"):
        outer.get("fedsgdx", 1.0)


def test_committed_vectors() -> None:
    assert MAKE["folding_vectors"]() == json.loads((VECTORS / "folding.json").read_text())


@contextmanager
def flushing_processor() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert np.float32(2.0**-100) * np.float32([2.0**-40])[0] == 0.0
        yield
    finally:
        torch.set_flush_denormal(False)


def test_vectors_hold_while_the_processor_flushes_subnormals() -> None:
    with flushing_processor():
        folded = MAKE["folding_vectors"]()
    assert folded == json.loads((VECTORS / "folding.json").read_text())
