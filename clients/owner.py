"""What the machine does beside training, through psutil and pynvml. Any call that fails on some machine is survived."""

import os
from typing import Any

import psutil
import torch

from clients.devices import chosen, quietly
from clients.politeness import Sample

HELD_BYTES = 256 * 2**20
"""Where the driver does not tell how busy each process is: a process that computes and holds so much uses the GPU."""
CPU_LIMIT, GPU_LIMIT = 100.0, 95.0
"""Degrees Celsius at which a processor or GPU slows down, where it does not say so itself."""
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal")


class Machine:
    """Samples of this machine for a client that trains on `device`, a name as for `devices.chosen`. Needs one thread."""

    def __init__(self, device: str) -> None:
        self._device = quietly(lambda: chosen(device), torch.device("cpu"))
        self._nvml: Any = None
        self._handle: Any = None
        self._seen = 0
        self._cpu: tuple[float, float] | None = None
        self._own: dict[tuple[int, float], float] = {}
        if self._device.type == "cuda":
            quietly(self._find_gpu, None)
        self._cpu_others(self._processes())

    def sample(self) -> Sample:
        """How things stand; load is that since the last sample."""
        own = self._processes()
        battery = quietly(lambda: psutil.sensors_battery(), None)
        rooms = [room for room in (quietly(_cpu_headroom, None), quietly(self._gpu_headroom, None)) if room is not None]
        pids = {pid for pid, _ in own} | {os.getpid()}
        return Sample(
            gpu_others=quietly(lambda: self._gpu_others(pids), None),
            cpu_others=self._cpu_others(own),
            on_battery=getattr(battery, "power_plugged", None) is False,
            headroom=min(rooms, default=None),
        )

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is not None:
            quietly(self._nvml.nvmlShutdown, None)
            self._nvml = self._handle = None

    # --- processor ---------------------------------------------------------------------------------------------------

    def _processes(self) -> dict[tuple[int, float], float]:
        """The CPU seconds of this process and of all below it, by pid and start."""
        me = quietly(lambda: psutil.Process(), None)
        if me is None:
            return {}
        found: dict[tuple[int, float], float] = {}
        for process in (me, *quietly(lambda: me.children(recursive=True), [])):
            # One may end while it is asked.
            times = quietly(process.cpu_times, None)
            born = quietly(process.create_time, None)
            if times is not None and born is not None:
                found[(process.pid, born)] = times.user + times.system
        return found

    def _cpu_others(self, own: dict[tuple[int, float], float]) -> float | None:
        before, own_before = self._cpu, self._own
        self._cpu, self._own = quietly(_cpu_seconds, None), own
        if before is None or self._cpu is None or not own or not own_before:
            return None
        total, busy = self._cpu[0] - before[0], self._cpu[1] - before[1]
        if total <= 0:
            return None
        ours = sum(seconds - own_before.get(process, 0.0) for process, seconds in own.items())
        return min(max(100.0 * (busy - ours) / total, 0.0), 100.0)

    # --- GPU ---------------------------------------------------------------------------------------------------------

    def _find_gpu(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        index = self._device.index or 0
        unique = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
        if unique:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{unique.removeprefix('GPU-')}")
        elif int(pynvml.nvmlDeviceGetCount()) == 1:
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def _gpu_others(self, own: set[int]) -> float | None:
        if self._handle is None:
            return None
        computing = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        drawing: list[Any] = quietly(lambda: self._nvml.nvmlDeviceGetGraphicsRunningProcesses(self._handle), [])
        here = {int(one.pid) for one in (*computing, *drawing)}
        if not own & here and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # The driver counts pids in another namespace, as for a container: our own process looks like a stranger.
            return None
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen)
        except Exception as error:
            if type(error).__name__ == "NVMLError_NotFound":
                # So it says that no process was busy.
                return 0.0
            held = [one for one in computing if int(one.pid) not in own and (one.usedGpuMemory or 0) >= HELD_BYTES]
            return 100.0 if held else 0.0
        busiest: dict[int, float] = {}
        for one in samples:
            # The driver repeats old samples, also those of processes that have ended.
            if int(one.timeStamp) > self._seen and int(one.pid) not in own and int(one.pid) in here:
                busiest[int(one.pid)] = max(busiest.get(int(one.pid), 0.0), float(one.smUtil))
        self._seen = max([self._seen, *(int(one.timeStamp) for one in samples)])
        return min(sum(busiest.values()), 100.0)

    def _gpu_headroom(self) -> float | None:
        if self._handle is None:
            return None
        degrees = float(self._nvml.nvmlDeviceGetTemperature(self._handle, 0))
        limit = quietly(lambda: float(self._nvml.nvmlDeviceGetTemperatureThreshold(self._handle, 1)), GPU_LIMIT)
        return (limit if 60.0 <= limit <= 130.0 else GPU_LIMIT) - degrees


def _cpu_seconds() -> tuple[float, float]:
    """Seconds of all cores together so far: all, and busy ones."""
    times = psutil.cpu_times()
    # What runs for guests is in `user` and `nice` too.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total, total - times.idle - getattr(times, "iowait", 0.0)


def _cpu_headroom() -> float | None:
    sensors = psutil.sensors_temperatures()
    rooms = []
    for name in CPU_SENSORS:
        for one in sensors.get(name, ()):
            limit = one.critical if one.critical and 60.0 <= one.critical <= 130.0 else CPU_LIMIT
            rooms.append(limit - one.current)
    return min(rooms, default=None)
