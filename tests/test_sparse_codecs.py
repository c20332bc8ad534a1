"""int4, sign and top-k: sizes, what is chosen, the layout read by hand, and every way a payload can be unsound."""

import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest_fed import codecs
from ravnest_fed.aggregation.fixed_point import Accumulator
from ravnest_fed.codecs import base
from ravnest_fed.codecs.float_bits import from_upper_halves, upper_halves
from ravnest_fed.errors import LocalProtocolError, PayloadError

BLOCK = 4096
KEPT = {"topk128": 128, "topk64": 64, "topk40": 40}
LOW_BITS = {"topk128": 5, "topk64": 6, "topk40": 6}
RECORD = {"topk128": 148, "topk64": 84, "topk40": 57}
SMALL = ["int4", "sign", *KEPT]

every_topk = pytest.mark.parametrize("name", KEPT)
every_small = pytest.mark.parametrize("name", SMALL)
# Few distinct magnitudes, many zeros: ties, blocks with fewer than k values, and blocks with none.
sparse_vectors = st.builds(
    lambda count, seed, kinds, density: (
        np.random.default_rng(seed).integers(1, kinds + 1, count)
        * np.random.default_rng(seed + 1).choice([-1, 1], count)
        * (np.random.default_rng(seed + 2).random(count) < density)
    ).astype(np.float32),
    st.integers(0, 9000),
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 7, 10**6]),
    st.sampled_from([0.0, 0.001, 0.02, 1.0]),
)


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def bits(data: bytes) -> list[int]:
    """The bits of `data`, each byte's lowest first."""
    return [byte >> place & 1 for byte in data for place in range(8)]


def read_record(name: str, record: bytes) -> dict[int, float]:
    """The values that a record keeps, by index: the layout of docs/wire-format.md, read bit by bit."""
    kept, low_bits = KEPT[name], LOW_BITS[name]
    small, large = (struct.unpack("<f", b"\0\0" + record[at : at + 2])[0] for at in (0, 2))
    rest = bits(record[4:])
    upper, rest = rest[: kept + (BLOCK >> low_bits)], rest[kept + (BLOCK >> low_bits) :]
    lower, rest = rest[: kept * low_bits], rest[kept * low_bits :]
    signs, larges = rest[:kept], rest[kept:]
    assert len(larges) == kept
    found, rank = {}, 0
    for position, bit in enumerate(upper):
        if bit:
            low = sum(lower[rank * low_bits + place] << place for place in range(low_bits))
            index = (position - rank) << low_bits | low
            found[index] = (-1.0 if signs[rank] else 1.0) * (large if larges[rank] else small)
            rank += 1
    return found


@pytest.mark.parametrize(
    ("name", "size"),
    [("int4", 0.5313), ("sign", 0.12891), ("topk128", 0.03614), ("topk64", 0.02051), ("topk40", 0.01392)],
)
def test_bytes_a_parameter(name: str, size: float) -> None:
    codec = codecs.get(name)
    assert codec.encoded_size(2**20) / 2**20 == pytest.approx(size, abs=5e-5)
    assert len(codec.encode(noise(2**18))) == codec.encoded_size(2**18)


@given(values=st.lists(st.floats(0, width=32, allow_infinity=False), max_size=20))
def test_bfloat16_is_the_nearest_that_is_finite(values: list[float]) -> None:
    exact = np.array(values, np.float32)
    halves = upper_halves(exact)
    near = from_upper_halves(halves).astype(np.float64)
    assert np.isfinite(near).all()
    for step in (-1, 1):
        other = halves.astype(np.int64) + step
        sound = (other >= 0) & (other <= 0x7F7F)
        beside = from_upper_halves(np.where(sound, other, halves).astype(np.uint16)).astype(np.float64)
        assert (np.abs(near - exact) <= np.abs(beside - exact)).all()


@every_small
@given(values=sparse_vectors)
@settings(max_examples=60)
def test_a_round_trip_is_sound_and_encodes_to_the_same_bytes_again(name: str, values: np.ndarray) -> None:
    codec = codecs.get(name)
    payload = codec.encode(values)
    assert payload == codec.encode(values.copy())
    assert len(payload) == codec.encoded_size(values.size)
    codec.check(payload, values.size)
    decoded = codec.decode(payload, values.size)
    assert np.isfinite(decoded).all()
    assert np.array_equal(codec.decode(codec.encode(decoded), values.size), decoded)
    edges = sorted({*range(0, values.size, BLOCK), values.size})
    for first in edges:
        for last in (edge for edge in edges if edge >= first):
            assert np.array_equal(codec.decode_range(payload, values.size, first, last), decoded[first:last])


@every_small
@pytest.mark.parametrize("count", [1, 7, 65, 4096, 4097, base.SLICE + 1])
def test_zeros_decode_to_zeros(name: str, count: int) -> None:
    codec = codecs.get(name)
    payload = codec.encode(np.zeros(count, np.float32))
    assert not any(payload[8:])
    assert codec.decode(payload, count).view(np.uint32).tolist() == [0] * count
    tiny = np.full(count, 2.0**-127, np.float32)
    assert not codec.decode(codec.encode(-tiny), count).any()


# --- int4 and sign -----------------------------------------------------------------------------------------------------


def test_int4_layout_by_hand() -> None:
    values = np.concatenate([np.full(64, 0.875, np.float32), np.float32([-7.0, 2.4, 0.5])])
    payload = codecs.get("int4").encode(values)
    assert payload[:8] == b"RF\x04\x01" + struct.pack("<I", 67)
    assert payload[8:12] == struct.pack("<f", 0.125)[2:] + struct.pack("<f", 1.0)[2:]
    assert payload[12:] == b"\x77" * 32 + b"\x29\x00"
    assert codecs.get("int4").decode(payload, 67)[62:].tolist() == [0.875, 0.875, -7.0, 2.0, 0.0]


def test_bits_after_an_odd_count_are_zero() -> None:
    payload = codecs.get("int4").encode(noise(67))
    for place in range(4, 8):
        damaged = payload[:-1] + bytes([payload[-1] | 1 << place])
        with pytest.raises(PayloadError):
            codecs.get("int4").decode(damaged, 67)
    payload = codecs.get("sign").encode(noise(67))
    for place in range(3, 8):
        with pytest.raises(PayloadError):
            codecs.get("sign").decode(payload[:-1] + bytes([payload[-1] | 1 << place]), 67)


def test_sign_layout_by_hand() -> None:
    values = np.concatenate([np.tile(np.float32([1.5, -0.5]), 256), np.float32([-3.0, 0.0, -6.0])])
    payload = codecs.get("sign").encode(values)
    assert payload[:8] == b"RF\x05\x01" + struct.pack("<I", 515)
    assert payload[8:12] == struct.pack("<f", 1.0)[2:] + struct.pack("<f", 3.0)[2:]
    assert payload[12:] == b"\xaa" * 64 + b"\x05"
    assert codecs.get("sign").decode(payload, 515)[510:].tolist() == [1.0, -1.0, -3.0, 3.0, -3.0]


# --- top-k --------------------------------------------------------------------------------------------------------------


@every_topk
@given(values=sparse_vectors)
@settings(max_examples=60)
def test_the_greatest_magnitudes_are_kept_ties_to_the_lower_index(name: str, values: np.ndarray) -> None:
    codec = codecs.get(name)
    decoded = codec.decode(codec.encode(values), values.size)
    for start in range(0, values.size, BLOCK):
        block, got = values[start : start + BLOCK], decoded[start : start + BLOCK]
        order = sorted(range(block.size), key=lambda i: (-abs(block[i]), i))
        chosen = sorted(i for i in order[: KEPT[name]] if block[i] != 0)
        assert np.flatnonzero(got).tolist() == chosen
        assert (np.sign(got[chosen]) == np.sign(block[chosen])).all()
        assert len(set(np.abs(got[chosen]).tolist())) <= 2


@every_topk
@pytest.mark.parametrize("count", [1, 100, 4096, 12288, base.SLICE + 5000])
def test_the_layout_is_the_documented_one(name: str, count: int) -> None:
    codec, size = codecs.get(name), RECORD[name]
    payload = codec.encode(noise(count))
    assert payload[:8] == b"RF" + bytes([codec.codec_id, 1]) + struct.pack("<I", count)
    by_hand = np.zeros(-(-count // BLOCK) * BLOCK, np.float32)
    for number in range(-(-count // BLOCK)):
        record = payload[8 + number * size : 8 + (number + 1) * size]
        for index, value in read_record(name, record).items():
            by_hand[number * BLOCK + index] = value
    assert np.array_equal(codec.decode(payload, count), by_hand[:count])


@every_topk
def test_two_levels_are_the_best_ones(name: str) -> None:
    values = np.zeros(BLOCK, np.float32)
    values[5:25] = np.linspace(1, 2, 20) * np.tile([1, -1], 10)
    values[100:104] = [8, -9, 10, 9]
    decoded = codecs.get(name).decode(codecs.get(name).encode(values), BLOCK)
    assert decoded[[5, 6, 24]].tolist() == [1.5, -1.5, -1.5]
    assert decoded[100:104].tolist() == [9, -9, 9, 9]


@every_topk
def test_the_parting_has_the_least_error_of_all(name: str) -> None:
    values = np.zeros(BLOCK, np.float32)
    values[: KEPT[name]] = np.random.default_rng(3).lognormal(0, 1, KEPT[name])
    decoded = codecs.get(name).decode(codecs.get(name).encode(values), BLOCK)
    ordered = np.sort(values[: KEPT[name]].astype(np.float64))
    errors = [
        sum(((part - part.mean()) ** 2).sum() for part in (ordered[:cut], ordered[cut:]))
        for cut in range(1, KEPT[name])
    ]
    assert ((decoded.astype(np.float64) - values) ** 2).sum() <= 1.001 * min(errors) + 1e-9


def _record(name: str) -> bytearray:
    """A full, sound record whose first two indices lie in one bucket."""
    values = noise(BLOCK)
    values[:2] = 50.0
    return bytearray(codecs.get(name).encode(values)[8:])


def _few(name: str) -> bytearray:
    """A record of three values, at 0, 1 and 4095."""
    values = np.zeros(BLOCK, np.float32)
    values[[0, 1, 4095]] = [1.0, -2.0, 3.0]
    return bytearray(codecs.get(name).encode(values)[8:])


def sections(name: str) -> tuple[int, int, int, int, int]:
    """Where upper, lower, signs and larges start in a record, and where it ends."""
    kept, low_bits = KEPT[name], LOW_BITS[name]
    upper = 4 + (kept + (BLOCK >> low_bits)) // 8
    signs = upper + kept * low_bits // 8
    return 4, upper, signs, signs + kept // 8, signs + 2 * (kept // 8)


def _levels(name: str, small: int, large: int) -> bytes:
    return struct.pack("<HH", small, large) + bytes(_record(name)[4:])


def _equal_indices(name: str) -> bytes:
    record, (_, lower, *_) = _record(name), sections(name)
    width = LOW_BITS[name]
    record[lower] &= 0xFF ^ ((1 << width) - 1) << width & 0xFF
    record[lower + 1] &= 0xFF ^ ((1 << width) - 1) << width >> 8
    return bytes(record)


def _one_more(name: str) -> bytes:
    record, (upper, lower, *_) = _record(name), sections(name)
    number = int.from_bytes(record[upper:lower], "little")
    free = next(place for place in range(KEPT[name]) if not number >> place & 1)
    record[upper:lower] = (number | 1 << free).to_bytes(lower - upper, "little")
    return bytes(record)


def _past_the_end(name: str) -> bytes:
    record, (upper, lower, *_) = _few(name), sections(name)
    number = int.from_bytes(record[upper:lower], "little")
    top = number.bit_length() - 1
    record[upper:lower] = (number ^ 1 << top | 1 << top + 1).to_bytes(lower - upper, "little")
    return bytes(record)


def _unused_bit(name: str, section: int) -> bytes:
    record, edges = _few(name), sections(name)
    record[edges[section + 1] - 1] |= 0x80
    return bytes(record)


def _no_values(name: str) -> bytes:
    return struct.pack("<HH", 0x3F80, 0x3F80) + bytes(RECORD[name] - 4)


UNSOUND: dict[str, Callable[[str], bytes]] = {
    "levels out of order": lambda name: _levels(name, 0x4000, 0x3F80),
    "small level zero": lambda name: _levels(name, 0, 0x3F80),
    "both levels zero": lambda name: _levels(name, 0, 0),
    "least normal level": lambda name: _levels(name, 0x0080, 0x3F80),
    "infinite level": lambda name: _levels(name, 0x3F80, 0x7F80),
    "level not a number": lambda name: _levels(name, 0x3F80, 0x7FC0),
    "negative level": lambda name: _levels(name, 0xBF80, 0x3F80),
    "equal indices": _equal_indices,
    "one index more": _one_more,
    "past the end": _past_the_end,
    "unused lower bits": lambda name: _unused_bit(name, 1),
    "unused sign": lambda name: _unused_bit(name, 2),
    "unused large": lambda name: _unused_bit(name, 3),
    "levels without values": _no_values,
}


@every_topk
@pytest.mark.parametrize("kind", UNSOUND)
@pytest.mark.parametrize("before", [0, 8])
def test_each_unsound_record_is_refused(name: str, kind: str, before: int) -> None:
    codec, count = codecs.get(name), (before + 1) * BLOCK
    payload = codec.encode(noise(count))[: 8 + before * RECORD[name]] + UNSOUND[kind](name)
    codec.check(payload[: -RECORD[name]] + bytes(_record(name)), count)
    with pytest.raises(PayloadError):
        codec.check(payload, count)
    with pytest.raises(PayloadError):
        codec.decode(payload, count)


@every_topk
def test_an_index_past_a_short_block_is_refused(name: str) -> None:
    codec = codecs.get(name)
    payload = codec.encode(noise(BLOCK))
    short = payload[:4] + struct.pack("<I", 4000) + payload[8:]
    assert codec.decode(payload, BLOCK)[4000:].any()
    with pytest.raises(PayloadError, match="out of range"):
        codec.decode(short, 4000)


@every_small
def test_every_truncation_and_extension_is_refused(name: str) -> None:
    codec = codecs.get(name)
    payload = codec.encode(noise(4099))
    for length in range(len(payload)):
        with pytest.raises(PayloadError):
            codec.check(payload[:length], 4099)
    for more in (b"\0", b"\0" * RECORD["topk128"]):
        with pytest.raises(PayloadError):
            codec.check(payload + more, 4099)


@every_small
@given(data=st.data())
@settings(max_examples=60)
def test_flipped_bits_are_refused_or_decode_to_finite_values(name: str, data: st.DataObject) -> None:
    codec, count = codecs.get(name), 4099
    payload = bytearray(codec.encode(noise(count)))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(8, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decoded = codec.decode(bytes(payload), count)
    except PayloadError:
        with pytest.raises(PayloadError):
            codec.check(bytes(payload), count)
    else:
        codec.check(bytes(payload), count)
        assert np.isfinite(decoded).all() and decoded.size == count
        assert not np.signbit(decoded[decoded == 0]).any()


@pytest.mark.parametrize("name", codecs.names())
@pytest.mark.parametrize("start", [0, 2 * BLOCK])
def test_entries_are_the_decoded_values_at_their_places(name: str, start: int) -> None:
    codec, count = codecs.get(name), 5 * BLOCK + 17
    payload = codec.encode(noise(count))
    places, values = codec.entries(payload, count, start, count)
    assert (places is None) == (name not in KEPT)
    found = np.zeros(count - start, np.float32)
    found[slice(None) if places is None else places] = values
    assert np.array_equal(found, codec.decode(payload, count)[start:])
    with pytest.raises(LocalProtocolError):
        codec.entries(payload, count, start + 1, count)


@every_topk
def test_sparse_sums_are_those_of_the_whole_vector(name: str) -> None:
    codec, count = codecs.get(name), 3 * BLOCK
    payload = codec.encode(noise(count))
    sparse, dense = Accumulator(count, 30, 36), Accumulator(count, 30, 36)
    places, values = codec.entries(payload, count, BLOCK, count)
    sparse.add(values, 777, BLOCK, places)
    dense.add(codec.decode_range(payload, count, BLOCK, count), 777, BLOCK)
    assert dense.sums(0, count).any() and np.array_equal(sparse.sums(0, count), dense.sums(0, count))
    sparse.subtract(values, 777, BLOCK, places)
    assert not sparse.sums(0, count).any()
    with pytest.raises(LocalProtocolError):
        sparse.add(values, 777, count, places)
