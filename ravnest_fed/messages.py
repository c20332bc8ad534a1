"""What nodes say to each other: every message on the wire and every signed fact, as msgspec structs.

Messages are MessagePack arrays tagged by name. A later version may append fields with defaults, so that neighbouring
versions understand each other. Facts that outlive a connection (work orders, manifests, evaluations, receipts,
inventories, votes) travel as `Signed` bytes, and are hashed and checked as those bytes, never re-encoded.

Anything that grows with clients or parameters travels as a blob: a `BlobRef` names it, and the receiver fetches its
chunks with `Want`. A small blob may ride along inside its reference.
"""

from typing import Final, TypeVar

import msgspec

from ravnest_fed.errors import RemoteProtocolError
from ravnest_fed.hashing import CHUNK_SIZE, blob_hash, digest
from ravnest_fed.identity import Identity, Signed, verify

PROTOCOL_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 1024 * 1024
MAX_WANTED: Final = 64
"""Most chunks that one `Want` may name."""
MAX_INLINE: Final = 32 * 1024
"""Blobs of at most this many bytes ride along in their reference."""
CHUNK_LIST: Final = -1
"""The index by which a `Want` asks for a blob's list of chunk hashes."""

assert CHUNK_SIZE < MAX_MESSAGE_BYTES


class Reason:
    """The named reasons for which a broker turns a client or a contribution away."""

    UNKNOWN_CLIENT = "unknown-client"
    WRONG_FEDERATION = "wrong-federation"
    WRONG_RECIPE = "wrong-recipe"
    WRONG_VERSION = "wrong-version"
    WRONG_SIGNATURE = "wrong-signature"
    WRONG_BASE = "wrong-base"
    WRONG_ORDER = "wrong-order"
    WRONG_HASH = "wrong-hash"
    WRONG_CODEC = "wrong-codec"
    WRONG_SHAPE = "wrong-shape"
    WRONG_LENGTH = "wrong-length"
    DAMAGED_PAYLOAD = "damaged-payload"
    NOT_FINITE = "not-finite"
    OUT_OF_RANGE = "out-of-range"
    WRONG_NORM = "wrong-norm"
    BAD_COUNT = "bad-count"
    BAD_METRICS = "bad-metrics"
    REPLAYED = "replayed-sequence"
    EQUIVOCATION = "second-delta-for-a-round"
    OUT_OF_DATE = "out-of-date"
    STOPPED = "training-has-ended"


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
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


# --- facts -----------------------------------------------------------------------------------------------------------


class WorkOrder(_Message, frozen=True):
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


class Manifest(_Message, frozen=True):
    """The signed description of a delta. `payload_root` is the Merkle root over its shards' blob hashes.

    `norm` is the L2 norm and `max_abs` the greatest magnitude of the decoded parameters' delta; both are exact functions
    of the payload, so a broker that measures anything else knows that the client lied. `last_round` is the last round
    that may count this contribution.
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


class Evaluation(_Message, frozen=True):
    """What a client measured on the committed model of `server_round`."""

    federation: bytes
    client: str
    server_round: int
    model_hash: bytes
    num_examples: int
    metrics: dict[str, float]


class Receipt(_Message, frozen=True):
    """A broker's word that a contribution was verified and stored: stop uploading."""

    federation: bytes
    manifest_hash: bytes


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """The shards of one contribution that a broker holds, ready to be counted."""

    manifest_hash: bytes
    shards: tuple[int, ...]


class Inventory(_Message, frozen=True):
    """What a broker holds for `server_round`, as their owner; several inventories add up."""

    federation: bytes
    server_round: int
    holdings: tuple[Holding, ...]


class Vote(_Message, frozen=True):
    """A broker's vote for a body in a view."""

    federation: bytes
    server_round: int
    view: int
    body_hash: bytes


class Counted(msgspec.Struct, frozen=True, array_like=True):
    """One contribution that a round counts. The mean is the sum of weight * delta over the sum of shares."""

    client: str
    sequence: int
    manifest_hash: bytes
    weight: int
    share: int
    norm: float
    max_abs: float


class Body(_Message, frozen=True):
    """What a round decided: the value of its Paxos decree. Holds neither the view nor this round's owners.

    `metrics` are the example-weighted means of what clients measured on the parent's model. `evidence` is the blob with
    the signed manifests and evaluations. `owners` (roster indices by shard), `next_scale_bits` and `next_clip_bound`
    (infinite: no clipping) rule the next round. `stop` is empty, or says why training ends here.
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


# --- transfer --------------------------------------------------------------------------------------------------------


class Want(_Message, frozen=True):
    """Asks for chunks of a blob by index; `CHUNK_LIST` asks for the list of its chunk hashes."""

    blob: bytes
    indices: tuple[int, ...]


class Chunk(_Message, frozen=True):
    """One chunk of a blob, or its chunk list as concatenated hashes."""

    blob: bytes
    index: int
    data: bytes


class Absent(_Message, frozen=True):
    """The answer to a `Want` for a blob that this node does not hold."""

    blob: bytes


# --- client and broker -----------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """A client's or the operator's greeting; the newest one of a key supersedes its older session."""

    protocol: int
    federation: bytes
    node_id: str
    recipe_hash: str
    server_round: int


class Welcome(_Message, frozen=True):
    """The broker's answer: where its ledger stands, and the highest sequence that it has seen of this client."""

    protocol: int
    federation: bytes
    broker: str
    server_round: int
    highest_sequence: int
    federation_file: BlobRef
    initial_model: BlobRef


class Refused(_Message, frozen=True):
    """A client or its contribution (`manifest_hash`) is turned away for a named reason."""

    reason: str
    text: str
    manifest_hash: bytes = b""


class OrderNotice(_Message, frozen=True):
    """A signed work order."""

    order: Signed


class Waiting(_Message, frozen=True):
    """What the federation waits for, for the client to show."""

    server_round: int
    text: str


class Offer(_Message, frozen=True):
    """A client has a contribution to upload; the broker fetches the shards' blobs."""

    manifest: Signed
    shards: tuple[BlobRef, ...]


class ReceiptNotice(_Message, frozen=True):
    """A signed receipt."""

    receipt: Signed


class Skip(_Message, frozen=True):
    """A client will send nothing for the round based on `base_round`, and says why."""

    base_round: int
    reason: str


class EvaluationNotice(_Message, frozen=True):
    """A signed evaluation; brokers pass it on to each other."""

    evaluation: Signed


class Ready(_Message, frozen=True):
    """A client holds the model of `server_round`: send newer commits, or else a work order."""

    server_round: int


class CommitsRequest(_Message, frozen=True):
    """Asks for the commits after `server_round`."""

    server_round: int


class CommitNotice(_Message, frozen=True):
    """A commit to fetch."""

    server_round: int
    commit: BlobRef


class Goodbye(_Message, frozen=True):
    """The sender leaves, on purpose."""

    reason: str


class StatusRequest(_Message, frozen=True):
    """Asks for a broker's status and the rows of rounds after `server_round`."""

    server_round: int


class RoundRow(msgspec.Struct, frozen=True, array_like=True):
    """One committed round as a broker saw it. Bytes are this broker's own, to and from its clients."""

    server_round: int
    contributions: int
    model_hash: bytes
    seconds: float
    training_seconds: float
    bytes_up: int
    bytes_down: int
    clients: tuple[str, ...]
    num_examples: tuple[int, ...]
    local_steps: tuple[int, ...]


class ClientRow(msgspec.Struct, frozen=True, array_like=True):
    """A client as this broker sees it: traffic in bytes, and the last round whose model it proved to hold (-1: none)."""

    client: str
    live: bool
    server_round: int
    bytes_up: int
    bytes_down: int


class Status(_Message, frozen=True):
    """Where a broker is and what it waits for."""

    broker: str
    server_round: int
    model_hash: bytes
    stop: str
    waiting: str
    peers: tuple[str, ...]
    rounds: tuple[RoundRow, ...]
    metrics: dict[int, dict[str, float]]
    clients: tuple[ClientRow, ...]
    refusals: dict[str, int]
    memory_bytes: int = 0
    disk_free_bytes: int = 0


# --- broker and broker -----------------------------------------------------------------------------------------------


class PeerHello(_Message, frozen=True):
    """A broker's greeting to another, and its heartbeat.

    `known` is a digest of what it knows of the open round's contributions, so that the other can see that it missed some.
    """

    protocol: int
    federation: bytes
    node_id: str
    server_round: int
    known: bytes = b""


class Presence(_Message, frozen=True):
    """The clients that this broker has sessions with, and those that it saw go or skip in this round."""

    server_round: int
    live: tuple[str, ...]
    away: tuple[str, ...]


class Announcement(_Message, frozen=True):
    """The home broker admitted a contribution: its manifest, and the blobs that its owners fetch."""

    manifest: Signed
    shards: tuple[BlobRef, ...]


class InventoryRequest(_Message, frozen=True):
    """A proposer gathers what others hold for a round."""

    server_round: int
    view: int


class InventoryNotice(_Message, frozen=True):
    """A signed inventory."""

    server_round: int
    inventory: Signed


class PlanNotice(_Message, frozen=True):
    """A proposer's plan: what to reduce, and which broker owns each shard (roster indices)."""

    view: int
    reduction: Reduction
    owners: tuple[int, ...]


class ShardReduced(_Message, frozen=True):
    """An owner's encoded mean of a shard for the reduction with this hash."""

    server_round: int
    reduction_hash: bytes
    shard: int
    update: BlobRef


class Prepare(_Message, frozen=True):
    """A proposer of a later view asks for promises."""

    server_round: int
    view: int


class Promise(_Message, frozen=True):
    """The promise to vote in no view below `view`, with the highest vote cast so far and its whole body."""

    server_round: int
    view: int
    voted_view: int
    body: BlobRef | None


class Refusal(_Message, frozen=True):
    """A request of a view below the promise; carries the highest promise made."""

    server_round: int
    promised: int


class Propose(_Message, frozen=True):
    """The proposer of a view puts a body to the vote."""

    server_round: int
    view: int
    body: BlobRef


class VoteNotice(_Message, frozen=True):
    """A signed vote."""

    server_round: int
    vote: Signed


TransferMessage = Want | Chunk | Absent
ToBroker = (
    Hello | Ready | Offer | Skip | EvaluationNotice | CommitsRequest | Goodbye | StatusRequest | Want | Chunk | Absent
)
ToClient = (
    Welcome | Refused | OrderNotice | Waiting | ReceiptNotice | CommitNotice | Goodbye | Status | Want | Chunk | Absent
)
ToPeer = (
    PeerHello
    | Presence
    | Announcement
    | InventoryRequest
    | InventoryNotice
    | PlanNotice
    | ShardReduced
    | Prepare
    | Promise
    | Refusal
    | Propose
    | VoteNotice
    | CommitsRequest
    | CommitNotice
    | EvaluationNotice
    | Goodbye
    | Want
    | Chunk
    | Absent
)
Message = ToBroker | ToClient | ToPeer
Fact = WorkOrder | Manifest | Evaluation | Receipt | Inventory | Vote

_encoder = msgspec.msgpack.Encoder()
_to_broker = msgspec.msgpack.Decoder(ToBroker)
_to_client = msgspec.msgpack.Decoder(ToClient)
_to_peer = msgspec.msgpack.Decoder(ToPeer)
_decoders: dict[type, msgspec.msgpack.Decoder] = {}  # type: ignore[type-arg]

T = TypeVar("T")


def encode(value: object) -> bytes:
    """The canonical bytes of a message, fact or part of one."""
    return _encoder.encode(value)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", raw: bytes, what: str) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"{what} of {len(raw)} bytes does not decode: {error}", "it is ignored") from None


def decode_to_broker(raw: bytes) -> ToBroker:
    """A client's message to a broker. Raises RemoteProtocolError."""
    return _decode(_to_broker, raw, "a client's message")


def decode_to_client(raw: bytes) -> ToClient:
    """A broker's message to a client. Raises RemoteProtocolError."""
    return _decode(_to_client, raw, "a broker's message")


def decode_to_peer(raw: bytes) -> ToPeer:
    """A broker's message to a broker. Raises RemoteProtocolError."""
    return _decode(_to_peer, raw, "a peer's message")


def decode(kind: type[T], raw: bytes) -> T:
    """The fact or part of type `kind` in `raw`. Raises RemoteProtocolError."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    value: T = _decode(decoder, raw, f"a {getattr(kind, '__name__', kind)}")
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


def body_hash(body: bytes) -> bytes:
    """Identity of a commit: the hash of its body's bytes, which the next body names as its parent."""
    return digest("body", body)


def reduction_hash(reduction: Reduction) -> bytes:
    """Tag of the results of a reduction."""
    return digest("reduction", encode(reduction))
