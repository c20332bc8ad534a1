"""What a broker's shell tells its core."""

from dataclasses import dataclass

from brokers.effects import Store
from ravnest_fed.facts import BlobRef, Body, Commit
from ravnest_fed.head import Head
from ravnest_fed.messages import Message


@dataclass(frozen=True)
class PeerUp:
    """The connection to a broker stands."""

    node_id: str


@dataclass(frozen=True)
class PeerDown:
    """The connection to a broker is lost."""

    node_id: str


@dataclass(frozen=True)
class FromPeer:
    """A message of an authenticated broker."""

    node_id: str
    message: Message


@dataclass(frozen=True)
class FromClient:
    """A message on a client's session, whose connection proved `curve_key` (hex)."""

    session: str
    curve_key: str
    message: Message


@dataclass(frozen=True)
class SessionLost:
    """A client's connection is lost."""

    session: str


@dataclass(frozen=True)
class Fetched:
    """A blob is here, whole and verified; `data` holds it where it was fetched into memory."""

    blob: bytes
    into: Store
    data: bytes | None = None


@dataclass(frozen=True)
class Missed:
    """No donor had a blob; `lying` names those who sent wrong bytes."""

    blob: bytes
    into: Store
    lying: tuple[str, ...]


@dataclass(frozen=True)
class Inspected:
    """The finding on an upload: `reason` is empty if it is sound."""

    manifest_hash: bytes
    reason: str
    text: str


@dataclass(frozen=True)
class Reduced:
    """A shard's encoded mean is on disk."""

    reduction_hash: bytes
    shard: int
    update: BlobRef


@dataclass(frozen=True)
class Previewed:
    """The hashes that folding `draft` gives; empty, with a finding, if an update is damaged."""

    draft: Body
    model_hash: bytes
    state_hash: bytes
    finding: str


@dataclass(frozen=True)
class Examined:
    """The finding on a body; empty if it is sound and folding it gives its state hash."""

    raw: bytes
    finding: str


@dataclass(frozen=True)
class CheckpointWritten:
    """A checkpoint is on disk as a blob; `checkpoint` is None, with the reason, where that failed."""

    server_round: int
    checkpoint: BlobRef | None
    finding: str


@dataclass(frozen=True)
class Adopted:
    """A fetched checkpoint was read: the head that it gives, or None with what is wrong with it."""

    commit: Commit
    server_round: int
    checkpoint: BlobRef
    head: Head | None
    finding: str


@dataclass(frozen=True)
class Drain:
    """The operator wants to stop this broker, without haste."""


@dataclass(frozen=True)
class Tick:
    """Time has passed. `wall` is seconds since the epoch, for stop dates only; `free` the bytes free on the ledger's disk."""

    wall: float
    free: int | None = None


Event = (
    PeerUp
    | PeerDown
    | FromPeer
    | FromClient
    | SessionLost
    | Fetched
    | Missed
    | Inspected
    | Reduced
    | Previewed
    | Examined
    | CheckpointWritten
    | Adopted
    | Drain
    | Tick
)
