"""A probe in a process of its own: what it brings back, and how one that crashes or hangs is survived."""

import os
from pathlib import Path

import pytest

from clients.probe_process import ProbeFailed, probe_apart
from clients.remembered import FILE_NAME
from ravnest_fed.partition import Partition
from tests.tiny_federation import write_recipe

PART = Partition(1, 2, 5)


def appended(folder: Path, text: str) -> Path:
    path = write_recipe(folder)
    path.write_text(path.read_text() + text)
    return path


@pytest.mark.processes
def test_a_probe_apart_measures_this_clients_part_and_remembers_it(tmp_path: Path) -> None:
    found = probe_apart(appended(tmp_path, "\nprint('loading')\n"), PART, "cpu", 1, tmp_path / "state", seconds=0.5)
    # The recipe has 64 samples a client.
    assert found.device == "cpu" and found.speeds[-1].micro_batch == 64
    kept = (tmp_path / "state" / FILE_NAME).read_text()
    assert '"1/2/5"' in kept
    # Remembered: the recipe's steps would take minutes now.
    os.environ["TINY_PAUSE"] = "60"
    try:
        again = probe_apart(tmp_path / "tiny.py", PART, "cpu", 1, tmp_path / "state", limit=60.0)
    finally:
        del os.environ["TINY_PAUSE"]
    assert again.speeds == found.speeds


@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("\nos.kill(os.getpid(), 9)\n", "status -9"),
        ("\nraise ValueError('no data here')\n", "status 4: error: recipe .*no data here"),
        ("\nos.write(1, b'hello')\n", "nothing that can be read"),
    ],
)
def test_a_probe_that_fails_is_told_in_one_line(tmp_path: Path, text: str, finding: str) -> None:
    with pytest.raises(ProbeFailed, match=finding) as caught:
        probe_apart(appended(tmp_path, text), PART, "cpu", 1, tmp_path / "state", seconds=0.2)
    assert "\n" not in str(caught.value)


@pytest.mark.processes
def test_a_probe_that_hangs_is_ended(tmp_path: Path) -> None:
    told = "open(os.path.join(os.path.dirname(__file__), 'pid'), 'w').write(str(os.getpid()))"
    path = appended(tmp_path, f"\n{told}\ntime.sleep(600)\n")
    pid = tmp_path / "pid"
    with pytest.raises(ProbeFailed, match="given up"):
        probe_apart(path, PART, "cpu", 1, tmp_path / "state", cancelled=lambda: pid.exists() and pid.read_text() != "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    with pytest.raises(ProbeFailed, match="longer than"):
        probe_apart(path, PART, "cpu", 1, tmp_path / "state", limit=0.2)
