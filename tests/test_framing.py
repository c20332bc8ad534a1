"""LZ4 frames: round trip, bounds, damage."""

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest_fed.errors import PayloadError
from ravnest_fed.framing import pack, unpack


@given(st.binary(max_size=4096))
def test_a_frame_gives_back_its_content_and_costs_five_bytes_at_the_most(content: bytes) -> None:
    frame = pack(content)
    assert unpack(frame, len(content)) == content
    assert len(frame) <= len(content) + 5


def test_repetition_shrinks() -> None:
    assert len(pack(b"ravnest" * 1000)) < 200


def test_a_declared_length_beyond_the_bound_is_refused_before_anything_is_expanded() -> None:
    bomb = struct.pack("<BI", 1, 2**32 - 1) + b"\x00" * 64
    with pytest.raises(PayloadError, match="bound is 1000"):
        unpack(bomb, 1000)


@given(st.binary(max_size=64), st.data())
def test_damage_raises_payload_error_or_gives_other_bytes_within_the_bound(content: bytes, data: st.DataObject) -> None:
    frame = bytearray(pack(content))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut])):
        with contextlib.suppress(PayloadError):
            assert len(unpack(damaged, 4096)) <= 4096
