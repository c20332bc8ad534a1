"""Codecs: bounds of the error, layout, damage, and the committed vectors."""

import json
import runpy
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest_fed import codecs
from ravnest_fed.codecs import base
from ravnest_fed.codecs.counters import MAX_INCREMENT, counters_size, decode_counters, encode_counters
from ravnest_fed.codecs.float_bits import flush_tiny, greatest_magnitude
from ravnest_fed.errors import LocalProtocolError, PayloadError, RavnestError, UsageError

VECTORS = Path(__file__).parent / "vectors"
TINY = np.float32(2.0**-126)
MOST = np.finfo(np.float32).max

every_codec = pytest.mark.parametrize("name", codecs.names())
finite_vectors = st.lists(
    st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.sampled_from([0.0, -0.0, 1e-45, float(TINY), float(MOST), -float(MOST), 65504.0, 65520.0]),
    ),
    max_size=600,
).map(lambda values: np.array(values, np.float32))


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def expected_error(name: str, values: np.ndarray) -> np.ndarray:
    exact = values.astype(np.float64)
    if name == "fp32":
        return np.full(values.size, float(TINY))
    if name == "fp16":
        return np.maximum(np.maximum(np.abs(exact) * 2.0**-11, 2.0**-25), np.abs(exact) - 65504)
    block, most = {"int8": (256, 127), "int4": (64, 7), "sign": (512, 1)}.get(name, (4096, 1))
    greatest = np.array([np.abs(exact[i : i + block]).max() for i in range(0, values.size, block)])
    if name == "sign":
        mean = np.array([np.abs(exact[i : i + block]).mean() for i in range(0, values.size, block)])
        return np.abs(exact) + np.repeat(mean, block)[: values.size] * 1.004 + float(TINY)
    # Half a step; a scale in bfloat16 adds up to 1/512 of it to each code. A sparse codec drops or rounds to a level.
    step = {"int8": 0.5001, "int4": 0.514}.get(name, 1.004)
    return np.repeat(greatest, block)[: values.size] / most * step + (most + 0.5) * float(TINY)


@every_codec
@given(values=finite_vectors)
def test_round_trip_stays_within_the_codec_s_error(name: str, values: np.ndarray) -> None:
    codec = codecs.get(name)
    payload = codec.encode(values)
    assert len(payload) == codec.encoded_size(values.size)
    codec.check(payload, values.size)
    decoded = codec.decode(payload, values.size)
    assert decoded.dtype == np.float32
    error = np.abs(decoded.astype(np.float64) - values.astype(np.float64))
    assert (error <= expected_error(name, values)).all()


@every_codec
@given(values=finite_vectors)
def test_decoded_values_are_finite_and_never_subnormal_nor_minus_zero(name: str, values: np.ndarray) -> None:
    decoded = codecs.get(name).decode(codecs.get(name).encode(values), values.size)
    assert np.isfinite(decoded).all()
    assert ((decoded == 0) | (np.abs(decoded) > TINY)).all()
    assert not np.signbit(decoded[decoded == 0]).any()


@every_codec
def test_encoding_what_was_decoded_changes_nothing(name: str) -> None:
    codec = codecs.get(name)
    once = codec.decode(codec.encode(noise(5000)), 5000)
    assert np.array_equal(codec.decode(codec.encode(once), 5000), once)


@every_codec
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 4096, base.SLICE, base.SLICE + 4097])
def test_ranges_decode_to_the_same_bits_as_the_whole(name: str, count: int) -> None:
    codec = codecs.get(name)
    payload = codec.encode(noise(count))
    whole = codec.decode(payload, count)
    parts = [codec.decode_range(payload, count, a, min(a + 8192, count)) for a in range(0, count, 8192)]
    assert np.array_equal(np.concatenate([np.empty(0, np.float32), *parts]), whole)
    out = np.empty(count, np.float32)
    codec.decode_into(memoryview(payload), count, out)
    assert np.array_equal(out, whole)


def test_int8_layout_by_hand() -> None:
    values = np.concatenate([np.full(256, 2.54, np.float32), np.float32([-1.27, 0.004, 0.0])])
    payload = codecs.get("int8").encode(values)
    scales = struct.unpack_from("<2f", payload, 8)
    assert payload[:8] == b"RF\x03\x01" + struct.pack("<I", 259)
    assert scales == pytest.approx((0.02, 0.01))
    assert struct.unpack_from("256b3b", payload, 16) == (127,) * 256 + (-127, 0, 0)
    assert codecs.get("int8").decode(payload, 259)[256] == np.float32(-127) * np.float32(scales[1])


def test_fp16_saturates() -> None:
    codec = codecs.get("fp16")
    assert codec.decode(codec.encode(np.float32([1e6, -65519.0])), 2).tolist() == [65504.0, -65504.0]


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, base.SLICE + 3])
def test_values_that_are_not_finite_are_not_encoded(name: str, bad: float, place: int) -> None:
    values = noise(base.SLICE + 4)
    values[place] = bad
    with pytest.raises(PayloadError):
        codecs.get(name).encode(values)


def patched(name: str, count: int, offset: int, data: bytes) -> bytes:
    payload = bytearray(codecs.get(name).encode(noise(count)))
    payload[offset : offset + len(data)] = data
    return bytes(payload)


LAST = base.SLICE + 256 - 1
INT8_CODES = 8 + 4 * (LAST + 1) // 256
INT4_CODES = 8 + 2 * (LAST + 1) // 64
SIGNS = 8 + 2 * -(-(LAST + 1) // 512)


@pytest.mark.parametrize(
    ("name", "offset", "data"),
    [
        ("fp32", 8 + 4 * LAST, struct.pack("<f", np.inf)),
        ("fp32", 8, struct.pack("<f", np.nan)),
        ("fp16", 8 + 2 * LAST, struct.pack("<e", -np.inf)),
        ("fp16", 8, struct.pack("<e", np.nan)),
        ("int8", 8, struct.pack("<f", np.nan)),
        ("int8", INT8_CODES - 4, struct.pack("<f", np.inf)),
        ("int8", 8, struct.pack("<f", -1.0)),
        ("int8", 8, struct.pack("<f", -0.0)),
        ("int8", 8, struct.pack("<f", 1e-40)),
        ("int8", 8, struct.pack("<f", float(TINY))),
        ("int8", 8, struct.pack("<f", 2.7e36)),
        ("int8", INT8_CODES - 4, struct.pack("<f", 0.0)),
        ("int8", INT8_CODES + LAST, b"\x80"),
        ("int4", 8, b"\x80\x7f"),
        ("int4", INT4_CODES - 2, b"\xc0\x7f"),
        ("int4", 8, b"\x80\xbf"),
        ("int4", 8, b"\x00\x80"),
        ("int4", 8, b"\x80\x00"),
        ("int4", 8, b"\x01\x00"),
        ("int4", 8, b"\x13\x7e"),
        ("int4", INT4_CODES - 2, b"\x00\x00"),
        ("int4", INT4_CODES + LAST // 2, b"\x80"),
        ("int4", INT4_CODES, b"\x08"),
        ("sign", 8, b"\x80\x7f"),
        ("sign", SIGNS - 2, b"\xc0\x7f"),
        ("sign", 8, b"\x80\xbf"),
        ("sign", 8, b"\x00\x80"),
        ("sign", 8, b"\x80\x00"),
        ("sign", SIGNS - 2, b"\x00\x00"),
        *((name, 0, b"RG") for name in codecs.names()),
        *((name, 2, b"\x09") for name in codecs.names()),
        *((name, 3, b"\x02") for name in codecs.names()),
        *((name, 4, b"\x00\x00\x00\x00") for name in codecs.names()),
    ],
)
def test_each_bound_is_checked(name: str, offset: int, data: bytes) -> None:
    codec, count = codecs.get(name), LAST + 1
    payload = patched(name, count, offset, data)
    with pytest.raises(PayloadError):
        codec.check(payload, count)
    with pytest.raises(PayloadError):
        codec.decode(payload, count)


def test_the_greatest_int8_scale_decodes_to_finite_values() -> None:
    codec = codecs.get("int8")
    decoded = codec.decode(codec.encode(np.float32([MOST, -MOST, 0])), 3)
    assert np.isfinite(decoded).all() and decoded[0] >= np.float32(3.4e38)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_greatest_scale_is_accepted(name: str) -> None:
    codec = codecs.get(name)
    values = np.full(256, MOST, np.float32)
    assert (codec.decode(codec.encode(values), 256) >= np.float32(3.37e38)).all()


@every_codec
@given(data=st.data())
@settings(max_examples=200)
def test_damaged_payloads_raise_payload_errors_only(name: str, data: st.DataObject) -> None:
    codec = codecs.get(name)
    count = data.draw(st.one_of(st.integers(0, 300), st.sampled_from([4095, 8192, 9001])))
    payload = codec.encode(noise(count))
    kind = data.draw(st.sampled_from(["cut", "grown", "flipped", "random"]))
    if kind == "cut":
        payload = payload[: data.draw(st.integers(0, len(payload) - 1))]
    elif kind == "grown":
        payload += data.draw(st.binary(min_size=1, max_size=9))
    elif kind == "random":
        size = data.draw(st.sampled_from([0, 7, 8, len(payload)]))
        payload = (payload[:8] + data.draw(st.binary(min_size=size, max_size=size)))[:size]
    else:
        place = data.draw(st.integers(0, len(payload) - 1))
        flipped = bytearray(payload)
        flipped[place] ^= data.draw(st.integers(1, 255))
        payload = bytes(flipped)
    try:
        codec.check(payload, count)
    except PayloadError:
        with pytest.raises(PayloadError):
            codec.decode(payload, count)
    else:
        assert kind in ("flipped", "random")
        assert np.isfinite(codec.decode(payload, count)).all()


@every_codec
def test_a_payload_of_another_count_or_codec_is_refused(name: str) -> None:
    payload = codecs.get(name).encode(noise(512))
    for other in codecs.names():
        for count in (0, 511, 512, 2**40):
            if (other, count) != (name, 512):
                with pytest.raises(PayloadError):
                    codecs.get(other).decode(payload, count)


def test_misuse_is_told_from_damage() -> None:
    codec = codecs.get("fp32")
    payload = codec.encode(noise(8192))
    for wrong in (np.zeros(4), np.zeros((2, 2), np.float32)):
        with pytest.raises(LocalProtocolError):
            codec.encode(wrong)
    for start, stop in ((1, 8192), (0, 5000), (4096, 0), (0, 12288)):
        with pytest.raises(LocalProtocolError):
            codec.decode_range(payload, 8192, start, stop)
    with pytest.raises(LocalProtocolError):
        codec.decode_into(payload, 8192, np.empty(8191, np.float32))
    with pytest.raises(UsageError):
        codecs.get("int5")


@given(st.lists(st.integers(0, MAX_INCREMENT), max_size=50))
def test_counters_round_trip(increments: list[int]) -> None:
    payload = encode_counters(np.array(increments, np.int64))
    assert len(payload) == counters_size(len(increments))
    assert decode_counters(payload, len(increments)).tolist() == increments


@given(payload=st.binary(max_size=40), count=st.integers(0, 4), whole=st.booleans())
def test_damaged_counters_raise_payload_errors_only(payload: bytes, count: int, whole: bool) -> None:
    if whole:
        payload = encode_counters(np.zeros(count, np.int64))[:8] + payload
    try:
        increments = decode_counters(payload, count)
    except RavnestError as error:
        assert isinstance(error, PayloadError)
    else:
        assert increments.size == count and (increments >= 0).all() and (increments <= MAX_INCREMENT).all()


@pytest.mark.parametrize("bad", [-1, MAX_INCREMENT + 1])
def test_counters_out_of_bounds_are_refused_at_both_ends(bad: int) -> None:
    with pytest.raises(PayloadError):
        encode_counters(np.array([0, bad]))
    with pytest.raises(PayloadError):
        decode_counters(encode_counters(np.array([0, 0]))[:16] + struct.pack("<q", bad), 2)
    with pytest.raises(PayloadError):
        decode_counters(encode_counters(np.array([11])), 1, most=10)


def test_flushing_takes_the_least_normal_too() -> None:
    values = np.float32([-0.0, 1e-40, TINY, -TINY, np.nextafter(TINY, np.float32(1)), -1.0])
    flush_tiny(values)
    assert values.view(np.uint32)[:4].tolist() == [0, 0, 0, 0]
    assert (np.abs(values[4:]) > TINY).all()
    assert greatest_magnitude(values) == 1.0 and greatest_magnitude(values[:0]) == 0.0


def test_committed_vectors() -> None:
    made = runpy.run_path(str(VECTORS / "make.py"))["codec_vectors"]()
    assert made == json.loads((VECTORS / "codecs.json").read_text())
