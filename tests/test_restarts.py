"""Brokers killed and started again on real sockets and disks, while clients go on."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ravnest_fed.cluster import Cluster, free_addresses
from ravnest_fed.errors import LedgerError
from ravnest_fed.facts import encode
from ravnest_fed.federation import Federation
from ravnest_fed.ledger import Ledger
from ravnest_fed.verification import prove
from tests.tiny_federation import cluster_of, found_tiny, operator, said, until

pytestmark = pytest.mark.processes
LIMIT = 60.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three brokers and two clients at work."""
    founded = found_tiny(tmp_path, brokers=3, clients=2, min_contributions=2, grace_seconds=0.5, checkpoint_every=0)
    with cluster_of(founded) as cluster:
        cluster.start()
        until(lambda: min(rounds(cluster).values()) >= 3, "three rounds are committed", LIMIT)
        yield cluster


def rounds(cluster: Cluster) -> dict[str, int]:
    """The last round in each broker's ledger."""
    reached = {}
    for broker in cluster.founded.federation.brokers:
        folder = cluster.founded.folder / "brokers" / broker.name
        try:
            ledger = Ledger(folder, cluster.founded.federation.fingerprint, create=False)
        except LedgerError:
            return {broker.name: 0}
        reached[broker.name] = ledger.last_round()
        ledger.close()
    return reached


def rounds_of(folder: Path, broker: str) -> int:
    """The last round in the ledger of a broker, also one that was added later."""
    try:
        ledger = Ledger(
            folder / "brokers" / broker, Federation.load(folder / "federation.toml").fingerprint, create=False
        )
    except LedgerError:
        return 0
    reached = ledger.last_round()
    ledger.close()
    return reached


def commits(cluster: Cluster, broker: str, last: int) -> list[bytes]:
    """The bodies of a broker's commits up to a round."""
    folder = cluster.founded.folder / "brokers" / broker
    ledger = Ledger(folder, Federation.load(folder / "federation.toml").fingerprint, create=False)
    bodies = [commit.body for commit, _ in ledger.commits()][:last]
    ledger.close()
    return bodies


def test_all_brokers_are_killed_and_restarted_while_clients_run(cluster: Cluster) -> None:
    for _ in range(2):
        before = rounds(cluster)
        kept = commits(cluster, "b1", before["b1"])
        for name in before:
            cluster.kill(name)
        for name in before:
            cluster.start_broker(name)
        goal = max(before.values()) + 3
        until(lambda goal=goal: min(rounds(cluster).values()) >= goal, f"round {goal} is committed", LIMIT)  # type: ignore[misc]
        assert commits(cluster, "b1", before["b1"]) == kept
        assert all(node.alive for node in (*cluster.brokers.values(), *cluster.clients.values()))
    common = min(rounds(cluster).values())
    bodies = {encode(commits(cluster, name, common)) for name in before}
    assert len(bodies) == 1
    prove(cluster.founded.folder / "brokers" / "b2")


@pytest.mark.parametrize("victim", ["b1", "b2", "b3"])
def test_one_broker_is_killed_and_comes_back(cluster: Cluster, victim: str) -> None:
    before = max(rounds(cluster).values())
    cluster.kill(victim)
    others = [name for name in cluster.brokers if name != victim]
    until(lambda: min(rounds(cluster)[name] for name in others) >= before + 3, "two brokers go on", LIMIT)
    cluster.start_broker(victim)
    goal = max(rounds(cluster).values()) + 2
    until(lambda: rounds(cluster)[victim] >= goal, f"{victim} catches up", LIMIT)
    assert all(node.alive for node in (*cluster.brokers.values(), *cluster.clients.values()))


def test_a_client_that_is_killed_goes_on_where_it_was(cluster: Cluster) -> None:
    cluster.kill("c2")
    before = max(rounds(cluster).values())
    cluster.start_client("c2")
    until(lambda: min(rounds(cluster).values()) >= before + 3, "rounds with both clients go on", LIMIT)
    assert not said(cluster.clients["c2"], "second-delta-for-a-round")


def test_a_broker_whose_ledger_was_emptied_does_not_vote_again(cluster: Cluster) -> None:
    cluster.kill("b3")
    folder = cluster.founded.folder / "brokers" / "b3"
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        (folder / name).unlink(missing_ok=True)
    node = cluster.start_broker("b3")
    until(lambda: not node.alive, "b3 refuses to start", LIMIT)
    assert node.process.returncode == 13
    assert "the votes of this broker are lost" in node.last_words()


@pytest.mark.long
def test_who_is_far_behind_takes_up_a_checkpoint_and_the_ledgers_stay_short(tmp_path: Path) -> None:
    settings = {"min_contributions": 2, "grace_seconds": 0.5, "checkpoint_every": 2, "keep": 1}
    founded = found_tiny(tmp_path, brokers=3, clients=3, **settings)
    with cluster_of(founded) as cluster:
        for name in ("b1", "b2", "b3"):
            cluster.start_broker(name)
        for name in ("c1", "c2"):
            cluster.start_client(name)
        until(lambda: min(rounds(cluster).values()) >= 1, "a round is committed", LIMIT)
        cluster.kill("b3")
        until(lambda: rounds(cluster)["b1"] >= rounds(cluster)["b3"] + 8, "two brokers go on", LIMIT)
        cluster.start_broker("b3")
        cluster.start_client("c3")
        until(lambda: said(cluster.brokers["b3"], "checkpoint taken up"), "b3 takes up a checkpoint", LIMIT)
        until(lambda: said(cluster.clients["c3"], "contribution taken"), "a late client takes part", LIMIT)
        until(lambda: rounds(cluster)["b3"] >= rounds(cluster)["b1"] > 9, "b3 is at the head", LIMIT)
    for folder in founded.broker_folders:
        proven = prove(folder)
        assert proven.began > 0
        assert proven.replica.head.server_round - proven.began <= 3
        # At most two periods of rounds lie there: each has evidence and a few shards.
        assert len(list((folder / "blobs").iterdir())) < 60


def test_a_rolling_restart_of_all_brokers_costs_no_round_and_no_client(cluster: Cluster) -> None:
    before = max(rounds(cluster).values())
    for name in ("b1", "b2", "b3"):
        node = cluster.brokers[name]
        node.process.terminate()
        assert node.process.wait(20) == 0 and said(node, "draining") and said(node, "broker stopped")
        behind = rounds(cluster)[name]
        others = [other for other in cluster.brokers if other != name]
        until(lambda: min(rounds(cluster)[other] for other in others) > behind, "the others go on", LIMIT)  # noqa: B023
        cluster.start_broker(name)
        until(lambda: rounds(cluster)[name] >= max(rounds(cluster).values()) - 1, f"{name} is back", LIMIT)  # noqa: B023
    goal = max(rounds(cluster).values()) + 2
    until(lambda: min(rounds(cluster).values()) >= goal, "all go on", LIMIT)
    assert goal > before + 4
    assert all(node.alive for node in (*cluster.brokers.values(), *cluster.clients.values()))
    common = min(rounds(cluster).values())
    assert len({encode(commits(cluster, name, common)) for name in cluster.brokers}) == 1
    assert not any(said(node, "contribution not counted") for node in cluster.clients.values())


@pytest.mark.long
def test_a_broker_whose_disk_is_lost_is_replaced_and_clients_find_the_new_one(tmp_path: Path) -> None:
    founded = found_tiny(tmp_path, brokers=3, clients=2, grace_seconds=0.5, checkpoint_every=4, keep=1)
    folder = founded.folder
    with cluster_of(founded) as cluster:
        cluster.start()
        until(lambda: min(rounds(cluster).values()) >= 2, "rounds are committed", LIMIT)
        cluster.kill("b3")
        shutil.rmtree(folder / "brokers" / "b3")
        done = operator("roster", "remove", folder, "b3", "--wait", LIMIT)
        assert done.exit_code == 0 and "in force from round" in done.output, done.output
        (address,) = free_addresses(1)
        place = f"127.0.0.1:{address.client_port}:{address.peer_port}"
        done = operator("roster", "add", folder, place, "--name", "b4", "--wait", LIMIT)
        assert done.exit_code == 0, done.output
        node = cluster.start_broker("b4")
        until(lambda: said(node, "round committed") or said(node, "checkpoint taken up"), "b4 follows", LIMIT)
        # With one of the old ones gone, the new one's vote is needed.
        cluster.kill("b1")
        before = rounds_of(folder, "b2")
        until(lambda: rounds_of(folder, "b4") >= before + 4, "b2 and b4 are a majority", LIMIT)
        until(
            lambda: all(said(cluster.clients[name], "brokers changed") for name in ("c1", "c2")), "clients know", LIMIT
        )
        cluster.kill("c1")
        cluster.start_client("c1")
        goal = rounds_of(folder, "b4") + 3
        until(lambda: rounds_of(folder, "b4") >= goal, "a client that starts again takes part", LIMIT)
        shown = operator("roster", "show", folder)
        assert shown.exit_code == 0 and "b4" in shown.output and "b3" not in shown.output, shown.output
    for name in ("b2", "b4"):
        proven = prove(folder / "brokers" / name).replica
        assert [broker.name for broker in proven.federation.brokers] == ["b1", "b2", "b4"]
