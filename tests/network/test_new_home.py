"""How soon a client has a new home once the broker that it was at is killed."""

import re
import time
from pathlib import Path

import pytest

from ravnest_fed.cluster import Node
from tests.tiny_federation import cluster_of, found_tiny, until

pytestmark = pytest.mark.processes

NEW_HOME_SECONDS = 3.0


def homes(node: Node) -> list[str]:
    """The brokers that a client was at, in order."""
    return re.findall(r"connected  broker=(\w+)", node.log.read_text()) if node.log.exists() else []


def took_work(node: Node) -> bool:
    """Whether the client's newest home has taken a contribution of it."""
    newest = node.log.read_text().rpartition("connected  broker=")[2]
    return any("contribution taken" in line and f"broker={homes(node)[-1]}" in line for line in newest.splitlines())


def test_a_client_has_a_new_home_within_three_seconds_of_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    founded = found_tiny(tmp_path, brokers=3, clients=1, grace_seconds=0.5)
    monkeypatch.setenv("TINY_PAUSE", "0.1")
    with cluster_of(founded) as cluster:
        cluster.start()
        node = cluster.clients["c1"]
        for _ in range(2):
            until(lambda: took_work(node), "the client is at work")
            before = homes(node)
            cluster.kill(before[-1])
            killed = time.monotonic()
            while homes(node) == before:
                assert time.monotonic() - killed < NEW_HOME_SECONDS
                time.sleep(0.01)
            assert homes(node)[-1] != before[-1]
            until(lambda: took_work(node), "the new home takes its work")
            again = cluster.start_broker(before[-1])
            until(lambda again=again: again.log.read_text().count("broker runs") > 1, "the broker is back")  # type: ignore[misc]
