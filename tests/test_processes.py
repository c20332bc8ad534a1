"""Real brokers and clients on loopback: what each says, and how it ends, when something is wrong at the other end."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from brokers.server import COMMITS_AT_ONCE
from ravnest_fed import errors
from ravnest_fed.cluster import Cluster, Node
from ravnest_fed.federation import Federation
from ravnest_fed.identity import Identity
from ravnest_fed.ledger import Ledger
from ravnest_fed.links import Link, parse_link
from tests.tiny_federation import (
    Ended,
    call,
    cluster_of,
    found_tiny,
    hashes_measured,
    one_line_error,
    operator,
    said,
    until,
    write_recipe,
)

pytestmark = pytest.mark.processes

ANSWER_SECONDS = 10.0
"""Ten seconds for a person, less the two in which torch is imported where nothing else runs."""


def ended(node: Node, limit: float = 60.0) -> int:
    """The exit status of a process that ends within `limit` seconds."""
    until(lambda: not node.alive, f"{node.name} ends; it said: {node.last_words()}", limit)
    return int(node.process.returncode)


def last_line(node: Node) -> str:
    return node.last_words() + "\n"


def join(cluster: Cluster, link: Link, recipe: Path | None = None) -> Ended:
    """Run a client with `link` to its end."""
    return call("clients.command", "join", link.text(), "--recipe", recipe or cluster.recipe, "--device", "cpu")


def link_of(cluster: Cluster, name: str) -> Link:
    return parse_link((cluster.founded.folder / "members" / f"{name}.link").read_text())


def status_of(cluster: Cluster) -> str:
    return operator("status", cluster.founded.folder).output


def reached(cluster: Cluster, broker: str, server_round: int) -> bool:
    """Whether a broker has committed a round, by its own words."""
    return said(cluster.brokers[broker], f"round={server_round} ") or said(
        cluster.brokers[broker], f"round={server_round}\n"
    )


@pytest.fixture(scope="module")
def start_up(lonely: Cluster) -> float:
    """Seconds that a client takes, on this machine as it is now, before it dials."""
    return join(lonely, link_of(lonely, "c2"), Path("no.py")).seconds


# --- one client where two are needed ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One broker, and one client of the two that a round needs."""
    founded = found_tiny(
        tmp_path_factory.mktemp("lonely"), brokers=1, clients=3, min_contributions=2, grace_seconds=0.5
    )
    with cluster_of(founded) as cluster:
        cluster.start_broker("b1")
        cluster.start_client("c1")
        until(lambda: said(cluster.clients["c1"], "contribution taken"), "c1's contribution is taken")
        yield cluster


def test_both_ends_say_that_one_of_two_is_there(lonely: Cluster) -> None:
    until(lambda: said(lonely.clients["c1"], "waiting 1/2"), "the client says waiting 1/2")
    assert "waiting 1/2" in status_of(lonely)


def test_a_key_that_is_no_members_is_refused(lonely: Cluster) -> None:
    stranger = msgspec.structs.replace(link_of(lonely, "c2"), seed=Identity.generate().seed)
    done = join(lonely, stranger)
    one_line_error(done.errors, "b1", "does not admit this key", "operator")
    assert done.status == errors.KeyRefused.exit_status


def test_a_broker_that_has_not_the_links_key_is_found_out(lonely: Cluster, start_up: float) -> None:
    link = link_of(lonely, "c2")
    other = msgspec.structs.replace(link.brokers[0], curve_key=Identity.generate().curve_public)
    done = join(lonely, msgspec.structs.replace(link, brokers=(other,)))
    one_line_error(done.errors, "b1", "does not prove the key", "operator")
    assert done.status == errors.KeyRefused.exit_status
    assert done.seconds - start_up < ANSWER_SECONDS


def test_a_client_that_comes_back_with_empty_hands_is_given_work(lonely: Cluster) -> None:
    """The round waits for it, so it must be told what to do although it still has to catch up."""
    lonely.start_client("c3")
    until(lambda: reached(lonely, "b1", 2), "two rounds are committed")
    lonely.kill("c3")
    until(lambda: "waiting 1/2" in status_of(lonely), "the round waits for a second client")
    lonely.start_client("c3")
    before = rounds_of(lonely)
    until(lambda: rounds_of(lonely) > before, "rounds go on")
    lonely.kill("c3")


def test_a_link_of_another_federation(lonely: Cluster) -> None:
    done = join(lonely, msgspec.structs.replace(link_of(lonely, "c2"), fingerprint=bytes(32)))
    one_line_error(done.errors, "b1", "another federation", "link")
    assert done.status == errors.WrongFederation.exit_status


def test_a_recipe_that_differs_is_turned_away(lonely: Cluster, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    recipe.write_text(recipe.read_text() + "\n# one line more\n")
    done = join(lonely, link_of(lonely, "c2"), recipe)
    one_line_error(done.errors, "b1", "recipe differs", "operator's file")
    assert done.status == errors.RecipeMismatch.exit_status


def test_a_port_in_use_is_named(lonely: Cluster) -> None:
    node = lonely.brokers["b1"]
    folder = lonely.founded.broker_folders[0]
    address = lonely.founded.federation.brokers[0].client_address
    done = call("brokers.command", "run", folder)
    assert done.status == errors.AddressInUse.exit_status
    one_line_error(done.errors.splitlines()[-1], address, "in use", "bind another one")
    assert node.alive


def test_no_broker_there_is_said_within_ten_seconds(tmp_path: Path, start_up: float) -> None:
    founded = found_tiny(tmp_path, brokers=2, clients=1)
    with socket.socket() as deaf:
        # One address where nothing listens, and one that accepts a connection and then says nothing.
        deaf.bind(("127.0.0.1", founded_port(founded.federation, 1)))
        deaf.listen()
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(
                call, "clients.command", "join", founded.link_files[0], "--recipe", tmp_path / "tiny.py"
            )
            asked = operator("status", founded.folder)
            done = joining.result()
    addresses = [broker.client_address for broker in founded.federation.brokers]
    one_line_error(done.errors, "does not answer", *addresses, "check the network")
    assert done.status == errors.BrokerUnreachable.exit_status
    assert done.seconds - start_up < ANSWER_SECONDS
    one_line_error(asked.output.splitlines()[-1], "no broker answered", "check that the brokers run")
    assert asked.exit_code == errors.BrokerUnreachable.exit_status


def founded_port(federation: Federation, broker: int) -> int:
    return int(federation.brokers[broker].client_address.rpartition(":")[2])


# --- a training that goes on whatever some of its clients do ---------------------------------------------------------


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three brokers and two sound clients, in a training without an end; c3 to c5 are members as well."""
    founded = found_tiny(
        tmp_path_factory.mktemp("training"), brokers=3, clients=5, min_contributions=2, grace_seconds=0.5
    )
    with pytest.MonkeyPatch.context() as patch, cluster_of(founded) as cluster:
        patch.setenv("TINY_PAUSE", "0.05")
        for name in ("b1", "b2", "b3"):
            cluster.start_broker(name)
        for name in ("c1", "c2"):
            cluster.start_client(name)
        until(lambda: reached(cluster, "b1", 2), "two rounds are committed")
        yield cluster


def goes_on(cluster: Cluster) -> None:
    """Assert that rounds are committed after this moment."""
    before = rounds_of(cluster)
    until(lambda: rounds_of(cluster) > before + 1, "rounds go on")


def rounds_of(cluster: Cluster) -> int:
    return cluster.brokers["b1"].log.read_text().count("round committed")


def test_a_model_off_the_schema_ends_the_client_alone(training: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_WIDTH", "13")
    node = training.start_client("c3")
    assert ended(node) == errors.SchemaMismatch.exit_status
    one_line_error(last_line(node), "tiny.py", "weight", "13", "12")
    goes_on(training)


def test_a_client_without_data_ends_alone(training: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_EMPTY", "1")
    node = training.start_client("c4")
    assert ended(node) == errors.NoDataError.exit_status
    one_line_error(last_line(node), "tiny.py", "data")
    goes_on(training)


def test_a_late_client_comes_to_the_same_model(training: Cluster) -> None:
    # More rounds than a broker announces at once.
    until(lambda: rounds_of(training) > COMMITS_AT_ONCE, "enough rounds are committed")
    node = training.start_client("c5")
    until(lambda: said(node, "contribution taken"), "the late client takes part")
    begun = rounds_of(training)
    until(lambda: rounds_of(training) > begun + 3, "rounds go on with it")
    measured = hashes_measured(training)
    late = training.founded.federation.members[4].node_id
    shared = [by_client for by_client in measured.values() if late in by_client and len(by_client) > 1]
    assert shared
    assert all(len(set(by_client.values())) == 1 for by_client in shared)


# --- a loss that is not a number -------------------------------------------------------------------------------------


def test_a_client_whose_loss_is_nan_says_so_and_the_round_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grace time is longer than the test: a round that closes did not wait for the client that had nothing."""
    founded = found_tiny(tmp_path, brokers=1, clients=3, min_contributions=2, grace_seconds=600, rounds=3)
    with cluster_of(founded) as cluster:
        cluster.start_broker("b1")
        monkeypatch.setenv("TINY_NAN", "1")
        bad = cluster.start_client("c3")
        until(lambda: said(bad, "nothing to send"), "the client says that it sends nothing")
        monkeypatch.delenv("TINY_NAN")
        sound = [cluster.start_client(name) for name in ("c1", "c2")]
        assert [ended(node) for node in (*sound, bad)] == [0, 0, 0]
    told = bad.log.read_text()
    assert "loss is not finite after step 1 of 2 of round 1" in told
    assert "lower the learning rate" in told
    assert "0 contributions counted" in told
    assert all("3 contributions counted" in node.log.read_text() for node in sound)
    with_nan = founded.federation.members[2].node_id
    ledger = Ledger(founded.broker_folders[0], founded.federation.fingerprint, create=False)
    assert ledger.last_round() == 3
    assert all(with_nan not in [one.client for one in body.counted] for _, body in ledger.commits())
    ledger.close()
