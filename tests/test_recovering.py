"""A majority lost for ever: a fork from the best ledger that is left, visibly another federation."""

import shutil
from pathlib import Path

import pytest
import safetensors.numpy

from ravnest_fed.cluster import Cluster, free_addresses
from ravnest_fed.errors import UsageError
from ravnest_fed.federation import FILE_NAME, INITIAL_MODEL, Federation
from ravnest_fed.links import parse_link
from ravnest_fed.recovering import recover
from ravnest_fed.verification import furthest, newest
from tests.tiny_federation import cluster_of, found_tiny, operator, said, until

pytestmark = pytest.mark.processes
LIMIT = 60.0


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of which one broker's folder is left, after some rounds with a checkpoint among them."""
    founded = found_tiny(tmp_path_factory.mktemp("left"), brokers=3, clients=2, checkpoint_every=2, keep=1)
    with cluster_of(founded) as cluster:
        cluster.start()
        until(
            lambda: said(cluster.brokers["b2"], "round=5 ") or said(cluster.brokers["b2"], "round=6 "), "rounds", LIMIT
        )
    for name in ("b1", "b3"):
        shutil.rmtree(founded.folder / "brokers" / name)
    return founded.folder


def test_a_fork_goes_on_from_the_model_with_the_members_keys(left: Path, tmp_path: Path) -> None:
    model = newest(furthest(left))
    addresses = free_addresses(2)
    words = [word for one in addresses for word in ("--broker", f"127.0.0.1:{one.client_port}:{one.peer_port}")]
    done = operator("recover", left, "--out", tmp_path / "fork", *words)
    assert done.exit_code == 0, done.output
    old, new = Federation.load(left / FILE_NAME), Federation.load(tmp_path / "fork" / FILE_NAME)
    assert new.fingerprint != old.fingerprint and len(new.brokers) == 2
    assert new.federation.forked_from == f"{old.fingerprint.hex()} at round {model.head.server_round}"
    assert set(new.member_by_id) == set(old.member_by_id)
    assert not set(new.broker_by_id) & set(old.broker_by_id)
    tensors = safetensors.numpy.load_file(tmp_path / "fork" / INITIAL_MODEL)
    for name in model.schema.offsets:
        assert (tensors[name] == model.state.view(model.schema, name)).all()
    link = parse_link((tmp_path / "fork/members/c1.link").read_text())
    assert link.fingerprint == new.fingerprint
    assert link.seed == parse_link((left / "members/c1.link").read_text()).seed


def test_the_fork_trains(left: Path, tmp_path: Path) -> None:
    made = recover(left, free_addresses(3), tmp_path / "fork").founded
    with Cluster(made, left.parent / "tiny.py") as cluster:
        cluster.start()
        until(lambda: said(cluster.brokers["b1"], "round committed"), "a round of the fork", LIMIT)
        shown = operator("status", made.folder)
        assert "fork of" in shown.output


def test_old_addresses_are_taken_over_and_nothing_is_overwritten(left: Path, tmp_path: Path) -> None:
    made = recover(left, [], tmp_path / "fork").founded
    old = Federation.load(left / FILE_NAME)
    assert [one.client_address for one in made.federation.brokers] == [one.client_address for one in old.brokers]
    with pytest.raises(UsageError, match="not empty"):
        recover(left, [], tmp_path / "fork")
