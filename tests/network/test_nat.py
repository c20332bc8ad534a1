"""Clients behind NAT, and a slow uplink made by the kernel, in network namespaces; skipped where there are none to be had."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ravnest_fed.cluster import Cluster
from ravnest_fed.founding import Address
from ravnest_fed.net.sockets import CLIENT_HEARTBEAT
from ravnest_fed.verification import prove
from tests.network.federations import found_wide
from tests.network.namespaces import Namespaces, NotPossible
from tests.network.test_links import counted_in_the_end, delta_bytes, times_connected
from tests.tiny_federation import hashes_measured, said, until

pytestmark = pytest.mark.processes

BROKERS = {"b1": "198.18.0.11", "b2": "198.18.0.12", "b3": "198.18.0.13"}
ROUTERS = {"r1": "198.18.0.21", "r2": "198.18.0.22"}
CLIENT, GATEWAY = "192.168.7.2", "192.168.7.1"
"""Both clients have this address, each behind its own router."""
ROUNDS = 2


@pytest.fixture
def world() -> Iterator[Namespaces]:
    """Three brokers and two routers at a switch, and behind each router a client."""
    with Namespaces() as made:
        try:
            made.add_switch("s")
            for number, (host, address) in enumerate((BROKERS | ROUTERS).items()):
                made.add(host)
                made.plug(host, "out", f"{address}/24", "s", f"port{number}")
            for router, client in (("r1", "c1"), ("r2", "c2")):
                made.add(client)
                made.plug(client, "out", f"{CLIENT}/24", router, "in", f"{GATEWAY}/24")
                made.run(client, "ip", "route", "add", "default", "via", GATEWAY)
                made.masquerade(router, "out")
        except NotPossible as reason:
            pytest.skip(f"no network namespaces with NAT here: {reason}")
        yield made


def addresses(brokers: int) -> list[Address]:
    return [Address(address, 7700, 7701) for address in list(BROKERS.values())[:brokers]]


def started_within(world: Namespaces, cluster: Cluster) -> None:
    """Let each node of the cluster be started on the host of its name."""
    cluster.within = {host: world.within(host) for host in (*BROKERS, "c1", "c2")}


def seen_by_brokers(world: Namespaces) -> set[str]:
    """The addresses from which connections to the brokers' port for clients come."""
    seen: set[str] = set()
    for broker in BROKERS:
        found = json.loads(world.run(broker, sys.executable, "-c", CONNECTIONS))
        seen |= set(found)
    return seen


# In the kernel's own table: local address, remote address and state, the addresses as hexadecimal words.
CONNECTIONS = """
import json, socket, struct
rows = [line.split() for line in open("/proc/net/tcp6").readlines()[1:] + open("/proc/net/tcp").readlines()[1:]]
ends = [row[2].split(":")[0][-8:] for row in rows if row[3] == "01" and row[1].endswith(":%04X" % 7700)]
print(json.dumps([socket.inet_ntoa(struct.pack("=I", int(end, 16))) for end in ends]))
"""


def test_clients_with_the_same_private_address_behind_two_nats_train_one_model(
    tmp_path: Path, world: Namespaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIDE_PAUSE", "0.1")
    # Several shards, spread over the brokers, all of which each client's home pulls through the NAT.
    cluster = found_wide(tmp_path, 0.5, clients=2, addresses=addresses(3), rounds=ROUNDS, shard_size=32768)
    started_within(world, cluster)
    with cluster:
        for broker in BROKERS:
            with pytest.raises(NotPossible, match="unreachable"):
                world.run(broker, "ip", "route", "get", CLIENT)
        cluster.start()
        until(lambda: seen_by_brokers(world) == set(ROUTERS.values()), "the brokers see the routers alone", 30.0)
        for node in cluster.clients.values():
            until(lambda node=node: not node.alive, f"{node.name} ends; it said: {node.last_words()}", 60.0)  # type: ignore[misc]
            assert f"{ROUNDS} contributions counted" in node.last_words()
        folders = cluster.founded.broker_folders
        for broker in cluster.brokers.values():
            until(lambda broker=broker: broker.log.read_text().count("round committed") == ROUNDS, "it is done", 20.0)  # type: ignore[misc]
    replayed = {prove(folder).replica.head.model_hash for folder in folders}
    assert len(replayed) == 1
    measured = hashes_measured(cluster)[ROUNDS]
    assert set(measured) == {member.node_id for member in cluster.founded.federation.members}
    assert set(measured.values()) == replayed


@pytest.mark.long
def test_a_delta_of_more_than_a_minute_gets_through_an_uplink_of_one_megabit(tmp_path: Path, world: Namespaces) -> None:
    cluster = found_wide(tmp_path, 8.0, clients=1, addresses=addresses(1), rounds=1)
    started_within(world, cluster)
    with cluster:
        cluster.start_broker("b1")
        node = cluster.start_client("c1")
        until(lambda: said(node, "connected"), "the client is there")
        world.shape("r1", "out", "1mbit")
        until(lambda: said(node, "trained"), "the client has trained")
        began = time.monotonic()
        counted_in_the_end(node, 150.0)
        assert time.monotonic() - began > 0.95 * delta_bytes(cluster) * 8 / 1e6 > sum(CLIENT_HEARTBEAT) / 1000
        assert times_connected(node) == 1
