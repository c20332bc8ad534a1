"""What the client's session asks its shell to do, in order."""

from dataclasses import dataclass

from ravnest_fed.errors import RavnestError
from ravnest_fed.facts import BlobRef, WorkOrder
from ravnest_fed.identity import Signed
from ravnest_fed.links import LinkBroker
from ravnest_fed.messages import Message, Offer
from ravnest_fed.slices import Slice


@dataclass(frozen=True)
class Send:
    """Send a message to a broker."""

    broker: str
    message: Message


@dataclass(frozen=True)
class Fetch:
    """Get a blob from the home broker, and from `also` where these have it; answered by `Fetched` or `Missed`."""

    ref: BlobRef
    broker: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reconnect:
    """The roster in force is this one: keep lines to exactly its brokers, and remember them for the next start."""

    brokers: tuple[LinkBroker, ...]


@dataclass(frozen=True)
class ReadFederation:
    """Parse the federation file in this blob; answered by `FederationRead`."""

    ref: BlobRef


@dataclass(frozen=True)
class Prepare:
    """Load the initial model in this blob and the recipe's model beside it; answered by `Prepared`."""

    ref: BlobRef


@dataclass(frozen=True)
class OpenCommit:
    """Decode the commit in this blob and check its votes; answered by `CommitOpened`.

    Votes count by the roster in force, or where `changes` are given, by the one that these make for the commit's round.
    """

    ref: BlobRef
    broker: str
    changes: tuple[tuple[int, Signed], ...] | None = None


@dataclass(frozen=True)
class Fold:
    """Fold the opened commit of this round; answered by `Folded`."""

    server_round: int


@dataclass(frozen=True)
class TakeUp:
    """Go on from a fetched checkpoint whose commit was opened; answered by `Folded`, or `CommitRefused`."""

    server_round: int
    checkpoint: BlobRef


@dataclass(frozen=True)
class Evaluate:
    """Evaluate the head's model; answered by `Evaluated`."""

    server_round: int


@dataclass(frozen=True)
class Train:
    """Do the local round of this order, on this slice of shared data.

    Answered by `Trained`, `Finished`, `Overtaken`, `Yielded` or `TrainingFailed`.
    """

    order: WorkOrder
    slice: Slice = ()


@dataclass(frozen=True)
class Encode:
    """Encode what was trained for this order; answered by `Trained`."""

    order: WorkOrder


@dataclass(frozen=True)
class AbandonTraining:
    """Stop the local round under way at its next step; nothing is answered."""


@dataclass(frozen=True)
class Keep:
    """Make our own contribution durable, before what follows; its payloads are on disk.

    `residual` is what it leaves unsent, in the same write; None: what is owed stays as it is. `control` is the client's
    control once it is counted.
    """

    offer: Offer
    residual: tuple[BlobRef, ...] | None = None
    control: tuple[BlobRef, ...] | None = None


@dataclass(frozen=True)
class Forget:
    """A commit has moved past our contribution: nobody will ask for it any more.

    Where no commit counted it, what it sent is owed again; one durable write says both.
    """

    counted: bool = True


@dataclass(frozen=True)
class Tell:
    """Something for the owner of this machine to see."""

    event: str
    fields: dict[str, object]
    warning: bool = False


@dataclass(frozen=True)
class End:
    """The session is over: well, or with an error."""

    reason: str
    error: RavnestError | None = None


Effect = (
    Reconnect
    | Send
    | Fetch
    | ReadFederation
    | Prepare
    | OpenCommit
    | Fold
    | TakeUp
    | Evaluate
    | Train
    | Encode
    | AbandonTraining
    | Keep
    | Forget
    | Tell
    | End
)
