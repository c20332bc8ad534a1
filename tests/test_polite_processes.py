"""Real clients that leave their machine to its owner: one outside its hours, and one that uploads slowly."""

from pathlib import Path

import pytest

from ravnest_fed.cluster import CLIENT_MODULE, Cluster, Node
from tests.test_watch import hours_from_now
from tests.tiny_federation import cluster_of, found_tiny, said, until

pytestmark = pytest.mark.processes


def start_client(cluster: Cluster, name: str, *options: str) -> Node:
    """A client as its owner starts it."""
    folder = cluster.founded.folder
    link, state = folder / "members" / f"{name}.link", folder / "state" / name
    words = [CLIENT_MODULE, "join", str(link), "--recipe", str(cluster.recipe), "--device", "cpu", "--threads", "1"]
    node = cluster.start_module(name, [*words, "--until-input-closes", "--state", str(state), *options])
    cluster.clients[name] = node
    return node


@pytest.mark.long
def test_a_client_outside_its_hours_says_so_and_the_others_go_on_without_it(tmp_path: Path) -> None:
    founded = found_tiny(tmp_path, brokers=1, clients=2, min_contributions=1, grace_seconds=0.2)
    with cluster_of(founded) as cluster:
        broker = cluster.start_broker("b1")
        hours = hours_from_now(2, 3)
        polite = start_client(cluster, "c2", "--when", hours)
        until(lambda: said(polite, f"pausing  because=it is outside {hours}"), "the client says why it waits")
        until(lambda: said(broker, f"paused: it is outside {hours}"), "the broker is told why")
        start_client(cluster, "c1", "--when", "always", "--max-cpu", "100%", "--upload-limit", "1MB/s")
        until(lambda: said(cluster.clients["c1"], "contribution taken"), "the other one's contribution is taken")
        until(lambda: said(polite, "model"), "the paused client follows the log")
        assert not said(polite, "training") and polite.alive
