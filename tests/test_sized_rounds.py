"""Sized rounds of real processes: a slow client is asked for less than a fast one, and both are counted."""

import re
from pathlib import Path

import pytest

from clients.remembered import FILE_NAME
from ravnest_fed.cluster import Cluster, Node
from tests.tiny_federation import cluster_of, found_tiny, said, until

PAUSE = 0.05
"""How much longer a step of the slow client takes, in seconds."""


def steps_of(cluster: Cluster, client: str) -> list[int]:
    """The steps that the broker gave this client, each time they changed."""
    text = cluster.brokers["b1"].log.read_text()
    lines = [line for line in text.splitlines() if "work sized" in line and re.search(rf"\b{client}\b", line)]
    return [int(found[1]) for line in lines if (found := re.search(r"local_steps\W+(\d+)", line))]


def first_reason(cluster: Cluster, client: str) -> str:
    """What the broker says of this client's first order."""
    text = cluster.brokers["b1"].log.read_text()
    return next(line for line in text.splitlines() if "work sized" in line and re.search(rf"\b{client}\b", line))


def counted(node: Node) -> int:
    return len(re.findall("contribution taken", node.log.read_text()))


@pytest.mark.processes
def test_a_slow_client_is_asked_for_less_than_a_fast_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    founded = found_tiny(tmp_path, 1, 2, target_seconds=1.0, max_local_steps=60, grace_seconds=20)
    with cluster_of(founded) as cluster:
        cluster.start_broker("b1")
        cluster.start_client("c1")
        monkeypatch.setenv("TINY_PAUSE", str(PAUSE))
        slow = cluster.start_client("c2")
        until(lambda: counted(slow) >= 4, "four rounds of the slow client", 120.0)
        # A busy machine may make the fast one slow for a round.
        until(lambda: steps_of(cluster, "c1")[-1] > steps_of(cluster, "c2")[-1], "more steps for the fast one", 120.0)
        assert not said(slow, "not measured")
        assert (founded.folder / "state" / "c1" / FILE_NAME).exists()
        assert "first order" in first_reason(cluster, "c1")
        slow_steps = steps_of(cluster, "c2")
    # 0.05 s a step and more: at most 20 steps fit into the second.
    assert max(slow_steps) <= 20 * 1.25
