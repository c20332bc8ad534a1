"""What a client's machine can do, as measured there: a broker sizes work orders by it. Imports no torch.

A capability is a claim: brokers take it for first orders alone, and follow what is delivered afterwards. Bytes from
outside decode only within the bounds that the types name.
"""

from typing import Annotated, Any, Final

import msgspec

MAX_DEVICES: Final = 16
MAX_SPEEDS: Final = 32
MAX_REASONS: Final = 16
MAX_NAME: Final = 96
MAX_REASON: Final = 240
MAX_MICRO_BATCH: Final = 2**20

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
MicroBatch = Annotated[int, msgspec.Meta(ge=1, le=MAX_MICRO_BATCH)]


class Device(msgspec.Struct, frozen=True):
    """A processor that could train. `kind` is a torch device type, or "nvidia" for a GPU that this torch cannot use.

    Memory is in bytes, `utilisation` in percent; None where the machine does not tell.
    """

    kind: Annotated[str, msgspec.Meta(max_length=16)]
    name: Name
    memory_total: Bytes | None = None
    memory_free: Bytes | None = None
    utilisation: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    driver: Name = ""


class Speed(msgspec.Struct, frozen=True):
    """Samples a second through forward, backward and the optimiser's step at a micro-batch."""

    micro_batch: MicroBatch
    samples_per_second: Rate


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """What one client can do with one recipe.

    `device` is the torch device that was measured. Memory is in bytes, `battery` the charge in percent. `speeds` are in
    the order of their micro-batches; `micro_batch` is the one chosen by speed, `max_micro_batch` the greatest that
    memory allows, None where no bound was met. `bandwidth_up` and `bandwidth_down` are in bytes/s, None until measured.
    `reasons` tells by field why a number is what it is.
    """

    device: Name
    devices: Annotated[tuple[Device, ...], msgspec.Meta(max_length=MAX_DEVICES)] = ()
    cores: Annotated[int, msgspec.Meta(ge=1, le=2**16)] | None = None
    memory_total: Bytes | None = None
    memory_free: Bytes | None = None
    battery: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    on_battery: bool = False
    speeds: Annotated[tuple[Speed, ...], msgspec.Meta(max_length=MAX_SPEEDS)] = ()
    micro_batch: MicroBatch = 1
    max_micro_batch: MicroBatch | None = None
    bandwidth_up: Rate | None = None
    bandwidth_down: Rate | None = None
    reasons: Annotated[dict[Name, Text], msgspec.Meta(max_length=MAX_REASONS)] = {}

    def speed_at(self, micro_batch: int) -> float | None:
        """Samples a second at `micro_batch`, by the nearest one measured at or below it; None if nothing was measured."""
        fitting = [one for one in self.speeds if one.micro_batch <= micro_batch]
        nearest = max(fitting, key=_size, default=None) or min(self.speeds, key=_size, default=None)
        return nearest.samples_per_second if nearest else None


def _size(speed: Speed) -> int:
    return speed.micro_batch


def clipped(text: object, length: int = MAX_REASON) -> str:
    """`text` on one line of at most `length` characters, as a capability can hold it."""
    line = " ".join(str(text).split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def as_tables(capability: Capability) -> dict[str, Any]:
    """A capability as plain dicts and lists, for JSON."""
    tables: dict[str, Any] = msgspec.to_builtins(capability)
    return tables


def from_tables(tables: object) -> Capability:
    """The capability in `tables`, as `as_tables` gives them. Raises ValueError where it is none or out of bounds."""
    # msgspec's ValidationError is a ValueError.
    return msgspec.convert(tables, Capability)
