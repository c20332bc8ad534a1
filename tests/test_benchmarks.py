"""What the benchmarks measure with: kills, dropouts and slopes, without the runs themselves."""

import statistics
from pathlib import Path

import pytest

from benchmarks.churn import Sample, growth
from benchmarks.dropout import SHARE, taking_part
from benchmarks.failover import AFTER, strike_of
from ravnest_fed.recipe import load_recipe
from tests.tiny_federation import write_recipe
from tests.trained import Trained


def test_kills_fall_where_rounds_before_and_after_are_seen() -> None:
    strikes = [strike_of(seed, 8) for seed in range(60)]
    assert strikes == [strike_of(seed, 8) for seed in range(60)]
    assert {one.node for one in strikes} == {"b1", "b2", "b3"}
    assert {one.server_round for one in strikes} == {3, 4}
    assert all(one.server_round + AFTER < 8 for one in strikes)


def test_three_in_ten_clients_drop_out_and_never_all() -> None:
    names = [f"c{number}" for number in range(10)]
    chosen = [taking_part(1, server_round, names) for server_round in range(400)]
    assert chosen == [taking_part(1, server_round, names) for server_round in range(400)]
    assert statistics.mean(len(one) for one in chosen) / 10 == pytest.approx(1 - SHARE, abs=0.02)
    assert all(taking_part(2, server_round, ["c1", "c2"]) for server_round in range(100))


def test_a_slope_is_that_after_the_warm_up() -> None:
    # 30 MB within the warm-up, then 2 MB over 100 rounds, beside descriptors that come and go.
    samples = [Sample(n, 60 + min(n, 25) * 1.2 + n * 0.02, 30 + n % 2, 5, n * 0.5) for n in range(1, 101)]
    found = growth(samples, 100)
    assert found["memory_mb"]["per_100_rounds"] == pytest.approx(2.0)
    assert found["memory_mb"]["rise"] == pytest.approx(74 * 0.02)
    assert abs(found["descriptors"]["rise"]) < 0.1
    assert found["threads"] == {"first": 5, "last": 5, "rise": 0.0, "per_100_rounds": 0.0}
    assert found["disk_mb"]["per_100_rounds"] == pytest.approx(50.0)


def test_rounds_in_memory_count_those_who_take_part(tmp_path: Path) -> None:
    trained = Trained(load_recipe(write_recipe(tmp_path)), clients=4, brokers=3)
    names = {member.node_id: member.name for member in trained.joined.federation.members}
    for chosen in (["c1", "c2", "c3", "c4"], ["c2"], ["c1", "c4"], ["c1", "c2", "c3", "c4"]):
        trained.round(chosen)
        assert sorted(names[client] for client in trained.head.last_clients) == chosen
    assert trained.server_round == 4
    assert len(trained.joined.model_hashes()) == 1
