"""Random state that follows from a federation's seed and a client's place, so that nothing of it need be kept on disk."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ravnest_fed.hashing import digest


class Seeding:
    """Seeds for the client in place `index` under the federation's `seed`, on `device` and on the CPU."""

    def __init__(self, seed: int, index: int, device: torch.device) -> None:
        self._seed = seed
        self._index = index
        self._device = device

    @contextmanager
    def seeded(self, purpose: str, number: int) -> Iterator[None]:
        """Seed torch, NumPy and random by `purpose` and `number` inside this context; put them back afterwards."""
        place = f"{self._seed} {self._index} {number}".encode()
        seed = int.from_bytes(digest(f"training {purpose}", place)[:8], "little") >> 1
        plain, legacy = random.getstate(), np.random.get_state()
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            try:
                yield
            finally:
                random.setstate(plain)
                np.random.set_state(legacy)
