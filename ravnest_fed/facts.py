"""Facts: what nodes sign and agree on, as msgspec structs whose bytes are hashed and kept.

A fact that outlives a connection (work order, manifest, evaluation, receipt, inventory, vote) travels as `Signed` bytes and
is checked as those bytes, never re-encoded. Structs are MessagePack arrays; a later version may append fields with
defaults. What grows with clients or parameters is a blob, named by a `BlobRef`.
"""

from typing import Final, TypeVar

import msgspec

from ravnest_fed.errors import RemoteProtocolError
from ravnest_fed.hashing import blob_hash, digest
from ravnest_fed.identity import Identity, Signed, verify
from ravnest_fed.slices import Slice

MAX_INLINE: Final = 32 * 1024
"""Blobs of at most this many bytes ride along in their reference."""


class _Fact(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything that has a tag on the wire."""


class BlobRef(msgspec.Struct, frozen=True, array_like=True):
    """Names a blob by hash and length; `inline` holds the blob itself when it is small."""

    hash: bytes
    length: int
    inline: bytes = b""

    @classmethod
    def of(cls, blob: bytes, inline: bool = True) -> "BlobRef":
        """The reference to `blob`, with the blob inside if it is small and `inline` allows it."""
        return cls(blob_hash(blob), len(blob), blob if inline and len(blob) <= MAX_INLINE else b"")

    def bare(self) -> "BlobRef":
        """The same reference without the blob inside."""
        return BlobRef(self.hash, self.length)


class WorkOrder(_Fact, frozen=True):
    """What a broker asks of a client for one round. Signed by the broker; durations in seconds.

    `committed_steps` counts the local steps of all committed rounds, for learning rate schedules.
    """

    federation: bytes
    client: str
    base_round: int
    base_hash: bytes
    micro_batch: int
    accumulation: int
    local_steps: int
    partition_index: int
    partition_count: int
    codec: str
    deadline_seconds: float
    committed_steps: int

    @property
    def max_examples(self) -> int:
        """Most examples that this order can cover."""
        return self.micro_batch * self.accumulation * self.local_steps


class Manifest(_Fact, frozen=True):
    """The signed description of a delta. `payload_root` is the Merkle root over its shards' blob hashes.

    `norm` is the L2 norm and `max_abs` the greatest magnitude of the decoded parameters' delta; both are exact functions
    of the payload, so a broker that measures anything else knows that the client lied. `last_round` is the last round
    that may count this contribution. `slice` are the `num_examples` positions of shared data that it was trained on.
    """

    federation: bytes
    client: str
    sequence: int
    base_round: int
    base_hash: bytes
    last_round: int
    codec: str
    payload_root: bytes
    shard_count: int
    num_examples: int
    local_steps: int
    norm: float
    max_abs: float
    metrics: dict[str, float]
    training_seconds: float
    order: Signed
    slice: Slice = ()


class Evaluation(_Fact, frozen=True):
    """What a client measured on the committed model of `server_round`."""

    federation: bytes
    client: str
    server_round: int
    model_hash: bytes
    num_examples: int
    metrics: dict[str, float]


class Receipt(_Fact, frozen=True):
    """A broker's word that a contribution was verified and stored: stop uploading."""

    federation: bytes
    manifest_hash: bytes


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """The shards of one contribution that a broker holds, ready to be counted."""

    manifest_hash: bytes
    shards: tuple[int, ...]


class Inventory(_Fact, frozen=True):
    """What a broker holds for `server_round`, as their owner; several inventories add up."""

    federation: bytes
    server_round: int
    holdings: tuple[Holding, ...]


class Vote(_Fact, frozen=True):
    """A broker's vote for a body in a view."""

    federation: bytes
    server_round: int
    view: int
    body_hash: bytes


class RosterChange(_Fact, frozen=True):
    """The operator's change of the roster: `action` is "add", "remove" or "readdress", `number` counts from 1.

    The rest is the broker's entry, keys in hex.
    """

    federation: bytes
    number: int
    action: str
    name: str
    public_key: str
    curve_key: str
    client_address: str
    peer_address: str


class Counted(msgspec.Struct, frozen=True, array_like=True):
    """One contribution that a round counts. The mean is the sum of weight * delta over the sum of shares.

    `steps` is what the client divided its parameters by: its local steps where the strategy normalises them, else 1.
    `covered` are the positions of shared data that are trained on with it, once and for all.
    """

    client: str
    sequence: int
    manifest_hash: bytes
    weight: int
    share: int
    norm: float
    max_abs: float
    steps: int = 1
    covered: Slice = ()


class Body(_Fact, frozen=True):
    """What a round decided: the value of its Paxos decree. Holds neither the view nor this round's owners.

    `metrics` are the example-weighted means of what clients measured on the parent's model. `evidence` is the blob with
    the signed manifests and evaluations. `owners` (roster indices by shard), `next_scale_bits` and `next_clip_bound`
    (infinite: no clipping) rule the next round. `stop` is empty, or says why training ends here. `change` is a change of the
    roster, in force from the next round on. `total_steps` is the sum of share * steps: over `total_share`, it is the number
    of effective steps that multiplies the mean of the parameters.
    """

    federation: bytes
    server_round: int
    parent: bytes
    counted: tuple[Counted, ...]
    total_share: int
    scale_bits: int
    evidence: BlobRef
    metrics: dict[str, float]
    updates: tuple[BlobRef, ...]
    owners: tuple[int, ...]
    next_scale_bits: int
    next_clip_bound: float
    model_hash: bytes
    state_hash: bytes
    stop: str
    change: Signed | None = None
    total_steps: int = 0


class Evidence(msgspec.Struct, frozen=True, array_like=True):
    """The signed facts that a commit rests on: manifests in the order counted, evaluations by client."""

    manifests: tuple[Signed, ...]
    evaluations: tuple[Signed, ...]


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of a body and the votes of a majority for it in one view."""

    body: bytes
    votes: tuple[Signed, ...]


class Reduction(msgspec.Struct, frozen=True, array_like=True):
    """Exactly which contributions a round's shards are reduced over, and how; its hash tags the results."""

    server_round: int
    parent: bytes
    counted: tuple[Counted, ...]
    total_share: int
    scale_bits: int
    total_steps: int

    @property
    def effective_steps(self) -> float:
        """What the mean of the parameters is multiplied by: the mean of `steps`, weighted by shares; 1 without them."""
        return self.total_steps / self.total_share


Fact = WorkOrder | Manifest | Evaluation | Receipt | Inventory | Vote | RosterChange
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder] = {}  # type: ignore[type-arg]
T = TypeVar("T")


def encode(value: object) -> bytes:
    """The canonical bytes of a message, fact or part of one."""
    return _encoder.encode(value)


def decode_with(decoder: "msgspec.msgpack.Decoder[T]", raw: bytes, what: str) -> T:
    """What `decoder` reads in `raw`. Raises RemoteProtocolError, naming `what` was to be read."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"{what} of {len(raw)} bytes does not decode: {error}", "it is ignored") from None


def decode(kind: type[T], raw: bytes) -> T:
    """The fact or part of type `kind` in `raw`. Raises RemoteProtocolError."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    value: T = decode_with(decoder, raw, f"a {getattr(kind, '__name__', kind)}")
    return value


def sign(identity: Identity, fact: Fact) -> Signed:
    """`fact` under the signature of `identity`, in the domain of its kind."""
    return identity.sign(type(fact).__name__, encode(fact))


def open_signed(kind: type[T], signed: Signed, public_key: bytes | None) -> T | None:
    """The fact of type `kind` in `signed`; None where the key is unknown or the signature or the bytes are wrong."""
    if public_key is None or not verify(kind.__name__, signed, public_key):
        return None
    try:
        return decode(kind, signed.payload)
    except RemoteProtocolError:
        return None


def signed_hash(signed: Signed) -> bytes:
    """Identity of a signed fact: over its bytes and signature."""
    return digest("signed", encode(signed))


MAX_FACT_BYTES: Final = 8192
"""Most bytes of a signed manifest or evaluation: a round's evidence is bounded by this and their number."""


def within_bounds(signed: Signed) -> bool:
    """Whether a signed fact is small enough to stand in evidence."""
    return len(signed.payload) <= MAX_FACT_BYTES - 256


def body_hash(body: bytes) -> bytes:
    """Identity of a commit: the hash of its body's bytes, which the next body names as its parent."""
    return digest("body", body)


def reduction_hash(reduction: Reduction) -> bytes:
    """Tag of the results of a reduction."""
    return digest("reduction", encode(reduction))
