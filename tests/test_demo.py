"""The demo as people run it: what it tells, what it leaves behind, and what its ledgers prove."""

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch

from ravnest_fed import errors
from ravnest_fed.facts import Body, decode
from ravnest_fed.federation import FILE_NAME, Federation
from ravnest_fed.ledger import Ledger
from ravnest_fed.recipe import load_recipe
from tests.tiny_federation import Ended, call, one_line_error, operator, until, write_recipe

pytestmark = pytest.mark.processes


# --- a run to its end ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A folder with the recipe, the summary and the federation of a demo of three brokers and two clients."""
    folder = tmp_path_factory.mktemp("demo")
    words = ["--recipe", write_recipe(folder), "--clients", 2, "--rounds", 3]
    words += ["--summary", folder / "summary.json", "--keep", folder / "kept"]
    return folder, call("ravnest_fed.commands.main", "demo", *words)


def summary_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_the_demo_ends_well_and_leaves_no_process(kept: tuple[Path, Ended]) -> None:
    folder, done = kept
    assert done.status == 0, done.errors
    assert [line.split()[:2] for line in done.output.splitlines()[1:4]] == [["round", str(one)] for one in (1, 2, 3)]
    assert "every living replica holds the same model" in done.output
    assert not processes_of(folder)


def test_the_summary_has_what_it_promises(kept: tuple[Path, Ended]) -> None:
    summary = summary_in(kept[0])
    final = summary["final"]
    assert final["server_round"] == 3
    assert final["metrics"]["size"] > 0
    assert set(summary["brokers"]) == {"b1", "b2", "b3"}
    assert set(summary["clients"]) == {"c1", "c2"}
    for node in (summary["brokers"] | summary["clients"]).values():
        assert (node["server_round"], node["model_hash"], node["died"]) == (3, final["model_hash"], False)
    for client in summary["clients"].values():
        assert client["contributions"] == 3
        assert client["local_steps"] == 3 * 2
        assert client["num_examples"] == 3 * 2 * 8
        assert client["bytes_up"] > 0 and client["bytes_down"] > 0
    assert [one["server_round"] for one in summary["rounds"]] == [1, 2, 3]
    for one in summary["rounds"]:
        assert one["contributions"] == 2
        assert one["seconds"] > 0 and one["bytes_up"] > 0 and one["bytes_down"] > 0
        assert one["metrics"]["size"] > 0
    assert summary["rounds"][-1]["model_hash"] == final["model_hash"]


def test_what_export_writes_is_the_recipes_model(kept: tuple[Path, Ended]) -> None:
    folder, _ = kept
    done = operator("export", folder / "kept", "--out", folder / "model.safetensors")
    assert done.exit_code == 0, done.output
    assert summary_in(folder)["final"]["model_hash"] in done.output
    model = load_recipe(folder / "tiny.py").recipe.model()
    model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
    size = float(sum(one.detach().square().sum() for one in model.parameters()))
    assert size == pytest.approx(summary_in(folder)["final"]["metrics"]["size"], rel=1e-6)
    initial = safetensors.torch.load_file(folder / "kept" / "model.safetensors")
    assert not torch.equal(model.state_dict()["weight"], initial["weight"])


def test_export_into_no_directory(kept: tuple[Path, Ended]) -> None:
    done = operator("export", kept[0] / "kept", "--out", kept[0] / "no" / "model.safetensors")
    one_line_error(done.output, str(kept[0] / "no"), "make it first")
    assert done.exit_code == errors.UsageError.exit_status


# --- proof -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(kept: tuple[Path, Ended], tmp_path: Path) -> Path:
    """A copy of what the demo kept, to be damaged; `copied / "brokers" / "b2"` is the broker's folder."""
    return Path(shutil.copytree(kept[0] / "kept", tmp_path / "copied"))


def refused(folder: Path, *parts: str) -> None:
    """Assert that verification fails with one line that names b2 and all `parts`."""
    done = operator("verify", folder)
    one_line_error(done.output.splitlines()[-1], "b2", *parts)
    assert done.exit_code == errors.VerificationError.exit_status


def damage(file: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def body_of(folder: Path, server_round: int) -> Body:
    ledger = Ledger(folder, Federation.load(folder / FILE_NAME).fingerprint, create=False)
    commit = ledger.commit(server_round)
    ledger.close()
    assert commit is not None
    return decode(Body, commit.body)


@contextmanager
def database(folder: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(folder / "ledger.db")
    with connection:
        yield connection
    connection.close()


def flip_in_record(folder: Path, part: bytes) -> None:
    """Flip a bit of the first byte of `part` within the record of round 2."""
    with database(folder) as db:
        record = bytearray(db.execute("select record from commits where server_round = 2").fetchone()[0])
        record[record.index(part)] ^= 1
        db.execute("update commits set record = ? where server_round = 2", (bytes(record),))


def test_every_ledger_is_proven(copied: Path, kept: tuple[Path, Ended]) -> None:
    for folder, names in ((copied, ("b1", "b2", "b3")), (copied / "brokers" / "b2", ("b2",))):
        done = operator("verify", folder)
        assert done.exit_code == 0, done.output
        final = summary_in(kept[0])["final"]["model_hash"]
        expected = [f"{name}: rounds 1 to 3 proven from the initial model, model hash {final}" for name in names]
        assert done.output.splitlines() == expected


def test_verifying_takes_nothing_from_a_broker_that_still_writes(copied: Path) -> None:
    part = copied / "brokers" / "b2" / "blobs" / f"{bytes(32).hex()}.part"
    part.write_bytes(b"half a blob")
    assert operator("verify", copied).exit_code == 0
    assert part.read_bytes() == b"half a blob"


def test_a_byte_of_an_update(copied: Path) -> None:
    b2 = copied / "brokers" / "b2"
    blob = body_of(b2, 2).updates[0].hash.hex()
    damage(b2 / "blobs" / blob)
    refused(copied, "round 2", blob, "damaged")


def test_a_byte_of_the_evidence_where_manifests_lie(copied: Path) -> None:
    b2 = copied / "brokers" / "b2"
    blob = body_of(b2, 3).evidence.hash.hex()
    damage(b2 / "blobs" / blob)
    refused(copied, "round 3", blob, "damaged")


def test_a_blob_that_is_gone(copied: Path) -> None:
    b2 = copied / "brokers" / "b2"
    blob = body_of(b2, 1).updates[0].hash.hex()
    (b2 / "blobs" / blob).unlink()
    refused(copied, "round 1", blob)


def test_a_vote(copied: Path) -> None:
    b2 = copied / "brokers" / "b2"
    ledger = Ledger(b2, Federation.load(b2 / FILE_NAME).fingerprint, create=False)
    commit = ledger.commit(2)
    ledger.close()
    assert commit is not None
    flip_in_record(b2, commit.votes[0].signature)
    refused(copied, "round 2", "vote", "wrong signature")


def test_a_model_hash_in_a_commit(copied: Path) -> None:
    b2 = copied / "brokers" / "b2"
    flip_in_record(b2, body_of(b2, 2).model_hash)
    refused(copied, "round 2", "hash")


def test_the_first_byte_of_a_commit(copied: Path) -> None:
    b2 = copied / "brokers" / "b2"
    with database(b2) as db:
        record = db.execute("select record from commits where server_round = 2").fetchone()[0]
        db.execute("update commits set record = ? where server_round = 2", (b"\xff" + record[1:],))
    refused(copied, "round 2")


def test_the_hash_beside_a_commit(copied: Path) -> None:
    b2 = copied / "brokers" / "b2"
    with database(b2) as db:
        db.execute("update commits set body_hash = zeroblob(32) where server_round = 2")
    refused(copied, "round 2", "hash")


def test_a_commit_that_is_gone(copied: Path) -> None:
    with database(copied / "brokers" / "b2") as db:
        db.execute("delete from commits where server_round = 2")
    refused(copied, "round 2")


def test_another_initial_model(copied: Path) -> None:
    file = copied / "brokers" / "b2" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    refused(copied, "initial model")


# --- runs that are cut short -----------------------------------------------------------------------------------------


class Running:
    """A demo in a process of its own, with `folder` for its recipe and what it writes."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        words = ["--recipe", str(write_recipe(folder)), "--keep", str(folder / "kept"), *arguments]
        self._output = folder / "output"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ravnest_fed.commands.main", "demo", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def seen(self, text: str) -> None:
        until(lambda: text in self.output, f"the demo prints {text!r}; it printed {self.output}")

    def kill(self, name: str) -> None:
        """Kill one node of the demo, as a power cut would."""
        (pid,) = [
            pid for pid, line in processes_of(self.folder).items() if line.endswith((f"/{name}", f"/{name}.link"))
        ]
        psutil.Process(pid).kill()


def processes_of(folder: Path) -> dict[int, str]:
    """The brokers and clients whose folder or link lies below `folder`: by process id, that path."""
    found = {}
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and words[1:2] == ["-m"] and len(words) > 4:
            path = words[4]
            if words[2] in ("brokers.command", "clients.command") and path.startswith(f"{folder}/"):
                found[process.pid] = path
    return found


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[Running]:
    demo = Running(folder, *arguments)
    try:
        yield demo
    finally:
        demo.process.kill()
        demo.process.wait()
        for pid in processes_of(folder):
            psutil.Process(pid).kill()


@pytest.mark.parametrize(
    ("number", "when"), [(signal.SIGINT, "round 2 "), (signal.SIGTERM, "1 clients"), (signal.SIGHUP, "1 clients")]
)
def test_a_demo_that_is_interrupted_leaves_no_process(tmp_path: Path, number: signal.Signals, when: str) -> None:
    with running(tmp_path, "--clients", "1", "--brokers", "1", "--rounds", "100000") as demo:
        demo.seen(when)
        until(lambda: len(processes_of(tmp_path)) == 2, "both processes run")
        demo.process.send_signal(number)
        assert demo.process.wait(60) == 130
        assert not processes_of(tmp_path)
        assert demo.output.splitlines()[-1] == "interrupted"
        assert "Traceback" not in demo.output


def test_an_impatient_second_interrupt_leaves_no_process_either(tmp_path: Path) -> None:
    with running(tmp_path, "--clients", "1", "--brokers", "2", "--rounds", "100000") as demo:
        until(lambda: len(processes_of(tmp_path)) == 3, "all processes run")
        # A stopped process cannot end when it is asked to: the demo waits for it when the second interrupt comes.
        halted = [pid for pid, path in processes_of(tmp_path).items() if path.endswith("/b1")]
        psutil.Process(halted[0]).suspend()
        demo.process.send_signal(signal.SIGINT)
        until(lambda: len(processes_of(tmp_path)) < 3, "the demo has begun to stop")
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(60) == 130
        assert not processes_of(tmp_path)
        assert "Traceback" not in demo.output


@pytest.mark.long
def test_killed_nodes_stand_in_the_summary_and_training_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_PAUSE", "0.05")
    arguments = ["--clients", "3", "--rounds", "12", "--summary", str(tmp_path / "summary.json")]
    with running(tmp_path, *arguments, "--set", "grace_seconds=0.5") as demo:
        demo.seen("round 1 ")
        demo.kill("c3")
        demo.seen("c3 died")
        demo.kill("b2")
        demo.seen("b2 died")
        assert demo.process.wait(60) == 0, demo.output
    assert "died: b2, c3" in demo.output.splitlines()[-2]
    summary = summary_in(tmp_path)
    assert summary["final"]["server_round"] == 12
    nodes = summary["brokers"] | summary["clients"]
    assert {name for name, node in nodes.items() if node["died"]} == {"b2", "c3"}
    for name in ("b2", "c3"):
        assert 1 <= nodes[name]["server_round"] < 12
        committed = summary["rounds"][nodes[name]["server_round"] - 1]["model_hash"]
        assert nodes[name]["model_hash"] == committed
    for name in ("b1", "b3", "c1", "c2"):
        assert (nodes[name]["server_round"], nodes[name]["model_hash"]) == (12, summary["final"]["model_hash"])
    assert operator("verify", tmp_path / "kept").exit_code == 0


def test_a_demo_without_a_majority_says_who_died(tmp_path: Path) -> None:
    with running(tmp_path, "--clients", "1", "--brokers", "1", "--rounds", "100000") as demo:
        until(lambda: len(processes_of(tmp_path)) == 2, "both processes run")
        demo.kill("b1")
        assert demo.process.wait(60) == errors.ClusterError.exit_status
        assert not processes_of(tmp_path)
    one_line_error(demo.output.splitlines()[-1], "b1 died", str(tmp_path / "kept"))


def test_a_demo_whose_clients_all_fail_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_EMPTY", "1")
    with running(tmp_path, "--clients", "1", "--brokers", "1") as demo:
        assert demo.process.wait(60) == errors.ClusterError.exit_status
    one_line_error(demo.output.splitlines()[-1], "every client died", "no samples", "logs")
    assert not processes_of(tmp_path)
