"""How soon a client has a new home once the broker that it was at is killed."""

import re
import time
from pathlib import Path

import pytest

from ravnest_fed.cluster import Node
from tests.tiny_federation import cluster_of, found_tiny, said, until

pytestmark = pytest.mark.processes

NEW_HOME_SECONDS = 3.0


def homes(node: Node) -> list[str]:
    """The brokers that a client was at, in order."""
    return re.findall(r"connected  broker=(\w+)", node.log.read_text()) if node.log.exists() else []


def test_a_client_has_a_new_home_within_three_seconds_of_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    founded = found_tiny(tmp_path, brokers=3, clients=1, grace_seconds=0.5)
    monkeypatch.setenv("TINY_PAUSE", "0.1")
    with cluster_of(founded) as cluster:
        cluster.start()
        node = cluster.clients["c1"]
        until(lambda: said(node, "contribution taken"), "the client is at work")
        for _ in range(2):
            seen = homes(node)
            cluster.kill(seen[-1])
            killed = time.monotonic()
            until(lambda seen=seen: len(homes(node)) > len(seen), "the client has a new home", NEW_HOME_SECONDS)  # type: ignore[misc]
            assert time.monotonic() - killed < NEW_HOME_SECONDS
            assert homes(node)[-1] != seen[-1]
            taken = f"broker={homes(node)[-1]}"
            until(lambda taken=taken, seen=seen: said_after(node, seen, taken), "the new home takes its work")  # type: ignore[misc]
            cluster.start_broker(seen[-1])
            until(lambda name=seen[-1]: said(cluster.brokers[name], "round committed"), "the broker is back")  # type: ignore[misc]


def said_after(node: Node, seen: list[str], text: str) -> bool:
    """Whether a contribution was taken, by whom `text` says, after the client's newest greeting."""
    newest = re.split(r"connected  broker=", node.log.read_text())[len(seen) + 1]
    return any("contribution taken" in line and text in line for line in newest.splitlines())
