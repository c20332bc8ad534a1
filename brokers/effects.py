"""What a broker's core asks its shell to do. Carried out strictly in order, so what must be durable first stands first."""

from dataclasses import dataclass
from typing import Literal

from ravnest_fed.aggregation.weighting import Weight
from ravnest_fed.facts import BlobRef, Body, Commit, Manifest, Reduction
from ravnest_fed.federation import BrokerEntry
from ravnest_fed.identity import Signed
from ravnest_fed.messages import Message

Store = Literal["ledger", "spool", "memory"]
"""Where a fetched blob goes."""


@dataclass(frozen=True)
class SendPeer:
    """Send a message to a broker; lost if it is not connected."""

    node_id: str
    message: Message


@dataclass(frozen=True)
class SendClient:
    """Send a message to a client's session; lost if the session has ended."""

    session: str
    message: Message


@dataclass(frozen=True)
class EndSession:
    """Forget a client's session."""

    session: str


@dataclass(frozen=True)
class Fetch:
    """Get a blob from any donor (broker node ids or client sessions); answered by `Fetched` or `Missed`.

    `ledger` is for what a commit may name, `spool` for contributions of the open round, `memory` for small things, which
    the answer brings along.
    """

    ref: BlobRef
    donors: tuple[str, ...]
    into: Store


@dataclass(frozen=True)
class Abandon:
    """Stop fetching into a store all but `keep`, and forget what lies there in part: a commit has made it pointless."""

    into: Store
    keep: frozenset[bytes] = frozenset()


@dataclass(frozen=True)
class Cache:
    """Keep bytes in memory to serve them to others."""

    blob: bytes


@dataclass(frozen=True)
class SaveBlob:
    """Keep bytes durably as a blob."""

    blob: bytes


@dataclass(frozen=True)
class SavePromise:
    """Make a promise durable."""

    server_round: int
    view: int


@dataclass(frozen=True)
class SaveVote:
    """Make a vote and its body durable."""

    server_round: int
    view: int
    body: bytes


@dataclass(frozen=True)
class SaveContribution:
    """Make an admitted contribution durable; its shards are on disk already."""

    manifest: Signed
    opened: Manifest
    shards: tuple[BlobRef, ...]


@dataclass(frozen=True)
class SaveEquivocation:
    """Keep two manifests of one client for one round as evidence."""

    client: str
    base_round: int
    first: Signed
    second: Signed


@dataclass(frozen=True)
class SaveEvaluation:
    """Keep a client's evaluation."""

    server_round: int
    client: str
    signed: Signed


@dataclass(frozen=True)
class SaveCommit:
    """Append a commit to the ledger, and drop what the closed round needed. `seconds` the round took.

    The blobs `kept` stay in the spool: a later round may count what they belong to.
    """

    commit: Commit
    body: Body
    seconds: float
    kept: frozenset[bytes] = frozenset()


@dataclass(frozen=True)
class Fold:
    """Fold a saved commit into the replica."""

    commit: Commit
    body: Body


@dataclass(frozen=True)
class SendCommits:
    """Announce the commits after round `after` from the ledger, to a broker (`peer`) or a client's session."""

    to: str
    peer: bool
    after: int


@dataclass(frozen=True)
class SendCheckpoint:
    """Offer the checkpoint of a round, with the commit that proves it, to a broker (`peer`) or a client's session."""

    to: str
    peer: bool
    server_round: int
    checkpoint: BlobRef
    changes: tuple[tuple[int, Signed], ...] = ()


@dataclass(frozen=True)
class WriteCheckpoint:
    """Write the model as it stands after folding this round, durably, as a blob; answered by `CheckpointWritten`."""

    server_round: int


@dataclass(frozen=True)
class SaveCheckpoint:
    """Take a written checkpoint into the ledger; drop what is older than the last `keep`, and the blobs of that."""

    server_round: int
    checkpoint: BlobRef
    keep: int


@dataclass(frozen=True)
class Adopt:
    """Read a fetched checkpoint and check its state against the commit of its round; answered by `Adopted`."""

    commit: Commit
    server_round: int
    checkpoint: BlobRef


@dataclass(frozen=True)
class SaveAdopted:
    """Let a checkpoint and its commit stand in the ledger for everything before. The blobs `kept` stay in the spool."""

    commit: Commit
    server_round: int
    checkpoint: BlobRef
    kept: frozenset[bytes] = frozenset()


@dataclass(frozen=True)
class TakeUp:
    """Go on from the checkpoint that was adopted last."""

    server_round: int


@dataclass(frozen=True)
class Inspect:
    """Decode an uploaded contribution and measure it; answered by `Inspected`."""

    manifest_hash: bytes
    manifest: Manifest
    shards: tuple[BlobRef, ...]


@dataclass(frozen=True)
class Accumulate:
    """Add a contribution's shard to the sum that this broker owns, ahead of the plan."""

    server_round: int
    shard: int
    scale_bits: int
    manifest_hash: bytes
    ref: BlobRef
    weight: Weight


@dataclass(frozen=True)
class Reduce:
    """Encode the mean of a shard over exactly this reduction; answered by `Reduced`."""

    reduction: Reduction
    reduction_hash: bytes
    shard: int
    refs: tuple[BlobRef, ...]


@dataclass(frozen=True)
class Preview:
    """Compute the hashes that folding a drafted body would give; answered by `Previewed`."""

    draft: Body


@dataclass(frozen=True)
class Examine:
    """Check a body whose blobs are all here, votes too if a commit is given; answered by `Examined`."""

    raw: bytes
    commit: Commit | None


@dataclass(frozen=True)
class Damaged:
    """This broker's model is not the one that a majority has: it must end, and be built anew from its ledger."""

    finding: str


@dataclass(frozen=True)
class Reconnect:
    """The roster in force is this one: admit and dial exactly its brokers."""

    brokers: tuple[BrokerEntry, ...]


@dataclass(frozen=True)
class Stop:
    """This broker is drained: it may end."""


@dataclass(frozen=True)
class Say:
    """A line for the broker's log."""

    event: str
    fields: dict[str, object]
    warning: bool = False


Effect = (
    SendPeer
    | SendClient
    | EndSession
    | Fetch
    | Abandon
    | Cache
    | SaveBlob
    | SavePromise
    | SaveVote
    | SaveContribution
    | SaveEquivocation
    | SaveEvaluation
    | SaveCommit
    | Fold
    | SendCommits
    | SendCheckpoint
    | WriteCheckpoint
    | SaveCheckpoint
    | Adopt
    | SaveAdopted
    | TakeUp
    | Inspect
    | Accumulate
    | Reduce
    | Preview
    | Examine
    | Damaged
    | Stop
    | Reconnect
    | Say
)
