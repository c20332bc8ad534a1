"""Connections that are silent while a client trains, through what forgets silent connections."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ravnest_fed.cluster import Cluster
from ravnest_fed.net.sockets import CLIENT_HEARTBEAT
from tests.network.federations import dial_through, found_wide, start_with_heartbeat
from tests.network.proxy import Proxy
from tests.network.test_links import counted_in_the_end
from tests.tiny_federation import said

pytestmark = pytest.mark.processes

IDLE_SECONDS = 2.0


@contextmanager
def behind_a_forgetful_proxy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, idle_seconds: float, silently: bool
) -> Iterator[tuple[Cluster, Proxy]]:
    """A federation of one broker and one client that trains for three times as long as its connection may be silent."""
    monkeypatch.setenv("WIDE_PAUSE", str(1.5 * idle_seconds))
    cluster = found_wide(folder, 0.1, rounds=1)
    address = cluster.founded.federation.brokers[0].client_address
    with cluster, Proxy(address, idle_seconds, silently) as proxy:
        dial_through(cluster, "c1", {"b1": proxy.address})
        cluster.start_broker("b1")
        yield cluster, proxy


@pytest.mark.parametrize("silently", [False, True])
def test_heartbeats_keep_a_silent_connection_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silently: bool
) -> None:
    with behind_a_forgetful_proxy(tmp_path, monkeypatch, IDLE_SECONDS, silently) as (cluster, proxy):
        node = start_with_heartbeat(cluster, "c1", 500, 1_500)
        counted_in_the_end(node)
        assert proxy.expired == 0 and proxy.opened == 1
        assert not said(node, "home broker lost")


@pytest.mark.parametrize("silently", [False, True])
def test_a_connection_that_was_cut_while_the_client_trained_is_made_again_and_its_work_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silently: bool
) -> None:
    """Cut silently, the connection ends for the client when its heartbeat goes unanswered."""
    with behind_a_forgetful_proxy(tmp_path, monkeypatch, IDLE_SECONDS, silently) as (cluster, proxy):
        node = start_with_heartbeat(cluster, "c1", 2_500, 1_000)
        counted_in_the_end(node)
        assert proxy.expired >= 1 and proxy.opened >= 2
        told = node.log.read_text()
        assert "reconnected" in told and told.count("training  round=") == told.count("trained  round=") == 1


@pytest.mark.long
def test_the_heartbeats_of_the_clients_command_are_often_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_seconds = CLIENT_HEARTBEAT[0] / 1000 + 5.0
    with behind_a_forgetful_proxy(tmp_path, monkeypatch, idle_seconds, silently=False) as (cluster, proxy):
        node = cluster.start_client("c1")
        counted_in_the_end(node, 4 * idle_seconds + 30.0)
        assert proxy.expired == 0 and proxy.opened == 1
