"""`ravnest-client probe` as a person calls it, on the digits example."""

import json
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner, Result

from clients import devices
from clients.command import cli
from ravnest_fed.capability import Capability
from ravnest_fed.errors import RecipeError, UsageError

DIGITS = Path(__file__).parent.parent / "examples" / "digits"


def call(*arguments: object) -> Result:
    # With one thread the test does not depend on what else the machine does.
    words = ["probe", *(str(one) for one in arguments), "--threads", "1"]
    return CliRunner().invoke(cli, words, env={"COLUMNS": "200"})


def test_digits_are_measured_shown_and_remembered(tmp_path: Path) -> None:
    first = call(DIGITS, "--json", "--seconds", "0.5", "--state", tmp_path)
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert found["recipe"] == "digits" and found["remembered"] is False and found["device"] == "cpu"
    speeds = found["speeds"]
    assert [one["micro_batch"] for one in speeds] == [2**power for power in range(len(speeds))]
    assert all(one["samples_per_second"] > 0 for one in speeds)
    assert found["micro_batch"] in [one["micro_batch"] for one in speeds]
    # The machine's own speed decides how far it climbs: there is a reason in any case.
    assert {"device", "micro_batch", "max_micro_batch", "speeds", "bandwidth_up", "bandwidth_down"} <= set(
        found["reasons"]
    )
    assert found["cores"] >= 1 and found["devices"][0]["kind"] == "cpu" and found["bandwidth_up"] is None

    second = json.loads(call(DIGITS, "--json", "--state", tmp_path).stdout)
    assert second["remembered"] is True and second["speeds"] == speeds

    table = call(DIGITS, "--state", tmp_path)
    assert table.exit_code == 0 and "remembered" in table.output
    for text in (
        "samples/s",
        f"{speeds[0]['samples_per_second']:.1f}",
        found["reasons"]["micro_batch"],
        "not measured",
    ):
        assert text in table.output

    third = json.loads(call(DIGITS, "--json", "--fresh", "--seconds", "0.1", "--state", tmp_path).stdout)
    assert third["remembered"] is False


def test_a_machine_that_tells_nothing_is_measured_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **named: object) -> object:
        raise OSError

    for name in ("virtual_memory", "cpu_count"):
        monkeypatch.setattr(psutil, name, broken)
    monkeypatch.delattr(psutil, "sensors_battery", raising=False)
    monkeypatch.setattr(devices.os, "cpu_count", lambda: None)
    result = call(DIGITS, "--json", "--seconds", "0.1", "--state", tmp_path)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["cores"] is None and found["memory_total"] is None and found["battery"] is None
    assert found["speeds"] and "battery" in found["reasons"]


def test_a_state_folder_that_cannot_be_written_costs_the_memory_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = call(DIGITS, "--json", "--seconds", "0.1", "--state", tmp_path / "file" / "state")
    assert result.exit_code == 0 and "not remembered" in result.stderr
    assert json.loads(result.stdout)["speeds"]


@pytest.mark.parametrize("device", ["toaster", "cuda:7", "mps"])
def test_a_device_that_is_not_there_is_refused_by_name(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    result = call(DIGITS, "--device", device)
    assert result.exit_code == UsageError.exit_status
    assert device in result.stderr and result.stderr.count("\n") == 1


def test_a_recipe_that_is_not_there_ends_it(tmp_path: Path) -> None:
    assert call(tmp_path / "none.py").exit_code == RecipeError.exit_status


def test_every_number_of_a_capability_is_shown(tmp_path: Path) -> None:
    found = json.loads(call(DIGITS, "--json", "--seconds", "0.1", "--state", tmp_path).stdout)
    assert set(Capability.__struct_fields__) <= set(found)
