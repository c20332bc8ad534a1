"""What a client still owes the model: the residual of codecs that lose much, under every turn a contribution can take.

Error feedback (Seide et al., "1-Bit Stochastic Gradient Descent" (2014); Karimireddy et al., "Error Feedback Fixes
SignSGD" (2019)): a client sends its delta plus what earlier contributions left unsent, and keeps what this one leaves.

- A contribution that was counted needs nothing more: its residual stands since it was signed.
- One that will never be counted is *returned*: its decoded payload joins the residual again, exactly once.

Nothing here does I/O. `Standing` is the whole durable state; each step gives the next one, which its keeper writes at
once, so that a kill finds either the state before or the one after. Blobs are durable before a standing names them.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from ravnest_fed import codecs
from ravnest_fed.codecs import Codec
from ravnest_fed.errors import LedgerError, PayloadError
from ravnest_fed.facts import BlobRef, Manifest, decode
from ravnest_fed.messages import Offer
from ravnest_fed.parameters import Float32, Schema, Shard

ReadBlob = Callable[[bytes], bytes]
"""Gives a blob by its hash. Raises LedgerError if it is missing or damaged."""
PutBlob = Callable[[bytes], BlobRef]
"""Keeps a blob durably."""


class Returned(msgspec.Struct, frozen=True, array_like=True):
    """The payloads, by shard of parameters, of a contribution that will never be counted."""

    codec: str
    shards: tuple[BlobRef, ...]


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """All that a client must not forget, of one member of one federation, whose file fixes the schema.

    `offer` waits to be counted; `sequences` are those under which its payload was signed, the last one its own.
    `residual` holds float32 values, a blob for each shard of parameters; empty: zeros. `returned` is owed on top of it.
    `control` is SCAFFOLD's control of this client, likewise; `next_control` takes its place once `offer` is counted.
    """

    federation: bytes
    client: str
    offer: Offer | None = None
    sequences: tuple[int, ...] = ()
    residual: tuple[BlobRef, ...] = ()
    returned: Returned | None = None
    control: tuple[BlobRef, ...] = ()
    next_control: tuple[BlobRef, ...] = ()

    def keep(
        self,
        offer: Offer,
        residual: tuple[BlobRef, ...] | None,
        control: tuple[BlobRef, ...] | None = None,
    ) -> "Standing":
        """A contribution was signed, and leaves `residual` unsent; None: the residual stays as it is.

        It stays under a codec without error feedback, and where the same payload is signed under another sequence.
        `control` is this client's control once the contribution is counted; None: as it was.
        """
        bare = Offer(offer.manifest, tuple(ref.bare() for ref in offer.shards))
        again = self.offer is not None and self.offer.shards == bare.shards
        sequence = decode(Manifest, offer.manifest.payload).sequence
        kept = msgspec.structs.replace(self, offer=bare, sequences=(*(self.sequences if again else ()), sequence))
        if control is not None:
            kept = msgspec.structs.replace(kept, next_control=tuple(ref.bare() for ref in control))
        if residual is None:
            return kept
        # What was returned is part of what the new contribution sends, or of what it leaves.
        return msgspec.structs.replace(kept, residual=tuple(ref.bare() for ref in residual), returned=None)

    def forget(self, counted: bool) -> "Standing":
        """The contribution was counted, or never will be. Without one, nothing changes."""
        if self.offer is None:
            return self
        control = self.next_control if counted and self.next_control else self.control
        gone = msgspec.structs.replace(self, offer=None, sequences=(), control=control, next_control=())
        codec = decode(Manifest, self.offer.manifest.payload).codec
        if counted or codecs.get(codec).feedback_decay is None:
            return gone
        return msgspec.structs.replace(gone, returned=Returned(codec, self.offer.shards[: len(self.residual)]))

    @property
    def blobs(self) -> set[bytes]:
        """The blobs that are still needed."""
        refs = [
            *self.residual,
            *self.control,
            *self.next_control,
            *(self.offer.shards if self.offer else ()),
            *(self.returned.shards if self.returned else ()),
        ]
        return {ref.hash for ref in refs}


class ErrorFeedback:
    """Puts the residual in front of a codec and takes up what it leaves: one contribution, one shard at a time.

    `standing` is what the client owes; `left` grows to the residual after this contribution. `lost` names the shards
    whose residual could not be read and counts as zeros.
    """

    def __init__(self, schema: Schema, codec: Codec, standing: Standing, read: ReadBlob, put: PutBlob) -> None:
        self.left: list[BlobRef] = []
        self.lost: list[int] = []
        self._schema = schema
        self._decay = np.float32(1.0 if codec.feedback_decay is None else codec.feedback_decay)
        self._standing = standing
        self._read = read
        self._put = put

    def wanted(self, shard: Shard, delta: Float32) -> Float32:
        """What shall be sent of a shard of parameters: float32 delta + decay * (residual + what was returned)."""
        owed = self._owed(shard)
        if owed is None:
            return delta
        owed *= self._decay
        owed += delta
        return owed

    def sent(self, shard: Shard, wanted: Float32, decoded: Float32) -> None:
        """The shard's payload decodes to `decoded`: what it leaves of `wanted` is kept."""
        left = wanted - decoded
        # Padding stands for no parameter: a codec's error there is owed to nobody.
        left[max(0, self._schema.parameter_count - shard.start) :] = 0
        self.left.append(self._put(left.astype("<f4").tobytes()).bare())

    def _owed(self, shard: Shard) -> Float32 | None:
        owed: Float32 | None = None
        try:
            if shard.index < len(self._standing.residual):
                owed = np.frombuffer(self._read(self._standing.residual[shard.index].hash), "<f4").astype(np.float32)
                if owed.size != shard.count:
                    raise LedgerError(f"the residual of shard {shard.index} has {owed.size} values, not {shard.count}")
            returned = self._standing.returned
            if returned is not None and shard.index < len(returned.shards):
                payload = self._read(returned.shards[shard.index].hash)
                decoded = codecs.get(returned.codec).decode(payload, shard.count)
                owed = decoded if owed is None else owed + decoded
        except (LedgerError, PayloadError):
            self.lost.append(shard.index)
            return None
        return owed
