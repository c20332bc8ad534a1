"""The error tree of ravnest-fed.

Every error that a person or a peer can cause derives from `RavnestError`. Its text is one line that says what was
wrong, where, and what to do about it; its `exit_status` is what a command that ends on it returns to the shell, and
is distinct for each class that a command can end on.

    RavnestError                1   anything below
    ├── UsageError              2   a command was called in a way that cannot work
    ├── FederationFileError     3   federation.toml is damaged, unsigned or holds an unknown or impossible setting
    ├── RecipeError             4   the recipe cannot be loaded or breaks its contract
    ├── RecipeMismatch          5   the recipe is not the one that the federation file signs
    ├── SchemaMismatch          6   a model's parameters are off the federation's schema
    ├── NoDataError             7   a client has no training data
    ├── IdentityError           8   a key file is missing, damaged or readable by others
    ├── BrokerUnreachable       9   no broker answered
    ├── KeyRefused             10   a broker refused our key, or answered with another key than the federation's
    ├── AddressInUse           11   a broker cannot bind its address
    ├── WrongFederation        12   a directory, link or peer belongs to another federation
    ├── LedgerError            13   a ledger or blob on disk is missing or damaged
    ├── VerificationError      14   a ledger does not prove what it claims
    ├── AdmissionRefused       15   a broker refused a contribution, by a named reason
    ├── PayloadError           16   bytes from outside do not decode within their bounds
    ├── LocalProtocolError     17   this node was about to break the protocol: a bug
    ├── RemoteProtocolError    18   a peer broke the protocol
    └── ClusterError           19   a process of a local cluster failed
"""


class RavnestError(Exception):
    """Base of every error of this project; `what` says what was wrong and where, `remedy` what to do."""

    exit_status = 1

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.what}; {self.remedy}" if self.remedy else self.what
        return " ".join(text.split())


class UsageError(RavnestError):
    """A command was called in a way that cannot work."""

    exit_status = 2


class FederationFileError(RavnestError):
    """federation.toml is damaged, unsigned, or holds an unknown or impossible setting."""

    exit_status = 3


class RecipeError(RavnestError):
    """A recipe cannot be loaded, or breaks its contract."""

    exit_status = 4


class RecipeMismatch(RavnestError):
    """The recipe at hand is not the one that the federation file signs."""

    exit_status = 5


class SchemaMismatch(RavnestError):
    """A model's parameters are off the federation's schema."""

    exit_status = 6


class NoDataError(RavnestError):
    """A client has no training data."""

    exit_status = 7


class IdentityError(RavnestError):
    """A key or key file is missing, damaged, or readable by others."""

    exit_status = 8


class BrokerUnreachable(RavnestError):
    """No broker answered in time."""

    exit_status = 9


class KeyRefused(RavnestError):
    """A broker refused our key, or answered with another key than the federation file names."""

    exit_status = 10


class AddressInUse(RavnestError):
    """A broker cannot bind its address."""

    exit_status = 11


class WrongFederation(RavnestError):
    """A directory, a link or a peer belongs to another federation."""

    exit_status = 12


class LedgerError(RavnestError):
    """A ledger or a blob on disk is missing or damaged."""

    exit_status = 13


class VerificationError(RavnestError):
    """A ledger does not prove what it claims; `what` names the round and the finding."""

    exit_status = 14


class AdmissionRefused(RavnestError):
    """A broker refused a contribution; `reason` is the named reason, one of `ravnest_fed.messages.Reason`."""

    exit_status = 15

    def __init__(self, reason: str, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy)
        self.reason = reason


class PayloadError(RavnestError):
    """Bytes from outside do not decode within their bounds."""

    exit_status = 16


class LocalProtocolError(RavnestError):
    """This node was about to break the protocol: a bug of ours."""

    exit_status = 17


class RemoteProtocolError(RavnestError):
    """A peer broke the protocol; its message is dropped, and nothing committed is touched."""

    exit_status = 18


class ClusterError(RavnestError):
    """A process of a cluster on this machine failed to start or died."""

    exit_status = 19
