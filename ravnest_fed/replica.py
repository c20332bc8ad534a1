"""A replica: the model's federated values and the outer optimiser's state, folded commit by commit.

Folding is elementwise float32 arithmetic in a fixed order, so every replica that folds the same commits holds the same
bits, and the state hash proves it. A preview computes that hash without keeping the result, shard by shard, so that no
second copy of the state is needed; folding then repeats the same steps in place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ravnest_fed import codecs
from ravnest_fed.aggregation import outer
from ravnest_fed.aggregation.reduce import BUFFER_CODEC
from ravnest_fed.codecs.counters import decode_counters
from ravnest_fed.errors import LedgerError, PayloadError
from ravnest_fed.facts import Body, encode
from ravnest_fed.federation import Federation
from ravnest_fed.hashing import digest, merkle_root
from ravnest_fed.head import Head, initial_head
from ravnest_fed.parameters import Float32, Int64, ModelState, Schema, Shard

ReadUpdate = Callable[[int], bytes]
"""Gives the encoded update of a shard by its index."""


Zeros = Callable[[str, int], Float32]


class _Readable(Protocol):
    def read(self, blob: bytes) -> bytes: ...


def updates_of(body: Body, store: _Readable) -> ReadUpdate:
    """Reads the encoded update of `body` from `store`."""
    return lambda shard: store.read(body.updates[shard].hash)


@dataclass(frozen=True)
class FoldedHashes:
    """What folding a body gives: the hash of the model alone, and of the whole replicated state."""

    model_hash: bytes
    state_hash: bytes


def model_hash(schema: Schema, state: ModelState) -> bytes:
    """Merkle root over the federated values, by shard."""
    return merkle_root("model", [_leaf(state.shard(shard)) for shard in schema.shards])


def _leaf(values: Float32 | Int64) -> bytes:
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return digest("values", little.data.cast("B") if little.size else b"")


class Replica:
    """The vectors after `head.server_round`. Not thread-safe: one caller at a time.

    `federation` has the roster in force for the next round. `zeros` gives a float32 vector for the outer state by its name
    and size.
    """

    def __init__(self, federation: Federation, initial: ModelState, zeros: Zeros | None = None) -> None:
        self.federation = federation.founding
        self.schema = federation.schema
        self.state = initial
        self._outer = federation.outer
        size = self.schema.parameter_stop
        zeros = zeros or (lambda name, size: np.zeros(size, np.float32))
        self.outer_state = {name: zeros(name, size) for name in self._outer.state_names()}
        self._minima = self._buffer_minima()
        self.head: Head = initial_head(self.federation, model_hash(self.schema, initial))

    @classmethod
    def at(cls, federation: Federation, state: ModelState, outer_state: dict[str, Float32], head: Head) -> "Replica":
        """The replica that stands at `head` with these vectors, as a checkpoint kept them."""
        replica = cls(federation, state)
        replica.outer_state = outer_state
        replica._move_to(head)
        return replica

    def take(self, other: "Replica") -> None:
        """Stand where `other` stands; its model is taken, its outer state copied into the vectors here."""
        self.state = other.state
        for name, vector in other.outer_state.items():
            self.outer_state[name][:] = vector
        self._move_to(other.head)

    def hashes(self) -> FoldedHashes:
        """The hashes of the model and of the whole replicated state as they stand."""
        leaves = [_leaf(self.state.shard(shard)) for shard in self.schema.shards]
        outer_leaves = [
            _leaf(vector[shard.start : shard.stop])
            for shard in self.schema.shards
            if shard.kind == "parameters"
            for vector in self.outer_state.values()
        ]
        return self._combined(leaves, outer_leaves, self.head)

    def preview(self, body: Body, raw: bytes, read_update: ReadUpdate) -> FoldedHashes:
        """The hashes that folding `body` would give; nothing is kept. Raises PayloadError for a damaged update."""
        return self._walk(body, raw, read_update, keep=False)

    def fold(self, body: Body, raw: bytes, read_update: ReadUpdate) -> None:
        """Fold a committed body in place. Raises LedgerError if the result is not the state that the body promises."""
        if body.parent != self.head.commit_hash:
            raise LedgerError(f"round {body.server_round} does not follow round {self.head.server_round}")
        hashes = self._walk(body, raw, read_update, keep=True)
        if hashes != FoldedHashes(body.model_hash, body.state_hash):
            raise LedgerError(
                f"folding round {body.server_round} gave another state than a majority committed",
                "this replica is damaged: start it again so that it is built anew from its ledger",
            )
        self._move_to(self.head.after(body, raw, self.federation))

    def _move_to(self, head: Head) -> None:
        self.head = head
        if head.brokers != self.federation.brokers:
            self.federation = self.federation.with_brokers(head.brokers)

    def _walk(self, body: Body, raw: bytes, read_update: ReadUpdate, keep: bool) -> FoldedHashes:
        leaves, outer_leaves = [], []
        scalars = (*self.head.next_scalars(self.federation), *self._taken(body))
        for shard in self.schema.shards:
            values, vectors = self._folded(shard, read_update(shard.index), scalars, keep)
            leaves.append(_leaf(values))
            outer_leaves += [_leaf(vector) for vector in vectors]
        return self._combined(leaves, outer_leaves, self.head.after(body, raw, self.federation))

    def _combined(self, leaves: list[bytes], outer_leaves: list[bytes], after: Head) -> FoldedHashes:
        model = merkle_root("model", leaves)
        facts = encode((model, merkle_root("outer", outer_leaves), after.digest(self.federation)))
        return FoldedHashes(model, digest("state", facts))

    def _taken(self, body: Body) -> tuple[np.float32, ...]:
        members = max(len(self.federation.members), len({one.client for one in body.counted}), 1)
        steps = body.total_steps / body.total_share if body.total_share else 1.0
        return self._outer.taken(steps, len(body.counted) / members)

    def _folded(
        self, shard: Shard, payload: bytes, scalars: tuple[np.float32, ...], keep: bool
    ) -> tuple[Float32 | Int64, list[Float32]]:
        if shard.kind == "counters":
            counters = self.state.counters[shard.start : shard.stop]
            counters = counters if keep else counters.copy()
            outer.fold_counters(counters, decode_counters(payload, shard.count))
            return counters, []
        values = self.state.vector[shard.start : shard.stop]
        values = values if keep else values.copy()
        if shard.kind == "buffers":
            start = shard.start - self.schema.parameter_stop
            minima = self._minima[start : start + shard.count]
            outer.fold_buffers(values, BUFFER_CODEC.decode(payload, shard.count), minima)
            self._clear_padding(shard, values)
            return values, []
        update = codecs.get(self.federation.codecs.down).decode(payload, shard.count)
        vectors = [vector[shard.start : shard.stop] for vector in self.outer_state.values()]
        if not keep:
            vectors = [vector.copy() for vector in vectors]
        self._outer.step(values, update, tuple(vectors), scalars)
        self._clear_padding(shard, values, *vectors)
        if not np.isfinite(values).all():
            raise PayloadError(f"the update of shard {shard.index} makes parameters that are not finite")
        return values, vectors

    def _clear_padding(self, shard: Shard, *vectors: Float32) -> None:
        """What stands behind the last tensor belongs to no tensor, and stays zero whatever an update says there."""
        schema = self.schema
        if shard.kind == "parameters":
            used = schema.parameter_count - shard.start
        else:
            used = schema.parameter_stop + sum(spec.count for spec in schema.buffers) - shard.start
        if used < shard.count:
            for vector in vectors:
                vector[max(used, 0) :] = 0.0

    def _buffer_minima(self) -> Float32:
        minima = np.full(self.schema.vector_size - self.schema.parameter_stop, -np.inf, np.float32)
        for spec in self.schema.buffers:
            _, offset, _ = self.schema.offsets[spec.name]
            start = offset - self.schema.parameter_stop
            if spec.minimum is not None:
                minima[start : start + spec.count] = np.float32(spec.minimum)
        return minima
