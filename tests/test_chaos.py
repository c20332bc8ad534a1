"""The schedule of kills, and the limits that hold whatever the time does."""

import json
import random
import sqlite3
from pathlib import Path

import pytest

from ravnest_fed.chaos import Chaos, Kill, Start, Strike, most_down, schedule
from ravnest_fed.commands import chaos_report
from ravnest_fed.errors import UsageError
from ravnest_fed.federation import FILE_NAME, Federation
from ravnest_fed.ledger import Ledger
from ravnest_fed.verification import lost_rounds
from tests.tiny_federation import call, cluster_of, found_tiny, one_line_error, operator, until, write_recipe

BROKERS = ("b1", "b2", "b3")
CLIENTS = ("c1", "c2", "c3", "c4")


def test_the_same_seed_gives_the_same_kills() -> None:
    assert schedule(7, 20, BROKERS, CLIENTS) == schedule(7, 20, BROKERS, CLIENTS)
    assert len({schedule(seed, 20, BROKERS, CLIENTS) for seed in range(20)}) == 20


@pytest.mark.parametrize("rounds", [3, 4, 8, 20, 500])
def test_kills_fall_between_the_first_and_the_last_round_on_both_kinds(rounds: int) -> None:
    for seed in range(20):
        strikes = schedule(seed, rounds, BROKERS, CLIENTS)
        assert [one.server_round for one in strikes] == sorted({one.server_round for one in strikes})
        assert all(2 <= one.server_round < rounds for one in strikes)
        assert all(0 <= one.fraction <= 1 and 0 < one.down_seconds < 5 for one in strikes)
        kinds = [one.node[0] for one in strikes]
        assert abs(kinds.count("b") - kinds.count("c")) <= 1


def test_who_must_not_fall_is_not_drawn() -> None:
    assert {one.node[0] for one in schedule(1, 30, ("b1", "b2"), CLIENTS)} == {"c"}
    assert {one.node[0] for one in schedule(1, 30, BROKERS, ("c1",))} == {"b"}
    assert schedule(1, 30, ("b1", "b2"), ("c1",)) == ()
    assert schedule(1, 2, BROKERS, CLIENTS) == ()
    assert most_down(5, 5) == (2, 2)


def test_a_strike_falls_when_its_part_of_the_round_has_passed_and_the_node_comes_back() -> None:
    chaos = Chaos([Strike("b2", 5, 0.5, 2.0)], set(BROKERS), set(CLIENTS))
    everyone = {*BROKERS, *CLIENTS}
    chaos.observe(4, everyone, 10.0)
    assert chaos.act(1.0, everyone, False, 19.0) == []
    chaos.observe(5, everyone, 20.0)
    assert chaos.act(1.0, everyone, False, 20.4) == []
    (kill,) = chaos.act(1.0, everyone, False, 20.6)
    assert isinstance(kill, Kill) and (kill.strike.node, kill.server_round) == ("b2", 5)
    assert chaos.down == {"b2"} and chaos.restoring
    # A broker that was asked just before it died may still be taken for being at work.
    assert chaos.observe(5, everyone, 20.7) == []
    assert chaos.act(1.0, everyone, False, 22.5) == []
    assert chaos.act(1.0, everyone, False, 22.7) == [Start("b2")]
    assert chaos.down == set() and chaos.restoring
    assert chaos.observe(7, everyone - {"b2"}, 23.0) == []
    assert chaos.observe(8, everyone, 23.6) == [kill]
    assert (kill.back_at, kill.back_in_round, chaos.restoring) == (23.6, 8, False)


def test_what_comes_due_late_falls_late() -> None:
    chaos = Chaos([Strike("c1", 3, 0.9, 1.0)], set(BROKERS), set(CLIENTS))
    chaos.observe(6, {*BROKERS, *CLIENTS}, 1.0)
    (kill,) = chaos.act(5.0, {*BROKERS, *CLIENTS}, False, 1.0)
    assert isinstance(kill, Kill) and kill.server_round == 6


def test_after_the_end_nothing_is_killed_and_everything_starts() -> None:
    everyone = {*BROKERS, *CLIENTS}
    chaos = Chaos([Strike("b1", 2, 0.0, 9.0), Strike("c1", 2, 0.0, 1.0)], set(BROKERS), set(CLIENTS))
    chaos.observe(2, everyone, 0.0)
    assert len(chaos.act(1.0, everyone, False, 0.0)) == 1
    assert chaos.act(1.0, everyone, True, 0.1) == [Start("b1")]
    assert chaos.act(1.0, everyone, True, 9.9) == []


@pytest.mark.parametrize("seed", range(50))
def test_never_a_majority_of_brokers_nor_most_clients_are_down(seed: int) -> None:
    """Strikes all at once, and nodes that take random times to come back."""
    draw = random.Random(seed)
    brokers = {f"b{n}" for n in range(1, draw.choice((3, 4, 5)) + 1)}
    clients = {f"c{n}" for n in range(1, draw.choice((2, 3, 5)) + 1)}
    limits = most_down(len(brokers), len(clients))
    strikes = [Strike(draw.choice(sorted(brokers | clients)), 2, 0.0, draw.uniform(0, 3)) for _ in range(40)]
    chaos = Chaos(strikes, brokers, clients)
    at_work, starting = brokers | clients, dict[str, float]()
    for step in range(400):
        now = step * 0.1
        at_work |= {node for node, at in starting.items() if at <= now}
        chaos.observe(2 + step // 10, at_work, now)
        for action in chaos.act(1.0, at_work, False, now):
            if isinstance(action, Kill):
                assert action.strike.node in at_work
                at_work = at_work - {action.strike.node}
                starting.pop(action.strike.node, None)
                assert len(brokers - at_work) <= limits[0] or action.strike.node in clients
                assert len(clients - at_work) <= limits[1] or action.strike.node in brokers
            else:
                starting[action.node] = now + draw.uniform(0, 2)
    assert len(chaos.kills) > 5


# --- on real processes -----------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_demo_with_kills_ends_with_every_node_alive_and_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_PAUSE", "0.15")
    seed = next(one for one in range(99) if schedule(one, 8, BROKERS, CLIENTS[:3])[-1].server_round <= 4)
    words = ["--chaos", seed, "--rounds", 8, "--brokers", 3, "--clients", 3, "--set", "grace_seconds=0.5"]
    words += ["--recipe", write_recipe(tmp_path), "--summary", tmp_path / "summary.json", "--keep", tmp_path / "kept"]
    done = call("ravnest_fed.commands.main", "demo", *words)
    assert done.status == 0, done.output + done.errors
    assert "died" not in done.output
    assert "rounds lost: none" in done.output and "every living replica holds the same model" in done.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    kills = summary["chaos"]
    assert {kill["node"][0] for kill in kills} == {"b", "c"}
    for kill in kills:
        assert f"{kill['node']} killed in round {kill['server_round']}\n" in done.output
        assert f"{kill['node']} is back after {kill['back_after_seconds']:.1f} s\n" in done.output
        assert 2 <= kill["server_round"] < 8 and kill["server_round"] <= kill["back_in_round"] <= 9
    for node in (summary["brokers"] | summary["clients"]).values():
        assert (node["server_round"], node["model_hash"], node["died"]) == (8, summary["final"]["model_hash"], False)
    assert operator("verify", tmp_path / "kept").exit_code == 0
    logs = {kill["node"]: (tmp_path / "kept" / "logs" / f"{kill['node']}.log").read_text() for kill in kills}
    starts = {"b": "broker runs", "c": "trains on"}
    assert all(text.count(starts[name[0]]) >= 2 for name, text in logs.items())


def test_a_demo_with_nothing_to_kill_is_refused(tmp_path: Path) -> None:
    done = operator(
        "demo",
        "--chaos",
        1,
        "--brokers",
        2,
        "--clients",
        1,
        "--recipe",
        write_recipe(tmp_path),
        "--keep",
        tmp_path / "k",
    )
    one_line_error(done.output, "leave nothing to kill", "--chaos needs three brokers or two clients")
    assert done.exit_code == UsageError.exit_status


# --- what it cost ----------------------------------------------------------------------------------------------------


def test_the_cost_tells_kills_rounds_and_losses() -> None:
    seconds = {1: 9.0, 2: 0.2, 3: 0.4, 4: 2.0, 5: 1.0, 6: 0.3, 7: 0.5}
    summary = {
        "rounds": [{"server_round": number, "seconds": one} for number, one in seconds.items()],
        "chaos": [
            {"node": "b2", "server_round": 4, "back_after_seconds": 1.26, "back_in_round": 7},
            {"node": "c1", "server_round": 7, "back_after_seconds": None, "back_in_round": None},
        ],
    }
    assert chaos_report.cost(summary, [5, 6]) == [
        "killed: b2 in round 4 (back after 1.3 s), c1 in round 7 (not back)",
        "a round took 0.30 s undisturbed and 1.00 s around a kill, in the median (at most 2.00 s); rounds lost: 5, 6",
    ]
    assert chaos_report.cost({"rounds": [], "chaos": []}, []) == ["nothing was killed: training ended before"]


@pytest.mark.processes
def test_a_round_that_ledgers_lack_or_hold_otherwise_is_lost(tmp_path: Path) -> None:
    founded = found_tiny(tmp_path, brokers=3, clients=1, rounds=3)
    with cluster_of(founded) as cluster:
        cluster.start()
        until(lambda: not cluster.clients["c1"].alive, "training ends")
    told = {one: {model_hash_of(founded.folder, one)} for one in (1, 2, 3)}
    assert lost_rounds(founded.folder, told) == []
    assert lost_rounds(founded.folder, told | {2: {bytes(32)}, 4: told[3]}) == [2, 4]
    with sqlite3.connect(founded.folder / "brokers" / "b2" / "ledger.db") as db:
        db.execute("delete from commits where server_round = 3")
    assert lost_rounds(founded.folder, told) == []
    for name in ("b1", "b3"):
        with sqlite3.connect(founded.folder / "brokers" / name / "ledger.db") as db:
            db.execute("delete from commits where server_round = 3")
    assert lost_rounds(founded.folder, told) == [3]


def model_hash_of(folder: Path, server_round: int) -> bytes:
    """The model hash that the ledger of b1 holds for a round."""
    ledger = Ledger(folder / "brokers" / "b1", Federation.load(folder / FILE_NAME).fingerprint, create=False)
    commits = {body.server_round: body for _, body in ledger.commits()}
    ledger.close()
    return commits[server_round].model_hash
