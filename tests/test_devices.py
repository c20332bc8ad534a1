"""What a client says of its machine, with fakes of the driver's library."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch

from clients import devices
from ravnest_fed.capability import Device
from ravnest_fed.errors import UsageError


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


def full_nvml(failing: str = "") -> ModuleType:
    module = fake_nvml([b"NVIDIA H200", "Tesla T4"], failing)

    def act(name: str, result: Callable[[int], object]) -> Callable[[int], object]:
        def call(handle: int) -> object:
            if name == failing:
                raise RuntimeError("NVML_ERROR_NOT_SUPPORTED")
            return result(handle)

        return call

    details: dict[str, Callable[[int], object]] = {
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=100 + handle, free=50 + handle),
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=30),
    }
    for name, result in details.items():
        setattr(module, name, act(name, result))
    module.nvmlSystemGetDriverVersion = lambda: act("nvmlSystemGetDriverVersion", lambda _: b"550.54")(0)  # type: ignore[attr-defined]
    return module


def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def test_a_survey_names_gpus_that_torch_overlooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", full_nvml())
    no_cuda(monkeypatch)
    cpu, first, second = devices.survey()
    assert cpu.kind == "cpu" and cpu.name
    assert first == Device("nvidia", "NVIDIA H200", 100, 50, 30.0, "550.54")
    assert second == Device("nvidia", "Tesla T4", 101, 51, 30.0, "550.54")


def test_a_survey_joins_what_torch_and_the_driver_know_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", full_nvml())
    no_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(name="Tesla T4", total_memory=90, uuid="1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert devices.survey()[1:] == (
        Device("cuda", "Tesla T4", 90, 51, 30.0, "550.54"),
        Device("nvidia", "NVIDIA H200", 100, 50, 30.0, "550.54"),
    )


def test_a_gpu_without_a_driver_library_is_described_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    no_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = SimpleNamespace(name="Radeon", total_memory=90)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (40, 90))
    assert devices.survey()[1:] == (Device("cuda", "Radeon", 90, 40),) * 2


@pytest.mark.parametrize(
    ("failing", "left"),
    [
        ("nvmlDeviceGetMemoryInfo", Device("nvidia", "NVIDIA H200", None, None, 30.0, "550.54")),
        ("nvmlDeviceGetUtilizationRates", Device("nvidia", "NVIDIA H200", 100, 50, None, "550.54")),
        ("nvmlSystemGetDriverVersion", Device("nvidia", "NVIDIA H200", 100, 50, 30.0, "")),
        ("nvmlDeviceGetUUID", Device("nvidia", "NVIDIA H200", 100, 50, 30.0, "550.54")),
        ("nvmlDeviceGetName", Device("nvidia", "", 100, 50, 30.0, "550.54")),
        ("nvmlShutdown", Device("nvidia", "NVIDIA H200", 100, 50, 30.0, "550.54")),
    ],
)
def test_a_driver_call_that_fails_costs_its_own_number_alone(
    failing: str, left: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", full_nvml(failing))
    no_cuda(monkeypatch)
    assert devices.survey()[1] == left


def test_a_laptop_tells_of_its_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        psutil, "sensors_battery", lambda: SimpleNamespace(percent=61.5, power_plugged=False), raising=False
    )
    found = devices.host()
    assert (found.battery, found.on_battery) == (61.5, True)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    assert (devices.host().battery, devices.host().on_battery) == (None, False)


def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    no_cuda(monkeypatch)
    assert devices.chosen("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.chosen("auto") == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.chosen("auto") == torch.device("cuda")


def test_another_thread_count_is_another_machine() -> None:
    threads = torch.get_num_threads()
    before = devices.machine()
    try:
        torch.set_num_threads(threads + 1)
        assert devices.machine() != before
    finally:
        torch.set_num_threads(threads)
    assert devices.machine() == before


def test_the_memory_taken_of_a_gpu_has_a_bound_and_without_a_gpu_the_bound_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices.limit_gpu_memory("cpu", None)
    with pytest.raises(UsageError, match="--max-gpu-memory is set, but training runs on cpu"):
        devices.limit_gpu_memory("cpu", 2**30)
    bounds: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *bound: bounds.append(bound))
    for most in (2 * 2**30, 64 * 2**30):
        devices.limit_gpu_memory("cuda:0", most)
    assert bounds == [(0.25, torch.device("cuda:0")), (1.0, torch.device("cuda:0"))]
