"""Samples of the machine, with fakes of psutil and of the driver's library; every call of theirs may fail."""

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from clients import owner
from clients.owner import Machine
from clients.politeness import Sample
from tests.test_devices import fake_nvml

ME, CHILD, STRANGER = os.getpid(), 70001, 70002
GIB = 2**30


class NVMLError_NotFound(Exception):
    pass


class FakeProcess:
    def __init__(self, pid: int, seconds: float, below: "list[FakeProcess] | None" = None) -> None:
        self.pid = pid
        self.seconds = seconds
        self.below = below or []
        self.gone = False

    def children(self, recursive: bool) -> "list[FakeProcess]":
        return list(self.below)

    def cpu_times(self) -> Any:
        if self.gone:
            raise psutil.NoSuchProcess(self.pid)
        return SimpleNamespace(user=0.75 * self.seconds, system=0.25 * self.seconds)

    def create_time(self) -> float:
        return 1.0


class FakeTimes(tuple[float, ...]):
    """What psutil gives: user, system, idle, iowait, guest; `guest` is within `user`."""

    user = property(lambda self: self[0])
    idle = property(lambda self: self[2])
    iowait = property(lambda self: self[3])
    guest = property(lambda self: self[4])


class Fakes:
    """A machine of which a test turns the numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.child = FakeProcess(CHILD, 0.0)
        self.me = FakeProcess(ME, 0.0, [self.child])
        self.times = FakeTimes((0.0, 0.0, 0.0, 0.0, 0.0))
        self.plugged: bool | None = None
        self.sensors: dict[str, list[Any]] = {}
        self.set(psutil, "Process", lambda: self.me)
        self.set(psutil, "cpu_times", lambda: self.times)
        self.set(
            psutil,
            "sensors_battery",
            lambda: None if self.plugged is None else SimpleNamespace(percent=50.0, power_plugged=self.plugged),
        )
        self.set(psutil, "sensors_temperatures", lambda: self.sensors)

    def set(self, where: Any, name: str, value: object) -> None:
        self.patch.setattr(where, name, value, raising=False)

    def pass_time(self, user: float = 0.0, system: float = 0.0, idle: float = 0.0, iowait: float = 0.0) -> None:
        added = (user, system, idle, iowait, 0.0)
        self.times = FakeTimes(before + more for before, more in zip(self.times, added, strict=True))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(monkeypatch)


# --- processor -------------------------------------------------------------------------------------------------------


def test_what_this_process_and_its_children_use_is_not_others_work(fakes: Fakes) -> None:
    machine = Machine("cpu")
    fakes.me.seconds += 2.0
    fakes.child.seconds += 1.0
    fakes.pass_time(user=4.0, system=1.0, idle=4.0, iowait=1.0)
    assert machine.sample().cpu_others == pytest.approx(20.0)
    fakes.pass_time(idle=10.0)
    assert machine.sample().cpu_others == 0.0


def test_load_is_that_since_the_last_sample(fakes: Fakes) -> None:
    fakes.pass_time(user=500.0, idle=500.0)
    machine = Machine("cpu")
    fakes.pass_time(user=1.0, idle=3.0)
    assert machine.sample().cpu_others == pytest.approx(25.0)
    assert machine.sample().cpu_others is None


def test_a_child_that_came_or_ended_does_not_turn_into_others_work(fakes: Fakes) -> None:
    fakes.child.seconds = 300.0
    machine = Machine("cpu")
    fakes.child.gone = True
    fakes.pass_time(idle=10.0)
    assert machine.sample().cpu_others == 0.0
    fakes.me.below = [FakeProcess(70009, 5.0)]
    fakes.pass_time(user=5.0, idle=5.0)
    assert machine.sample().cpu_others == 0.0


def test_the_load_of_this_machine_can_be_sampled() -> None:
    machine = Machine("cpu")
    sum(range(10**6))
    sample = machine.sample()
    assert sample.cpu_others is None or 0.0 <= sample.cpu_others <= 100.0


# --- battery and heat ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("plugged", "on_battery"), [(None, False), (True, False), (False, True)])
def test_battery(fakes: Fakes, plugged: bool | None, on_battery: bool) -> None:
    fakes.plugged = plugged
    assert Machine("cpu").sample().on_battery is on_battery


def sensor(current: float, critical: float | None) -> Any:
    return SimpleNamespace(label="", current=current, high=None, critical=critical)


@pytest.mark.parametrize(
    ("sensors", "headroom"),
    [
        ({}, None),
        ({"nvme": [sensor(84.0, 85.0)]}, None),
        ({"coretemp": [sensor(50.0, 105.0), sensor(97.0, 105.0)]}, 8.0),
        ({"k10temp": [sensor(60.0, None)]}, 40.0),
        ({"coretemp": [sensor(60.0, 0.0)]}, 40.0),
        ({"coretemp": [sensor(60.0, 65261.8)]}, 40.0),
    ],
)
def test_the_hottest_processor_counts_by_its_own_limit(
    fakes: Fakes, sensors: dict[str, list[Any]], headroom: float | None
) -> None:
    fakes.sensors = sensors
    assert Machine("cpu").sample().headroom == headroom


@pytest.mark.parametrize("name", ["Process", "cpu_times", "sensors_battery", "sensors_temperatures"])
def test_every_call_of_psutil_may_fail_or_be_missing(fakes: Fakes, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **named: object) -> object:
        raise OSError

    monkeypatch.setattr(psutil, name, broken)
    assert Machine("cpu").sample() == Sample()
    monkeypatch.delattr(psutil, name)
    assert Machine("cpu").sample() == Sample()


# --- GPU -------------------------------------------------------------------------------------------------------------


def busy(pid: int, percent: int, stamp: int) -> Any:
    return SimpleNamespace(pid=pid, smUtil=percent, timeStamp=stamp)


def holding(pid: int, memory: int | None = GIB) -> Any:
    return SimpleNamespace(pid=pid, usedGpuMemory=memory)


class Gpu:
    """An NVIDIA GPU of which a test turns the numbers; `failing` calls raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computing = [holding(ME), holding(STRANGER)]
        self.drawing: list[Any] = []
        self.samples: list[Any] = []
        self.failing: dict[str, Exception] = {}
        self.degrees, self.slowdown = 50, 90
        self.closed = 0
        self.asked_since: list[int] = []
        module: ModuleType = fake_nvml(["A"])
        self.call(module, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
        self.call(module, "nvmlDeviceGetComputeRunningProcesses", lambda handle: self.computing)
        self.call(module, "nvmlDeviceGetGraphicsRunningProcesses", lambda handle: self.drawing)
        self.call(module, "nvmlDeviceGetProcessUtilization", self.utilisation)
        self.call(module, "nvmlDeviceGetTemperature", lambda handle, sensor: self.degrees)
        self.call(module, "nvmlDeviceGetTemperatureThreshold", lambda handle, kind: self.slowdown)
        self.call(module, "nvmlShutdown", self.shut)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        monkeypatch.setattr(owner, "chosen", torch.device)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="12-34"))

    def call(self, module: ModuleType, name: str, act: Callable[..., object]) -> None:
        def called(*arguments: object) -> object:
            if name in self.failing:
                raise self.failing[name]
            return act(*arguments)

        setattr(module, name, called)

    def utilisation(self, handle: object, since: int) -> list[Any]:
        self.asked_since.append(since)
        return self.samples

    def shut(self) -> None:
        self.closed += 1


@pytest.fixture
def gpu(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_the_time_of_other_processes_on_the_gpu_counts_and_not_our_own(gpu: Gpu) -> None:
    gpu.computing.append(holding(CHILD))
    gpu.drawing = [holding(70005, None)]
    gpu.samples = [busy(ME, 90, 10), busy(CHILD, 50, 10), busy(STRANGER, 20, 10), busy(STRANGER, 30, 12)]
    gpu.samples.append(busy(70005, 8, 11))
    machine = Machine("cuda:0")
    assert machine.sample().gpu_others == 38.0
    # What it repeats was counted already.
    assert machine.sample().gpu_others == 0.0
    assert gpu.asked_since == [0, 12]
    machine.close()
    assert gpu.closed == 1


def test_a_desktop_that_draws_nothing_much_is_no_other_work(gpu: Gpu) -> None:
    gpu.computing, gpu.drawing = [holding(ME)], [holding(900), holding(901)]
    gpu.failing["nvmlDeviceGetProcessUtilization"] = NVMLError_NotFound()
    assert Machine("cuda:0").sample().gpu_others == 0.0


@pytest.mark.parametrize(
    ("memory", "percent"), [(GIB, 100.0), (100 * 2**20, 0.0), (None, 0.0)], ids=["much", "little", "untold"]
)
def test_where_no_process_time_is_told_one_that_computes_and_holds_memory_counts(
    gpu: Gpu, memory: int | None, percent: float
) -> None:
    gpu.computing = [holding(ME), holding(STRANGER, memory)]
    gpu.failing["nvmlDeviceGetProcessUtilization"] = RuntimeError("not supported")
    assert Machine("cuda:0").sample().gpu_others == percent


def test_with_pids_of_another_namespace_nobody_is_taken_for_a_stranger(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.computing, gpu.samples = [holding(STRANGER)], [busy(STRANGER, 99, 10)]
    assert Machine("cuda:0").sample().gpu_others is None
    # Before training has begun, this process is not there at all.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert Machine("cuda:0").sample().gpu_others == 99.0


@pytest.mark.parametrize(("slowdown", "headroom"), [(90, 40.0), (0, 45.0)])
def test_the_gpus_heat_counts_by_where_it_slows_down(gpu: Gpu, slowdown: int, headroom: float) -> None:
    gpu.slowdown = slowdown
    assert Machine("cuda:0").sample().headroom == headroom


NVML = [
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetTemperatureThreshold",
    "nvmlShutdown",
]


@pytest.mark.parametrize("name", NVML)
def test_every_call_of_the_driver_may_fail(gpu: Gpu, name: str) -> None:
    gpu.computing = [holding(ME)]
    gpu.failing[name] = RuntimeError("NVML_ERROR_NOT_SUPPORTED")
    machine = Machine("cuda:0")
    sample = machine.sample()
    assert sample.gpu_others in (None, 0.0) and sample.headroom in (None, 40.0, 45.0)
    machine.close()


def test_of_several_gpus_without_an_identity_none_is_guessed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    gpu.samples = [busy(STRANGER, 30, 10)]
    assert Machine("cuda:0").sample().gpu_others == 30.0
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetCount", lambda: 2)
    assert Machine("cuda:0").sample().gpu_others is None


def test_a_device_that_is_not_there_is_sampled_as_the_processor() -> None:
    sample = Machine("nonsense").sample()
    assert sample.gpu_others is None
