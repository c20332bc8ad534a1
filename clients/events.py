"""What the client's shell tells its session."""

from dataclasses import dataclass
from typing import Literal

from ravnest_fed.capability import Capability
from ravnest_fed.errors import RavnestError
from ravnest_fed.facts import BlobRef
from ravnest_fed.federation import Federation
from ravnest_fed.head import Head
from ravnest_fed.messages import Message

LineState = Literal["up", "down", "refused", "mismatch"]


@dataclass(frozen=True)
class Line:
    """The connection to a broker changed its state."""

    broker: str
    state: LineState


@dataclass(frozen=True)
class FromBroker:
    """A message of a broker."""

    broker: str
    message: Message


@dataclass(frozen=True)
class Pulled:
    """A broker asked for a part of the contribution: its upload goes on."""

    broker: str


@dataclass(frozen=True)
class Fetched:
    """A blob is here."""

    blob: bytes


@dataclass(frozen=True)
class Missed:
    """No broker had a blob."""

    blob: bytes


@dataclass(frozen=True)
class FederationRead:
    """The federation file was parsed and is the one that the link names."""

    federation: Federation


@dataclass(frozen=True)
class Prepared:
    """The initial model is loaded and the recipe fits it; `capability` is what the machine can do, if that is asked for."""

    head: Head
    capability: Capability | None = None


@dataclass(frozen=True)
class CommitOpened:
    """A commit's votes were checked; `updates` are the blobs that folding it needs."""

    server_round: int
    updates: tuple[BlobRef, ...]


@dataclass(frozen=True)
class CommitRefused:
    """What the home broker sent as a commit is none, or no majority voted for it."""

    finding: str


@dataclass(frozen=True)
class Folded:
    """The replica stands at this head now."""

    head: Head


@dataclass(frozen=True)
class Evaluated:
    """The recipe's metrics of the head's model; empty if it has none."""

    server_round: int
    metrics: dict[str, float]
    num_examples: int


@dataclass(frozen=True)
class Trained:
    """A local round is done and its delta encoded; one blob a shard, and of the residual one a shard of parameters.

    `residual` is None under a codec without error feedback, `control` under a strategy without controls.
    """

    base_round: int
    shards: tuple[BlobRef, ...]
    norm: float
    max_abs: float
    num_examples: int
    local_steps: int
    metrics: dict[str, float]
    seconds: float
    residual: tuple[BlobRef, ...] | None = None
    control: tuple[BlobRef, ...] | None = None


@dataclass(frozen=True)
class Finished:
    """A local round is trained; it waits for `Encode`, since an earlier contribution is not settled yet."""

    base_round: int


@dataclass(frozen=True)
class Overtaken:
    """A local round was not begun: the replica had moved past its base already."""

    base_round: int


@dataclass(frozen=True)
class TrainingFailed:
    """A local round gave nothing to send."""

    base_round: int
    error: RavnestError


@dataclass(frozen=True)
class Yielded:
    """A local round was stopped before its first step: the owner needs the machine."""

    base_round: int


@dataclass(frozen=True)
class Needed:
    """The owner needs the machine from now on, and why; empty: not any more."""

    because: str


@dataclass(frozen=True)
class Leave:
    """The owner wants to stop: with `finish` after the round is handed in, unless that is wished a second time."""

    finish: bool = False


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    Line
    | FromBroker
    | Pulled
    | Fetched
    | Missed
    | FederationRead
    | Prepared
    | CommitOpened
    | CommitRefused
    | Folded
    | Evaluated
    | Trained
    | Finished
    | Overtaken
    | TrainingFailed
    | Yielded
    | Needed
    | Leave
    | Tick
)
