"""What this machine trains on, in words for its owner. Any call that fails on some machine is survived."""

import os
from collections.abc import Callable

import psutil
import torch


def describe(device: torch.device) -> str:
    """The device's name and memory, and the processor and memory beside it."""
    memory = _quietly(lambda: f"{psutil.virtual_memory().total / 2**30:.0f} GiB memory")
    cores = _quietly(lambda: f"{psutil.cpu_count() or os.cpu_count()} cores")
    host = ", ".join(part for part in (cores, memory) if part)
    if device.type == "cuda":
        name = _quietly(lambda: torch.cuda.get_device_name(device)) or "a CUDA device"
        size = _quietly(lambda: f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB")
        return f"{name} {size}; {host}".replace("  ", " ")
    return f"{device.type}; {host}"


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
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        # Without a driver, or on a machine that NVML does not know, there is nothing to name.
        return []
    try:
        names = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))
            names.append(name.decode() if isinstance(name, bytes) else str(name))
        return names
    except Exception:
        return []
    finally:
        _quietly(lambda: str(pynvml.nvmlShutdown()))


def _quietly(ask: Callable[[], str]) -> str:
    """What `ask` gives, or nothing where this machine cannot tell."""
    try:
        return ask()
    except Exception:
        return ""
