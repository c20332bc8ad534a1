"""A probe in a process of its own: whatever it does to memory, random states or the process, training is not touched."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from clients.ramp import SECONDS
from ravnest_fed.capability import Capability, clipped, from_tables
from ravnest_fed.errors import RavnestError
from ravnest_fed.partition import Partition

LIMIT_SECONDS = 120.0
"""When a probe is ended by force: it also loads torch, the recipe and the data."""
LOOK_SECONDS = 0.1


class ProbeFailed(RavnestError):
    """A probe gave no measurement; training goes on without."""


def probe_apart(
    recipe: Path,
    partition: Partition,
    device: str,
    threads: int,
    state: Path,
    cancelled: Callable[[], bool] = lambda: False,
    seconds: float = SECONDS,
    limit: float = LIMIT_SECONDS,
    max_gpu_memory: int | None = None,
) -> Capability:
    """What the machine can do with `recipe` and `partition` of its data, measured or remembered in `state`.

    `cancelled` is asked all the time; `limit` (s) ends a probe that hangs; it takes at most
    `max_gpu_memory` bytes of a GPU. Raises ProbeFailed.
    """
    part = f"{partition.index}/{partition.count}/{partition.seed}"
    options = ["--device", device, "--threads", str(threads), "--seconds", f"{seconds:g}", "--part", part]
    options += ["--max-gpu-memory", str(max_gpu_memory)] if max_gpu_memory else []
    words = [sys.executable, "-m", "clients.command", "probe", str(recipe), "--json", "--state", str(state), *options]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + limit
    try:
        while True:
            try:
                output, errors = process.communicate(timeout=LOOK_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if cancelled():
                    raise ProbeFailed("the probe was given up") from None
                if time.monotonic() > deadline:
                    raise ProbeFailed(f"the probe took longer than {limit:g} s", "run `ravnest-client probe`") from None
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        # A negative status is the signal that ended it: 9 where memory ran out.
        raise ProbeFailed(f"the probe ended with status {process.returncode}: {clipped(lines[-1])}")
    try:
        return from_tables(json.loads(output))
    except ValueError as error:
        raise ProbeFailed(f"the probe said nothing that can be read: {clipped(error)}") from None
