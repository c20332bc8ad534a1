"""A capability is bounded wherever it comes from, and its speeds are looked up by micro-batch."""

import math
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from ravnest_fed.capability import (
    MAX_DEVICES,
    MAX_REASON,
    MAX_REASONS,
    MAX_SPEEDS,
    Capability,
    Device,
    Speed,
    as_tables,
    clipped,
    from_tables,
)

SPEEDS = (Speed(1, 10.0), Speed(2, 15.0), Speed(8, 40.0))
FULL = Capability(
    device="cuda:0",
    devices=(Device("cuda", "NVIDIA GeForce RTX 4090", 24 * 2**30, 20 * 2**30, 3.0, "550.54"),),
    cores=16,
    memory_total=64 * 2**30,
    memory_free=50 * 2**30,
    battery=80.0,
    on_battery=True,
    speeds=SPEEDS,
    micro_batch=8,
    max_micro_batch=8,
    bandwidth_up=1e6,
    bandwidth_down=5e6,
    reasons={"micro_batch": "fastest of those tried"},
)


def test_it_survives_tables_and_the_wire() -> None:
    assert from_tables(as_tables(FULL)) == FULL
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(FULL), type=Capability) == FULL
    assert as_tables(FULL)["speeds"][2] == {"micro_batch": 8, "samples_per_second": 40.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "x" * 97),
        ("devices", [{"kind": "cpu", "name": "a"}] * (MAX_DEVICES + 1)),
        ("devices", [{"kind": "cpu", "name": "a", "utilisation": 101.0}]),
        ("devices", [{"kind": "cpu", "name": "a", "memory_total": -1}]),
        ("speeds", [{"micro_batch": 1, "samples_per_second": 1.0}] * (MAX_SPEEDS + 1)),
        ("speeds", [{"micro_batch": 0, "samples_per_second": 1.0}]),
        ("speeds", [{"micro_batch": 1, "samples_per_second": 0.0}]),
        ("speeds", [{"micro_batch": 1, "samples_per_second": math.nan}]),
        ("speeds", [{"micro_batch": 1, "samples_per_second": math.inf}]),
        ("cores", 0),
        ("memory_free", 2**61),
        ("battery", -1.0),
        ("micro_batch", 0),
        ("max_micro_batch", 2**21),
        ("bandwidth_up", -1.0),
        ("bandwidth_down", math.inf),
        ("reasons", {f"number {n}": "why" for n in range(MAX_REASONS + 1)}),
        ("reasons", {"micro_batch": "x" * (MAX_REASON + 1)}),
    ],
)
def test_what_is_out_of_bounds_does_not_decode(field: str, value: Any) -> None:
    tables = {**as_tables(FULL), field: value}
    with pytest.raises(ValueError):
        from_tables(tables)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(tables), type=Capability)


def test_a_later_version_may_say_more() -> None:
    assert from_tables({**as_tables(FULL), "quantum": True}) == FULL


def test_speed_is_that_of_the_nearest_micro_batch_at_or_below() -> None:
    assert [FULL.speed_at(size) for size in (1, 2, 3, 7, 8, 100)] == [10.0, 15.0, 15.0, 15.0, 40.0, 40.0]
    assert Capability(device="cpu", speeds=(Speed(32, 7.0),)).speed_at(4) == 7.0
    assert Capability(device="cpu", speeds=SPEEDS[::-1]).speed_at(2) == 15.0
    assert Capability(device="cpu").speed_at(4) is None


def test_texts_are_clipped_to_one_line() -> None:
    assert clipped("two\n  lines") == "two lines"
    assert len(clipped("x" * 1000)) == MAX_REASON


def test_brokers_can_read_one_without_torch() -> None:
    code = "import ravnest_fed.capability, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
