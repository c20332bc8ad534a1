"""Random states around the user's code: seeded inside, and as they were afterwards. Imports torch."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch (CPU and `device`), NumPy and random with `seed`, from 0 to 2^63-1; put them back afterwards."""
    plain, legacy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    on_mps = torch.mps.get_rng_state() if device.type == "mps" else None
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(legacy)
            if on_mps is not None:
                torch.mps.set_rng_state(on_mps)
