"""Uploads and downloads over links that are slow, that stall, and that are cut and restored."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ravnest_fed.cluster import Cluster, Node
from ravnest_fed.hashing import CHUNK_SIZE
from ravnest_fed.transfer import MIN_WINDOW, STALL_SECONDS
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
    """Bytes of a client's delta, which is one shard."""
    schema = cluster.founded.federation.schema
    assert len(schema.shards) == 1
    return 4 * schema.parameter_count


def counted_in_the_end(node: Node, limit: float = 60.0) -> None:
    """Assert that the client ends with the training, and that its only contribution was counted."""
    until(lambda: not node.alive, f"the client ends; it said: {node.last_words()}", limit)
    assert "training has ended" in node.last_words() and "1 contributions counted" in node.last_words()
    assert node.process.returncode == 0


def times_connected(node: Node) -> int:
    return node.log.read_text().count("connected  broker=")


def uploaded_since(proxy: Proxy, start: int) -> int:
    return proxy.up - start


def slow_upload(cluster: Cluster, proxy: Proxy, node: Node) -> float:
    """Slow the link down once the client trains; returns the seconds from there to its end with a counted contribution."""
    until(lambda: said(node, "connected"), "the client is there")
    proxy.throttle(MEGABIT)
    until(lambda: said(node, "trained"), "the client has trained")
    began = time.monotonic()
    counted_in_the_end(node, 150.0)
    return time.monotonic() - began


def test_a_delta_of_many_seconds_gets_through_a_slow_link(tmp_path: Path) -> None:
    """The upload takes far longer than a stalled donor is waited for, and than a connection without heartbeats lives."""
    with one_client(tmp_path, 1.5) as (cluster, proxy):
        node = start_with_heartbeat(cluster, "c1", 1_500, 4_500)
        seconds = slow_upload(cluster, proxy, node)
        assert seconds > STALL_SECONDS + 3.0
        assert times_connected(node) == 1 and proxy.opened == 1
        assert proxy.up < OVERHEAD * delta_bytes(cluster) + 20_000


@pytest.mark.long
def test_a_delta_of_more_than_a_minute_gets_through_a_slow_link(tmp_path: Path) -> None:
    """As above, by the client's own command, with an upload longer than its heartbeats allow silence."""
    with one_client(tmp_path, 8.0) as (cluster, proxy):
        node = cluster.start_client("c1")
        seconds = slow_upload(cluster, proxy, node)
        assert seconds > 60.0
        assert times_connected(node) == 1 and proxy.opened == 1
        assert proxy.up < 1.1 * delta_bytes(cluster)


def test_an_upload_that_was_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    with one_client(tmp_path, 4.0) as (cluster, proxy):
        node = cluster.start_client("c1")
        until(lambda: said(node, "connected"), "the client is there")
        proxy.throttle(10 * MEGABIT)
        total = delta_bytes(cluster)
        until(lambda: proxy.up > 0.6 * total, "more than half of the delta is through")
        proxy.cut()
        before = proxy.up
        until(lambda: said(node, "home broker lost"), "the client notices")
        assert not said(node, "contribution taken")
        proxy.restore()
        counted_in_the_end(node)
        assert said(node, "reconnected")
        # What had passed the proxy is not sent again, but for one chunk that the cut tore and what was on its way.
        assert proxy.up - before < OVERHEAD * (total - before) + 2 * CHUNK_SIZE
        assert proxy.up - before < 0.6 * total


def test_an_upload_that_is_cut_again_and_again_is_done_in_the_end(tmp_path: Path) -> None:
    """No connection lives long enough for the whole delta."""
    with one_client(tmp_path, 4.0) as (cluster, proxy):
        node = cluster.start_client("c1")
        until(lambda: said(node, "connected"), "the client is there")
        proxy.throttle(20 * MEGABIT)
        total, cuts = delta_bytes(cluster), 0
        while proxy.up < 0.75 * total:
            start = proxy.up
            until(lambda start=start: proxy.up > start + 0.25 * total, "a quarter of the delta is through")  # type: ignore[misc]
            proxy.cut()
            cuts += 1
            proxy.restore()
        counted_in_the_end(node)
        assert cuts == 3 and proxy.opened == 4
        assert proxy.up < OVERHEAD * total + 2 * cuts * CHUNK_SIZE


def test_an_upload_that_stalled_longer_than_a_donor_is_waited_for_goes_on_over_the_same_connection(
    tmp_path: Path,
) -> None:
    with one_client(tmp_path, 4.0) as (cluster, proxy):
        node = cluster.start_client("c1")
        until(lambda: said(node, "connected"), "the client is there")
        proxy.throttle(20 * MEGABIT)
        total = delta_bytes(cluster)
        until(lambda: proxy.up > 0.5 * total, "half of the delta is through")
        proxy.stall()
        stalled = time.monotonic()
        until(lambda: time.monotonic() - stalled > STALL_SECONDS + 1.0, "the broker has given the transfer up")
        proxy.flow()
        counted_in_the_end(node, 30.0)
        assert times_connected(node) == 1
        # At most the window's worth is asked for a second time.
        assert proxy.up < OVERHEAD * total + (MIN_WINDOW + 7) * CHUNK_SIZE


def test_an_initial_model_that_was_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    with one_client(tmp_path, 24.0) as (cluster, proxy):
        node = cluster.start_client("c1")
        total = (cluster.founded.folder / "model.safetensors").stat().st_size
        until(lambda: proxy.down > 0.3 * total, "a part of the model is through")
        proxy.cut()
        before = proxy.down
        assert before < 0.95 * total
        proxy.restore()
        until(lambda: said(node, "trains on"), "the client has the model")
        # The window is in the buffers of the sockets when the connection is cut: passed on, and never read.
        assert proxy.down - before < OVERHEAD * (total - before) + 12 * CHUNK_SIZE
        assert said(node, "reconnected")
        cluster.kill("c1")
