"""What nodes say to each other: every message on the wire, as msgspec structs.

Messages are MessagePack arrays tagged by name. A later version may append fields with defaults, so that neighbouring
versions understand each other. Anything that grows with clients or parameters travels as a blob: a `BlobRef` names it, and
the receiver fetches its chunks with `Want`. A small blob may ride along inside its reference.
"""

from typing import Final

import msgspec

from ravnest_fed.capability import Capability
from ravnest_fed.facts import BlobRef, Reduction, decode_with
from ravnest_fed.hashing import CHUNK_SIZE
from ravnest_fed.identity import Signed

PROTOCOL_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 1024 * 1024
MAX_WANTED: Final = 64
"""Most chunks that one `Want` may name."""
CHUNK_LIST: Final = -1
"""The index by which a `Want` asks for a blob's list of chunk hashes."""


class Reason:
    """The named reasons for which a broker turns a client or a contribution away."""

    UNKNOWN_CLIENT = "unknown-client"
    WRONG_FEDERATION = "wrong-federation"
    WRONG_RECIPE = "wrong-recipe"
    WRONG_VERSION = "wrong-version"
    WRONG_CHANGE = "wrong-change"
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
    WRONG_SLICE = "wrong-slice"
    REPLAYED = "replayed-sequence"
    EQUIVOCATION = "second-delta-for-a-round"
    COUNTED = "counted-already"
    OUT_OF_DATE = "out-of-date"
    STOPPED = "training-has-ended"
    NO_ROOM = "no-room"


assert CHUNK_SIZE < MAX_MESSAGE_BYTES


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything that has a tag on the wire."""


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


class Hello(_Message, frozen=True):
    """A client's or the operator's greeting; the newest one of a key supersedes its older session.

    A `guest` has its home elsewhere and is here to fetch blobs alone.
    """

    protocol: int
    federation: bytes
    node_id: str
    recipe_hash: str
    server_round: int
    guest: bool = False


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


class CheckpointNotice(_Message, frozen=True):
    """A checkpoint to fetch, and the commit of its round, whose votes prove it.

    `changes` are those of the roster so far, by round: they tell whose votes count.
    """

    server_round: int
    commit: BlobRef
    checkpoint: BlobRef
    changes: tuple[tuple[int, Signed], ...] = ()


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
    """Where a broker is and what it waits for; `covered` counts the samples of shared data that commits cover, over all
    epochs."""

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
    changes: tuple[tuple[int, Signed], ...] = ()
    covered: int = 0


class PeerHello(_Message, frozen=True):
    """A broker's greeting to another, and its heartbeat.

    `known` is a digest of what it knows of the open round's contributions, so that the other can see that it missed some;
    `checkpoint` is the blob hash of its newest checkpoint (round 0: none), which is the same on every broker.
    """

    protocol: int
    federation: bytes
    node_id: str
    server_round: int
    known: bytes = b""
    checkpoint_round: int = 0
    checkpoint: bytes = b""


class Presence(_Message, frozen=True):
    """The clients that this broker has sessions with, and those that it saw go or skip in this round."""

    server_round: int
    live: tuple[str, ...]
    away: tuple[str, ...]


class ChangeNotice(_Message, frozen=True):
    """A change of the roster that the operator signed, to be committed with the next round."""

    change: Signed


class Announcement(_Message, frozen=True):
    """The home broker admitted a contribution: its manifest, and the blobs that its owners fetch.

    `server_round` is the round that is to count it; 0: the one after its base.
    """

    manifest: Signed
    shards: tuple[BlobRef, ...]
    server_round: int = 0


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


class CapabilityNotice(_Message, frozen=True):
    """What a client's machine can do, by its own word; said after each welcome."""

    capability: Capability


TransferMessage = Want | Chunk | Absent
ToBroker = (
    Hello
    | Ready
    | Offer
    | Skip
    | EvaluationNotice
    | CommitsRequest
    | Goodbye
    | StatusRequest
    | Want
    | Chunk
    | Absent
    | CapabilityNotice
    | ChangeNotice
)
ToClient = (
    Welcome
    | Refused
    | OrderNotice
    | Waiting
    | ReceiptNotice
    | CommitNotice
    | CheckpointNotice
    | Goodbye
    | Status
    | Want
    | Chunk
    | Absent
)
ToPeer = (
    PeerHello
    | ChangeNotice
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
    | CheckpointNotice
    | EvaluationNotice
    | Goodbye
    | Want
    | Chunk
    | Absent
)
Message = ToBroker | ToClient | ToPeer
_to_broker = msgspec.msgpack.Decoder(ToBroker)
_to_client = msgspec.msgpack.Decoder(ToClient)
_to_peer = msgspec.msgpack.Decoder(ToPeer)


def decode_to_broker(raw: bytes) -> ToBroker:
    """A client's message to a broker. Raises RemoteProtocolError."""
    return decode_with(_to_broker, raw, "a client's message")


def decode_to_client(raw: bytes) -> ToClient:
    """A broker's message to a client. Raises RemoteProtocolError."""
    return decode_with(_to_client, raw, "a broker's message")


def decode_to_peer(raw: bytes) -> ToPeer:
    """A broker's message to a broker. Raises RemoteProtocolError."""
    return decode_with(_to_peer, raw, "a peer's message")


def round_of(message: Message) -> int | None:
    """The round that a broker's message is about, where it is about one."""
    reduction = getattr(message, "reduction", None)
    if reduction is not None:
        return int(reduction.server_round)
    server_round = getattr(message, "server_round", None)
    return None if server_round is None else int(server_round)
