"""What commands refuse, each by one line that says what was wrong and what to do, and by an exit status of its own."""

import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from brokers.command import cli as broker_cli
from clients.command import cli as client_cli
from ravnest_fed import errors
from ravnest_fed.federation import FILE_NAME, Federation
from ravnest_fed.founding import OPERATOR_KEY, Founded
from ravnest_fed.identity import Identity
from ravnest_fed.ledger import Ledger
from ravnest_fed.links import parse_link
from tests.tiny_federation import federation_in, found_tiny, one_line_error, operator, write_recipe

KINDS = [kind for kind in errors.RavnestError.__subclasses__() if kind.__module__ == errors.__name__]
STATUSES = [kind.exit_status for kind in KINDS]


@pytest.fixture
def founded(tmp_path: Path) -> Founded:
    return found_tiny(tmp_path, brokers=1, clients=2)


def test_every_kind_of_error_has_a_status_of_its_own() -> None:
    assert len(set(STATUSES)) == len(STATUSES)
    assert not {0, 1} & set(STATUSES)


# --- init ------------------------------------------------------------------------------------------------------------


def make(tmp_path: Path, *arguments: object, brokers: tuple[str, ...] = ("127.0.0.1:7700",)) -> object:
    named = [word for address in brokers for word in ("--broker", address)]
    return operator("init", write_recipe(tmp_path), "--out", tmp_path / "made", *named, *arguments)


def test_init_makes_what_its_files_promise(tmp_path: Path) -> None:
    done = make(tmp_path, "--clients", 2, "--rounds", 5, brokers=("127.0.0.1:7700", "127.0.0.1:7710", "[::1]:7720"))
    assert done.exit_code == 0, done.output
    federation = federation_in(tmp_path / "made")
    assert [one.client_address for one in federation.brokers] == [
        "tcp://127.0.0.1:7700",
        "tcp://127.0.0.1:7710",
        "tcp://[::1]:7720",
    ]
    assert federation.stop.rounds == 5
    for number, member in enumerate(federation.members, 1):
        file = tmp_path / "made" / "members" / f"c{number}.link"
        link = parse_link(file.read_text())
        assert link.fingerprint == federation.fingerprint
        assert Identity(link.seed).node_id == member.node_id
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for key in (tmp_path / "made").rglob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("brokers", "named"),
    [
        (("127.0.0.1:7700", "127.0.0.1:7700"), "127.0.0.1:7700"),
        (("127.0.0.1:7700", "127.0.0.1:7701"), "127.0.0.1:7701"),
        (("127.0.0.1:7700:7800", "127.0.0.1:7701:7800"), "127.0.0.1:7800"),
    ],
)
def test_init_refuses_two_brokers_on_one_port(tmp_path: Path, brokers: tuple[str, ...], named: str) -> None:
    done = make(tmp_path, brokers=brokers)
    one_line_error(done.output, "same address", named)
    assert done.exit_code == errors.UsageError.exit_status
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "address", ["b1.example", "b1.example:0", "b1.example:x", ":7700", "b1.example:65535", "::1:7"]
)
def test_init_refuses_what_is_no_address(tmp_path: Path, address: str) -> None:
    done = make(tmp_path, brokers=(address,))
    one_line_error(done.output, repr(address), "write it like")
    assert done.exit_code == errors.UsageError.exit_status


def test_init_leaves_an_existing_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine.txt").write_text("mine")
    done = make(tmp_path)
    one_line_error(done.output, str(tmp_path / "made"), "not empty", "--out")
    assert done.exit_code == errors.UsageError.exit_status
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["mine.txt"]


def test_init_refuses_weights_that_do_not_fit_and_leaves_nothing(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    done = make(tmp_path, "--from", tmp_path / "other.safetensors")
    one_line_error(done.output, "other.safetensors", "does not fit", "weight")
    assert done.exit_code == errors.SchemaMismatch.exit_status
    assert not (tmp_path / "made").exists()


def test_init_starts_from_given_weights(tmp_path: Path) -> None:
    weights = {"weight": torch.full((3, 12), 0.5), "bias": torch.arange(3.0)}
    safetensors.torch.save_file(weights, tmp_path / "mine.safetensors")
    assert make(tmp_path, "--from", tmp_path / "mine.safetensors").exit_code == 0
    started = safetensors.torch.load_file(tmp_path / "made" / "model.safetensors")
    assert all(torch.equal(started[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("arguments", "kind", "parts"),
    [
        (("--set", "rounds.nonsense=3"), errors.FederationFileError, ("'rounds.nonsense'", "rounds.local_steps")),
        (("--set", "nonsense"), errors.UsageError, ("'nonsense'", "KEY=VALUE")),
        (("--set", "codecs.up=gzip"), errors.FederationFileError, ("codecs.up", "'gzip'", "fp32")),
        (("--set", "local_steps=many"), errors.FederationFileError, ("local_steps",)),
        (("--set", "momentum=0.9"), errors.FederationFileError, ("strategy.momentum", "fedavgm")),
        (("--until", "tomorrow"), errors.FederationFileError, ("stop.date", "tomorrow")),
        (("--until-metric", "accuracy"), errors.UsageError, ("accuracy", ">=")),
        (("--from", "nowhere.safetensors"), errors.SchemaMismatch, ("nowhere.safetensors",)),
    ],
)
def test_init_names_the_setting_that_cannot_be(
    tmp_path: Path, arguments: tuple[str, ...], kind: type[errors.RavnestError], parts: tuple[str, ...]
) -> None:
    done = make(tmp_path, *arguments)
    one_line_error(done.output, *parts)
    assert done.exit_code == kind.exit_status
    assert not (tmp_path / "made").exists()


def test_init_where_nothing_can_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = operator("init", write_recipe(tmp_path), "--broker", "a:1", "--out", tmp_path / "file" / "below")
    one_line_error(done.output, str(tmp_path / "file"))
    assert done.exit_code not in (0, 2)


def test_a_recipe_that_fails_is_named_with_its_line(tmp_path: Path) -> None:
    recipe = tmp_path / "bad.py"
    recipe.write_text("import ravnest_fed\n\nraise ValueError('no such data')\n")
    done = operator("init", recipe, "--broker", "a:1", "--out", tmp_path / "made")
    one_line_error(done.output, "bad.py", "no such data", "3")
    assert done.exit_code == errors.RecipeError.exit_status


def test_debug_keeps_the_traceback(tmp_path: Path) -> None:
    words = ["init", str(tmp_path / "no.py"), "--broker", "a:1", "--out", str(tmp_path / "made"), "--debug"]
    done = subprocess.run(
        [sys.executable, "-m", "ravnest_fed.commands.main", *words], capture_output=True, text=True, check=False
    )
    assert "Traceback" in done.stderr and "RecipeError" in done.stderr


# --- folders that are not what they should be ------------------------------------------------------------------------


def test_a_folder_that_is_no_federation(tmp_path: Path) -> None:
    done = operator("status", tmp_path)
    one_line_error(done.output, str(tmp_path / FILE_NAME), "ravnest-fed init")
    assert done.exit_code == errors.FederationFileError.exit_status
    for command in (("verify", tmp_path), ("export", tmp_path, "--out", tmp_path / "model.safetensors")):
        done = operator(*command)
        one_line_error(done.output, str(tmp_path), "no ledger")
        assert done.exit_code == errors.LedgerError.exit_status


def test_an_operator_key_that_others_can_read(founded: Founded) -> None:
    (founded.folder / OPERATOR_KEY).chmod(0o644)
    done = operator("status", founded.folder)
    one_line_error(done.output, OPERATOR_KEY, "chmod 600")
    assert done.exit_code == errors.IdentityError.exit_status


def run_broker(folder: Path) -> object:
    return CliRunner().invoke(broker_cli, ["run", str(folder)])


def test_a_broker_names_an_unknown_setting(founded: Founded) -> None:
    folder = founded.broker_folders[0]
    text = (folder / FILE_NAME).read_text()
    (folder / FILE_NAME).write_text(text.replace("[rounds]\n", "[rounds]\nspeed = 3\n"))
    done = run_broker(folder)
    one_line_error(done.output, str(folder / FILE_NAME), "unknown setting `speed` in `rounds`", "settings")
    assert done.exit_code == errors.FederationFileError.exit_status


def test_a_broker_refuses_a_federation_file_that_was_changed(founded: Founded) -> None:
    folder = founded.broker_folders[0]
    text = (folder / FILE_NAME).read_text()
    (folder / FILE_NAME).write_text(text.replace("local_steps = 2", "local_steps = 3"))
    done = run_broker(folder)
    one_line_error(done.output, str(folder / FILE_NAME), "changed after the operator signed it", "ravnest-fed init")
    assert done.exit_code == errors.FederationFileError.exit_status


def test_a_broker_refuses_the_ledger_of_another_federation(founded: Founded) -> None:
    folder = founded.broker_folders[0]
    Ledger(folder, bytes(32)).close()
    done = run_broker(folder)
    one_line_error(done.output, str(folder), "another federation", "empty directory")
    assert done.exit_code == errors.WrongFederation.exit_status


def test_a_broker_refuses_the_key_of_another_federation(founded: Founded, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    other = found_tiny(tmp_path / "second", brokers=1, clients=1)
    (other.broker_folders[0] / FILE_NAME).write_bytes((founded.broker_folders[0] / FILE_NAME).read_bytes())
    done = run_broker(other.broker_folders[0])
    one_line_error(done.output, str(other.broker_folders[0]), FILE_NAME, "copy")
    assert done.exit_code in (errors.UsageError.exit_status, errors.WrongFederation.exit_status)


def test_a_broker_without_its_model(founded: Founded) -> None:
    (founded.broker_folders[0] / "model.safetensors").write_bytes(b"not a model")
    done = run_broker(founded.broker_folders[0])
    one_line_error(done.output, "model.safetensors", "copy")
    assert done.exit_code == errors.LedgerError.exit_status


def test_a_ledger_that_is_no_database(founded: Founded) -> None:
    (founded.broker_folders[0] / "ledger.db").write_bytes(b"not a database, but long enough to be read as one" * 9)
    done = run_broker(founded.broker_folders[0])
    one_line_error(done.output, "ledger.db", "damaged")
    assert done.exit_code == errors.LedgerError.exit_status
    with pytest.raises(sqlite3.DatabaseError):
        sqlite3.connect(founded.broker_folders[0] / "ledger.db").execute("select * from meta")


def test_a_broker_folder_that_is_not_there(tmp_path: Path) -> None:
    done = run_broker(tmp_path / "b9")
    one_line_error(done.output, str(tmp_path / "b9"), "ravnest-fed init")
    assert done.exit_code == errors.UsageError.exit_status


# --- a client's link -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["nowhere.link", "ravnest://", "ravnest://AAAA", "ravnest://%%%"])
def test_a_link_that_is_none(tmp_path: Path, link: str) -> None:
    done = CliRunner().invoke(client_cli, ["join", link, "--recipe", str(write_recipe(tmp_path))])
    one_line_error(done.output, "link")
    assert done.exit_code == errors.UsageError.exit_status


def test_a_damaged_link_is_not_repeated(founded: Founded) -> None:
    """A link holds a secret, so an error must not print it."""
    text = founded.link_files[0].read_text().strip()
    done = CliRunner().invoke(client_cli, ["join", text[:-6] + "!!!!!!", "--recipe", "tiny.py"])
    one_line_error(done.output, "link")
    assert text[12:40] not in done.output


def test_a_recipe_that_is_not_there(founded: Founded, tmp_path: Path) -> None:
    done = CliRunner().invoke(client_cli, ["join", str(founded.link_files[0]), "--recipe", str(tmp_path / "no.py")])
    one_line_error(done.output, "no.py", "name a Python file")
    assert done.exit_code == errors.RecipeError.exit_status


# --- demo ------------------------------------------------------------------------------------------------------------


def test_demo_refuses_before_it_starts_a_process(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    cases = [
        (("--recipe", "no-such"), errors.RecipeError, ("no-such", "digits")),
        (("--recipe", recipe, "--summary", tmp_path / "no" / "s.json"), errors.UsageError, (str(tmp_path / "no"),)),
        (("--recipe", recipe, "--set", "pace=1"), errors.FederationFileError, ("'pace'",)),
        (("--recipe", recipe, "--keep", tmp_path), errors.UsageError, (str(tmp_path), "not empty")),
    ]
    for arguments, kind, parts in cases:
        done = operator("demo", *arguments)
        one_line_error(done.output, *parts)
        assert done.exit_code == kind.exit_status


def test_a_signed_file_reads_back_as_it_was_written(founded: Founded) -> None:
    assert federation_in(founded.folder) == founded.federation
    assert Federation.load(founded.broker_folders[0] / FILE_NAME).fingerprint == founded.federation.fingerprint


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("--when", "nights", "22:00-06:30"),
        ("--when", "08:00-08:00", "use idle"),
        ("--max-gpu-memory", "half", "6GB"),
        ("--max-gpu-memory", "6GB", "--device cuda"),
        ("--max-cpu", "2", "1% to 100%"),
        ("--upload-limit", "fast", "2MB/s"),
        ("--upload-limit", "10KB/s", "64KB/s or more"),
    ],
)
def test_a_limit_that_cannot_be_kept(founded: Founded, tmp_path: Path, option: str, value: str, remedy: str) -> None:
    words = ["join", str(founded.link_files[0]), "--recipe", str(write_recipe(tmp_path)), "--device", "cpu"]
    done = CliRunner().invoke(client_cli, [*words, option, value])
    one_line_error(done.output, option, remedy)
    assert done.exit_code == errors.UsageError.exit_status
