"""From a ledger to the replica that it gives: a checkpoint, or the initial model, and the commits after it."""

from collections.abc import Callable

from ravnest_fed.checkpoints import read_checkpoint
from ravnest_fed.decree import check_votes
from ravnest_fed.errors import LedgerError, RavnestError, SchemaMismatch
from ravnest_fed.facts import BlobRef
from ravnest_fed.federation import INITIAL_MODEL, Federation
from ravnest_fed.ledger import Ledger
from ravnest_fed.model_files import read_model
from ravnest_fed.replica import Replica, updates_of
from ravnest_fed.roster import roster_for


def restore(ledger: Ledger, federation: Federation, tell: Callable[[str], None] = lambda finding: None) -> Replica:
    """The replica at the end of `ledger`, from its newest checkpoint that is whole; `tell` hears of those that are not.

    Votes were checked when the commits were written. Raises LedgerError where no checkpoint is whole or a fold fails,
    SchemaMismatch where the initial model beside the ledger is another federation's.
    """
    checkpoints = ledger.checkpoints()
    replica: Replica | None = None
    for server_round, ref in reversed(checkpoints):
        try:
            replica = from_checkpoint(ledger, federation, server_round, ref)
            break
        except RavnestError as error:
            tell(error.what)
    if replica is None and checkpoints:
        raise LedgerError(
            f"{ledger.path}: no checkpoint can be read, and older commits are gone",
            "copy the whole folder of another broker's ledger and blobs, or come back under a new key",
        )
    if replica is None:
        replica = from_initial(ledger, federation)
    for commit, body in ledger.commits(replica.head.server_round):
        replica.fold(body, commit.body, updates_of(body, ledger.blobs))
    return replica


def from_initial(ledger: Ledger, federation: Federation) -> Replica:
    """The replica of round 0. Raises SchemaMismatch or LedgerError."""
    file = ledger.path.parent / INITIAL_MODEL
    replica = Replica(federation, read_model(file, federation.schema))
    if replica.head.model_hash.hex() != federation.federation.model_hash:
        raise SchemaMismatch(f"{file} is not the federation's initial model", "copy it again")
    return replica


def from_checkpoint(ledger: Ledger, federation: Federation, server_round: int, ref: BlobRef) -> Replica:
    """The replica in a checkpoint, proven by the votes for its round. Raises VerificationError or LedgerError."""
    commit, _ = ledger.checked(server_round)
    replica = read_checkpoint(ledger.blobs.view(ref.hash), federation, commit.body)
    check_votes(roster_for(federation, replica.head.changes, server_round), commit)
    return replica
