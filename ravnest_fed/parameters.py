"""The flat view of a model: which tensors are federated, where each lies, and how the vector is cut.

NumPy only: a broker uses this without torch. The federated state of a model is

- one float32 vector: the trainable floating-point parameters in `named_parameters` order, padded with zeros to whole
  blocks, then the floating-point buffers, padded likewise;
- one int64 vector: the integer buffers (counters).

The vectors are cut into shards, the unit of relay, aggregation and hashing. No shard mixes kinds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ravnest_fed.errors import FederationFileError, SchemaMismatch

BLOCK = 4096
"""Values of a block: the vector is padded to whole blocks and shards hold whole blocks."""
MAX_SHARD = 2**20
"""Most values of one shard."""
MIN_SPREAD_SHARD = 2**16
"""Below this many values a shard is not split further merely to spread the work over brokers."""

Kind = Literal["parameters", "buffers", "counters"]
Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One named tensor: its shape, its torch dtype by name, and the least value it may take (buffers only)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    minimum: float | None = None

    @property
    def count(self) -> int:
        """How many values the tensor holds."""
        return prod(self.shape)


@dataclass(frozen=True)
class Shard:
    """A contiguous range of the flat vector of its kind: values `start` to `stop`."""

    index: int
    kind: Kind
    start: int
    stop: int

    @property
    def count(self) -> int:
        """How many values the shard holds."""
        return self.stop - self.start


def padded(count: int) -> int:
    """`count` rounded up to whole blocks."""
    return -(-count // BLOCK) * BLOCK


def default_shard_size(count: int, brokers: int) -> int:
    """Shard size for `count` values: two shards a broker where they are worth it, at most `MAX_SHARD`."""
    spread = padded(-(-count // (2 * max(brokers, 1))))
    return int(min(MAX_SHARD, max(MIN_SPREAD_SHARD, spread)))


class Schema(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """What of a model is federated. `frozen_hash` covers what is not, and must equal on every client.

    `aliases` are the further names of tied tensors, as (alias, name): a tied tensor is federated once, under `name`.
    """

    parameters: tuple[TensorSpec, ...]
    buffers: tuple[TensorSpec, ...]
    counters: tuple[TensorSpec, ...]
    frozen_hash: str
    shard_size: int
    aliases: tuple[tuple[str, str], ...] = ()

    def check(self) -> None:
        """Raise FederationFileError unless the schema can be worked with."""
        if not self.parameters:
            raise FederationFileError("the schema holds no trainable parameter", "federate a model that can be trained")
        if self.shard_size % BLOCK or not BLOCK <= self.shard_size <= MAX_SHARD:
            raise FederationFileError(
                f"schema.shard_size is {self.shard_size}", f"use a multiple of {BLOCK} of at most {MAX_SHARD}"
            )
        for spec in (*self.parameters, *self.buffers, *self.counters):
            if any(side < 0 for side in spec.shape):
                raise FederationFileError(f"tensor {spec.name} has the shape {spec.shape}", "make the federation anew")

    @cached_property
    def parameter_count(self) -> int:
        """Trainable parameters, without padding."""
        return sum(spec.count for spec in self.parameters)

    @cached_property
    def parameter_stop(self) -> int:
        """Where the parameters' part of the vector ends, padding included."""
        return padded(self.parameter_count)

    @cached_property
    def vector_size(self) -> int:
        """Length of the float32 vector, padding included."""
        return self.parameter_stop + padded(sum(spec.count for spec in self.buffers))

    @cached_property
    def counter_size(self) -> int:
        """Length of the int64 vector."""
        return sum(spec.count for spec in self.counters)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The shards in order: parameters, then buffers, then counters."""
        shards: list[Shard] = []
        spans: tuple[tuple[Kind, int, int], ...] = (
            ("parameters", 0, self.parameter_stop),
            ("buffers", self.parameter_stop, self.vector_size),
            ("counters", 0, self.counter_size),
        )
        for kind, begin, end in spans:
            for start in range(begin, end, self.shard_size):
                shards.append(Shard(len(shards), kind, start, min(start + self.shard_size, end)))
        return tuple(shards)

    @cached_property
    def offsets(self) -> Mapping[str, tuple[Kind, int, TensorSpec]]:
        """Where each tensor starts in the vector of its kind."""
        places: dict[str, tuple[Kind, int, TensorSpec]] = {}
        groups: tuple[tuple[Kind, tuple[TensorSpec, ...], int], ...] = (
            ("parameters", self.parameters, 0),
            ("buffers", self.buffers, self.parameter_stop),
            ("counters", self.counters, 0),
        )
        for kind, specs, offset in groups:
            for spec in specs:
                places[spec.name] = (kind, offset, spec)
                offset += spec.count
        return places

    def require_equal(self, other: "Schema", where: str) -> None:
        """Raise SchemaMismatch, naming the first difference, unless `other` federates the same tensors."""
        for kind in ("parameters", "buffers", "counters"):
            ours, theirs = getattr(self, kind), getattr(other, kind)
            for mine, yours in zip(ours, theirs, strict=False):
                if mine != yours:
                    raise SchemaMismatch(
                        f"{where}: {yours.name} {list(yours.shape)} {yours.dtype} stands where the federation's schema "
                        f"has {mine.name} {list(mine.shape)} {mine.dtype}",
                        "use the recipe and the library versions that the federation was made with",
                    )
            if len(ours) != len(theirs):
                raise SchemaMismatch(
                    f"{where}: the model has {len(theirs)} federated {kind}, the federation's schema {len(ours)}",
                    "use the recipe and the library versions that the federation was made with",
                )
        if self.frozen_hash != other.frozen_hash:
            raise SchemaMismatch(
                f"{where}: the frozen parameters differ from the federation's",
                "load the same pretrained weights as the others",
            )


class ModelState(NamedTuple):
    """The federated values of a model: float32 vector of `vector_size`, int64 vector of `counter_size`."""

    vector: Float32
    counters: Int64

    @classmethod
    def zeros(cls, schema: Schema) -> "ModelState":
        """All zeros, in the shapes that `schema` asks for."""
        return cls(np.zeros(schema.vector_size, np.float32), np.zeros(schema.counter_size, np.int64))

    def copy(self) -> "ModelState":
        """The same values in memory of their own."""
        return ModelState(self.vector.copy(), self.counters.copy())

    def of(self, kind: Kind) -> Float32 | Int64:
        """The vector that holds tensors of `kind`."""
        return self.counters if kind == "counters" else self.vector

    def view(self, schema: Schema, name: str) -> Float32 | Int64:
        """A writable view of tensor `name`, in its shape."""
        kind, offset, spec = schema.offsets[name]
        return self.of(kind)[offset : offset + spec.count].reshape(spec.shape)

    def shard(self, shard: Shard) -> Float32 | Int64:
        """A writable view of the values of `shard`."""
        return self.of(shard.kind)[shard.start : shard.stop]
