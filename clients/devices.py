"""What this machine trains on, for the probe and in words for its owner. Any call that fails on some machine is survived."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from ravnest_fed.capability import MAX_DEVICES, MAX_NAME, Device, clipped
from ravnest_fed.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """The machine around the devices: memory in bytes, `battery` in percent; None where it cannot tell."""

    cores: int | None
    memory_total: int | None
    memory_free: int | None
    battery: float | None
    on_battery: bool


def chosen(name: str) -> torch.device:
    """The device that `name` means: a torch device, or "auto" for a GPU where there is one. Raises UsageError."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"{name[:60]!r} is no torch device", "use auto, cpu, cuda, cuda:1 or mps") from None
    missing = {
        "cuda": not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count(),
        "mps": not torch.backends.mps.is_available(),
    }
    if missing.get(device.type, False):
        raise UsageError(f"there is no device {name} here", overlooked_gpus(torch.device("cpu")) or "use auto or cpu")
    return device


def limit_gpu_memory(name: str, most: int | None) -> None:
    """Let this process take at most so many bytes of the GPU `name`; None: all. Raises UsageError where there is none."""
    if most is None:
        return
    device = chosen(name)
    if device.type != "cuda":
        raise UsageError(
            f"--max-gpu-memory is set, but training runs on {device.type}", "leave it out, or choose --device cuda"
        )
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), device)


def describe(device: torch.device) -> str:
    """The device's name and memory, and the processor and memory beside it."""
    memory = quietly(lambda: f"{psutil.virtual_memory().total / 2**30:.0f} GiB memory", "")
    cores = quietly(lambda: f"{psutil.cpu_count() or os.cpu_count()} cores", "")
    beside = ", ".join(part for part in (cores, memory) if part)
    if device.type == "cuda":
        name = quietly(lambda: torch.cuda.get_device_name(device), "") or "a CUDA device"
        size = quietly(lambda: f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB", "")
        return f"{name} {size}; {beside}".replace("  ", " ")
    return f"{device.type}; {beside}"


def overlooked_gpus(device: torch.device) -> str:
    """A hint where training runs beside an NVIDIA GPU that this torch cannot use; empty where all is well."""
    if device.type == "cuda":
        return ""
    names = nvidia_names()
    if not names or torch.cuda.is_available():
        return ""
    return f"{', '.join(names)} is not used: this torch has no CUDA; install the build for CUDA from pytorch.org"


def nvidia_names() -> list[str]:
    """The names of the NVIDIA GPUs that the driver knows, with or without CUDA in torch."""
    return [gpu.name for _, gpu in _nvidia_gpus() if gpu.name]


def host() -> Host:
    """The machine's cores, memory and battery."""
    memory = quietly(psutil.virtual_memory, None)
    # Not every system's psutil knows of batteries at all.
    battery = quietly(lambda: psutil.sensors_battery(), None)
    charge = getattr(battery, "percent", None)
    return Host(
        cores=quietly(psutil.cpu_count, None) or os.cpu_count(),
        memory_total=getattr(memory, "total", None),
        memory_free=getattr(memory, "available", None),
        battery=None if charge is None else min(max(float(charge), 0.0), 100.0),
        on_battery=getattr(battery, "power_plugged", None) is False,
    )


def survey() -> tuple[Device, ...]:
    """Every processor that could train: the CPU, what torch can use beside it, and GPUs that it overlooks."""
    memory = quietly(psutil.virtual_memory, None)
    found = [Device("cpu", _processor(), getattr(memory, "total", None), getattr(memory, "available", None))]
    if quietly(torch.backends.mps.is_available, False):
        found.append(Device("mps", clipped(platform.machine(), MAX_NAME)))
    known = _nvidia_gpus()
    for index in range(quietly(torch.cuda.device_count, 0)):
        found.append(_cuda(index, known))
    found += [gpu for _, gpu in known]
    return tuple(found[:MAX_DEVICES])


def peak_memory() -> int | None:
    """The most memory that this process has used so far, in bytes; None where the system does not tell."""

    def ask() -> int:
        if os.name == "nt":
            return int(psutil.Process().memory_info().peak_wset)
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(used) if platform.system() == "Darwin" else int(used) * 1024

    return quietly(ask, None)


def machine() -> str:
    """What a measurement on this machine holds for: another one of these and it must be made again."""
    cores, memory = quietly(psutil.cpu_count, None), quietly(lambda: psutil.virtual_memory().total, None)
    cuda = [_cuda_name(index) for index in range(quietly(torch.cuda.device_count, 0))]
    parts = (platform.node(), _processor(), cores, memory, *cuda, torch.__version__, torch.get_num_threads())
    return " | ".join(str(part) for part in parts)


def _cuda_name(index: int) -> str:
    return quietly(lambda: torch.cuda.get_device_name(index), "")


def _cuda(index: int, known: list[tuple[str, Device]]) -> Device:
    """The CUDA device as torch knows it, with what the driver adds; what it is taken from leaves `known`."""
    properties: Any = quietly(lambda: torch.cuda.get_device_properties(index), None)
    name = clipped(getattr(properties, "name", "") or "a CUDA device", MAX_NAME)
    total = getattr(properties, "total_memory", None)
    unique = str(getattr(properties, "uuid", ""))
    # Older torch does not tell the identity; of two alike, either one will do.
    same = [entry for entry in known if unique and entry[0].removeprefix("GPU-") == unique]
    same = same or [entry for entry in known if not unique and entry[1].name == name]
    if same:
        known.remove(same[0])
        gpu = same[0][1]
        return Device("cuda", name, total or gpu.memory_total, gpu.memory_free, gpu.utilisation, gpu.driver)
    free = quietly(lambda: torch.cuda.mem_get_info(index)[0], None)
    return Device("cuda", name, total, free)


def _nvidia_gpus() -> list[tuple[str, Device]]:
    """The NVIDIA GPUs that the driver knows, each after its identity, as kind "nvidia"."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        # Without a driver, or on a machine that NVML does not know, there is nothing to name.
        return []
    try:
        driver = _text(quietly(lambda: pynvml.nvmlSystemGetDriverVersion(), ""))
        found = []
        for index in range(quietly(lambda: int(pynvml.nvmlDeviceGetCount()), 0)):
            handle = quietly(lambda: pynvml.nvmlDeviceGetHandleByIndex(index), None)  # noqa: B023 (called at once)
            if handle is not None:
                found.append(_nvidia(pynvml, handle, driver))
        return found
    finally:
        quietly(pynvml.nvmlShutdown, None)


def _nvidia(pynvml: Any, handle: Any, driver: str) -> tuple[str, Device]:
    name = _text(quietly(lambda: pynvml.nvmlDeviceGetName(handle), ""))
    memory: Any = quietly(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle), None)
    busy = quietly(lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu), None)
    device = Device(
        "nvidia",
        name,
        getattr(memory, "total", None),
        getattr(memory, "free", None),
        None if busy is None else min(max(busy, 0.0), 100.0),
        driver,
    )
    return _text(quietly(lambda: pynvml.nvmlDeviceGetUUID(handle), "")), device


def _processor() -> str:
    def model() -> str:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))

    return clipped(quietly(model, "") or platform.processor() or platform.machine(), MAX_NAME)


def _text(value: object) -> str:
    """NVML's texts, which older versions give as bytes."""
    return clipped(value.decode(errors="replace") if isinstance(value, bytes) else value, MAX_NAME)


def quietly(ask: Callable[[], T], otherwise: T) -> T:
    """What `ask` gives, or `otherwise` where this machine cannot tell."""
    try:
        return ask()
    except Exception:
        return otherwise
