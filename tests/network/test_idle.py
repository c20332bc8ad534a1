"""Connections that are silent while a client trains, through what forgets silent connections."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ravnest_fed.cluster import Node
from ravnest_fed.net.sockets import CLIENT_HEARTBEAT
from tests.network.federations import dial_through, found_wide, start_with_heartbeat
from tests.network.proxy import Proxy
from tests.network.test_links import counted_in_the_end
from tests.tiny_federation import said

pytestmark = pytest.mark.processes

IDLE_SECONDS = 1.5
OFTEN = (500, 1_500)
SELDOM = (2_500, 1_000)
"""Heartbeats in milliseconds: interval and time-out."""
WAYS = {"c1": (OFTEN, True), "c2": (SELDOM, True), "c3": (SELDOM, False)}
"""By client: its heartbeat, and whether its connection would be ended silently, rather than by a reset."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Node, Proxy]]]:
    """One broker, and clients that trained for three times as long as their connections may be silent, all at once."""
    cluster = found_wide(tmp_path_factory.mktemp("idle"), 0.1, clients=3, min_contributions=3, rounds=1)
    address = cluster.founded.federation.brokers[0].client_address
    with pytest.MonkeyPatch.context() as patch, cluster, ExitStack() as proxies:
        patch.setenv("WIDE_PAUSE", str(1.5 * IDLE_SECONDS))
        cluster.start_broker("b1")
        made: dict[str, tuple[Node, Proxy]] = {}
        for name, (heartbeat, silently) in WAYS.items():
            proxy = proxies.enter_context(Proxy(address, IDLE_SECONDS, silently))
            dial_through(cluster, name, {"b1": proxy.address})
            made[name] = (start_with_heartbeat(cluster, name, *heartbeat), proxy)
        for node, _ in made.values():
            counted_in_the_end(node)
        yield made


@pytest.mark.long
def test_heartbeats_keep_a_silent_connection_alive(ended: dict[str, tuple[Node, Proxy]]) -> None:
    node, proxy = ended["c1"]
    assert proxy.expired == 0 and proxy.opened == 1
    assert not said(node, "home broker lost")


@pytest.mark.parametrize("name", ["c2", "c3"])
def test_a_connection_that_was_cut_while_the_client_trained_is_made_again_and_its_work_counted(
    ended: dict[str, tuple[Node, Proxy]], name: str
) -> None:
    """Where it was cut silently, the client learns of it when its heartbeat goes unanswered."""
    node, proxy = ended[name]
    assert proxy.expired >= 1 and proxy.opened >= 2
    told = node.log.read_text()
    assert "reconnected" in told
    assert told.count("training  round=") == told.count("trained  round=") == 1


@pytest.mark.long
def test_the_heartbeat_of_the_clients_command_is_often_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle_seconds = CLIENT_HEARTBEAT[0] / 1000 + 5.0
    monkeypatch.setenv("WIDE_PAUSE", str(1.5 * idle_seconds))
    cluster = found_wide(tmp_path, 0.1, rounds=1)
    with cluster, Proxy(cluster.founded.federation.brokers[0].client_address, idle_seconds) as proxy:
        dial_through(cluster, "c1", {"b1": proxy.address})
        cluster.start_broker("b1")
        node = cluster.start_client("c1")
        counted_in_the_end(node, 4 * idle_seconds + 30.0)
        assert proxy.expired == 0 and proxy.opened == 1
