"""What a client says of its machine, with fakes of the driver's library."""

import sys
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch

from clients import devices


def fake_nvml(names: list[bytes | str], failing: str = "") -> ModuleType:
    module = ModuleType("pynvml")

    def act(name: str, result: object) -> object:
        def call(*arguments: object) -> object:
            if name == failing:
                raise RuntimeError("NVML_ERROR_NOT_SUPPORTED")
            return result(*arguments) if callable(result) else result

        return call

    for name, result in {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": len(names),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: names[handle],
    }.items():
        setattr(module, name, act(name, result))
    return module


def test_a_gpu_that_torch_cannot_use_is_told_with_the_way_to_mend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([b"NVIDIA GeForce RTX 3060", "Tesla T4"]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    hint = devices.overlooked_gpus(torch.device("cpu"))
    assert hint.startswith("NVIDIA GeForce RTX 3060, Tesla T4 is not used")
    assert "install" in hint
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.overlooked_gpus(torch.device("cpu")) == ""


@pytest.mark.parametrize(
    "failing", ["nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName"]
)
def test_every_driver_call_may_fail(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["A"], failing))
    assert devices.nvidia_names() == (["A"] if failing == "nvmlShutdown" else [])


def test_no_driver_library_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert devices.nvidia_names() == []


def test_a_cpu_is_described_even_where_nothing_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cores" in devices.describe(torch.device("cpu"))

    def broken(*arguments: object, **named: object) -> object:
        raise OSError

    monkeypatch.setattr(psutil, "virtual_memory", broken)
    monkeypatch.setattr(psutil, "cpu_count", broken)
    assert devices.describe(torch.device("cpu")).startswith("cpu")


def test_a_cuda_device_is_named_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    properties = SimpleNamespace(total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert devices.describe(torch.device("cuda", 0)).startswith("NVIDIA H200 141 GiB; ")
