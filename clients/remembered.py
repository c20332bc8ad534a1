"""Probes that were made before, in one JSON file: a machine need not be measured at each start.

An entry holds for a recipe, a machine, a device and a part of the data. A file that is damaged, or of a later format,
counts for nothing and is written anew.
"""

import json
from pathlib import Path
from typing import Annotated, Final

import msgspec

from clients.ramp import Climbed
from ravnest_fed.capability import MAX_SPEEDS, MicroBatch, Speed, Text
from ravnest_fed.model_files import write_durably

FORMAT: Final = 1
FILE_NAME: Final = "probes.json"
MAX_ENTRIES: Final = 64
MAX_FILE_BYTES: Final = 2**20


class Key(msgspec.Struct, frozen=True):
    """What a measurement holds for: hash of the recipe, `devices.machine()`, torch device, and part of the data."""

    recipe: str
    machine: str
    device: str
    part: str


class _Entry(msgspec.Struct, frozen=True):
    key: Key
    speeds: Annotated[tuple[Speed, ...], msgspec.Meta(min_length=1, max_length=MAX_SPEEDS)]
    micro_batch: MicroBatch
    chosen: Text
    ended: Text
    fits: MicroBatch | None = None


class _File(msgspec.Struct, frozen=True):
    format: int
    entries: tuple[_Entry, ...]


class RememberedProbes:
    """The probes kept in `folder`, which is made on first use."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE_NAME

    def find(self, key: Key) -> Climbed | None:
        """The measurement for exactly this key."""
        for entry in self._entries():
            if entry.key == key:
                return Climbed(entry.speeds, entry.micro_batch, entry.chosen, entry.ended, entry.fits)
        return None

    def keep(self, key: Key, climbed: Climbed) -> None:
        """Keep a measurement in the place of an older one; the oldest of too many is dropped. Raises OSError.

        One without any speed is not kept: what failed may go well next time.
        """
        if not climbed.speeds:
            return
        others = [entry for entry in self._entries() if entry.key != key]
        made = _Entry(key, climbed.speeds, climbed.micro_batch, climbed.chosen, climbed.ended, climbed.fits)
        content = _File(FORMAT, (*others, made)[-MAX_ENTRIES:])
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(self._file, json.dumps(msgspec.to_builtins(content), indent=1).encode())

    def _entries(self) -> tuple[_Entry, ...]:
        try:
            if self._file.stat().st_size > MAX_FILE_BYTES:
                return ()
            found = msgspec.json.decode(self._file.read_bytes(), type=_File)
        except (OSError, ValueError, RecursionError):
            return ()
        return found.entries if found.format == FORMAT else ()
