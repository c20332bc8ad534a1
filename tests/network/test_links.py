"""Uploads and downloads over links that are slow, that stall, and that are cut and restored."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ravnest_fed.cluster import Cluster, Node
from ravnest_fed.hashing import CHUNK_SIZE
from ravnest_fed.net.sockets import CLIENT_HEARTBEAT
from ravnest_fed.transfer import MAX_WINDOW, STALL_SECONDS
from tests.network.federations import dial_through, found_wide, start_with_heartbeat
from tests.network.proxy import Proxy
from tests.tiny_federation import said, until

pytestmark = pytest.mark.processes

MEGABIT = 125_000.0
"""Bytes a second of one Mbit/s."""
OVERHEAD = 1.02
"""Most bytes on the wire for each byte of a delta: frames and the curve's box around them."""


@contextmanager
def one_client(folder: Path, megabytes: float) -> Iterator[tuple[Cluster, Proxy]]:
    """One broker, which runs, and the proxy through which one client, which does not run yet, will reach it."""
    cluster = found_wide(folder, megabytes, rounds=1)
    with cluster, Proxy(cluster.founded.federation.brokers[0].client_address) as proxy:
        dial_through(cluster, "c1", {"b1": proxy.address})
        cluster.start_broker("b1")
        yield cluster, proxy


def delta_bytes(cluster: Cluster) -> int:
    """Bytes of a client's delta."""
    return 4 * cluster.founded.federation.schema.parameter_count


def counted_in_the_end(node: Node, limit: float = 60.0) -> None:
    """Assert that the client ends with the training, and that its only contribution was counted."""
    until(lambda: not node.alive, f"the client ends; it said: {node.last_words()}", limit)
    assert "training has ended" in node.last_words() and "1 contributions counted" in node.last_words()
    assert node.process.returncode == 0


def times_connected(node: Node) -> int:
    return node.log.read_text().count("connected  broker=")


def slow_upload(cluster: Cluster, proxy: Proxy, node: Node) -> float:
    """Over a link of 1 Mbit/s up, the seconds from the end of training until the client has ended, its work counted."""
    proxy.throttle(up=MEGABIT)
    until(lambda: said(node, "trained"), "the client has trained")
    began = time.monotonic()
    counted_in_the_end(node, 150.0)
    return time.monotonic() - began


@pytest.mark.long
def test_a_delta_of_many_seconds_gets_through_a_slow_link(tmp_path: Path) -> None:
    """The upload takes longer than a stalled donor is waited for, and than the heartbeat allows silence."""
    with one_client(tmp_path, 1.25) as (cluster, proxy):
        node = start_with_heartbeat(cluster, "c1", 1_500, 4_500)
        seconds = slow_upload(cluster, proxy, node)
        assert seconds > STALL_SECONDS + 1.0
        assert times_connected(node) == 1 and proxy.opened == 1
        assert proxy.up < OVERHEAD * delta_bytes(cluster) + 20_000


@pytest.mark.long
def test_a_delta_of_more_than_a_minute_gets_through_a_slow_link(tmp_path: Path) -> None:
    """As above, by the client's own command, with an upload longer than its heartbeat allows silence."""
    with one_client(tmp_path, 8.0) as (cluster, proxy):
        node = cluster.start_client("c1")
        seconds = slow_upload(cluster, proxy, node)
        assert seconds > sum(CLIENT_HEARTBEAT) / 1000
        assert times_connected(node) == 1 and proxy.opened == 1
        assert proxy.up < OVERHEAD * delta_bytes(cluster) + 20_000


def test_an_upload_that_was_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    with one_client(tmp_path, 3.0) as (cluster, proxy):
        proxy.throttle(up=16 * MEGABIT)
        node = cluster.start_client("c1")
        total = delta_bytes(cluster)
        until(lambda: proxy.up > 0.6 * total, "more than half of the delta is through")
        proxy.cut()
        before = proxy.up
        until(lambda: said(node, "home broker lost"), "the client notices")
        assert not said(node, "contribution taken")
        proxy.restore()
        counted_in_the_end(node)
        assert said(node, "reconnected")
        # What had passed the proxy is not sent again, but for one chunk that the cut tore.
        assert proxy.up - before < OVERHEAD * (total - before) + CHUNK_SIZE + 20_000
        assert proxy.up - before < 0.6 * total


@pytest.mark.long
def test_an_upload_that_is_cut_again_and_again_is_done_in_the_end(tmp_path: Path) -> None:
    """No connection lives long enough for the whole delta."""
    with one_client(tmp_path, 4.0) as (cluster, proxy):
        proxy.throttle(up=16 * MEGABIT)
        node = cluster.start_client("c1")
        total, cuts = delta_bytes(cluster), 0
        while proxy.up < 0.75 * total:
            start = proxy.up
            until(lambda start=start: proxy.up > start + 0.25 * total, "a quarter of the delta is through")  # type: ignore[misc]
            proxy.cut()
            cuts += 1
            proxy.restore()
        counted_in_the_end(node)
        assert cuts == 3 and proxy.opened == 4
        assert proxy.up < OVERHEAD * total + cuts * CHUNK_SIZE + 20_000


@pytest.mark.long
def test_an_upload_that_stalled_longer_than_a_donor_is_waited_for_goes_on_over_the_same_connection(
    tmp_path: Path,
) -> None:
    with one_client(tmp_path, 4.0) as (cluster, proxy):
        proxy.throttle(up=16 * MEGABIT)
        node = cluster.start_client("c1")
        total = delta_bytes(cluster)
        until(lambda: proxy.up > 0.5 * total, "half of the delta is through")
        proxy.stall()
        stalled = time.monotonic()
        until(lambda: time.monotonic() - stalled > STALL_SECONDS + 1.0, "the broker has given the transfer up")
        proxy.flow()
        counted_in_the_end(node, 30.0)
        assert times_connected(node) == 1
        # What was asked for when the link stalled comes twice at the most; what had arrived does not.
        assert proxy.up < OVERHEAD * total + MAX_WINDOW * CHUNK_SIZE + 20_000
        assert proxy.up < 1.5 * total + MAX_WINDOW * CHUNK_SIZE


def test_an_initial_model_that_was_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    with one_client(tmp_path, 3.0) as (cluster, proxy):
        proxy.throttle(down=16 * MEGABIT)
        node = cluster.start_client("c1")
        total = (cluster.founded.folder / "model.safetensors").stat().st_size
        until(lambda: proxy.down > 0.6 * total, "more than half of the model is through")
        proxy.cut()
        before = proxy.down
        proxy.restore()
        until(lambda: said(node, "trains on"), "the client has the model")
        assert said(node, "reconnected")
        assert proxy.down - before < OVERHEAD * (total - before) + CHUNK_SIZE + 20_000
        assert proxy.down - before < 0.6 * total
        cluster.kill("c1")
