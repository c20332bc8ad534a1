"""Replaying a ledger: proof, from the signed federation file alone, that every commit is what a majority decided."""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ravnest_fed.decree import check_body, check_votes
from ravnest_fed.errors import LedgerError, RavnestError, SchemaMismatch, VerificationError
from ravnest_fed.facts import Body, Commit
from ravnest_fed.federation import FILE_NAME, Federation
from ravnest_fed.ledger import FILE_NAME as LEDGER_FILE
from ravnest_fed.ledger import Ledger
from ravnest_fed.replica import Replica, updates_of
from ravnest_fed.restoring import from_checkpoint, from_initial, restore


@dataclass(frozen=True)
class LedgerFolder:
    """A directory with a ledger, and the name that people call its broker."""

    name: str
    path: Path


def ledgers_in(folder: Path) -> list[LedgerFolder]:
    """The ledgers in a broker's folder, or in the folder of a federation whose brokers ran there."""
    if (folder / LEDGER_FILE).exists():
        return [LedgerFolder(folder.name, folder)]
    found = sorted((folder / "brokers").glob(f"*/{LEDGER_FILE}"))
    return [LedgerFolder(file.parent.name, file.parent) for file in found]


@dataclass(frozen=True)
class Proven:
    """A ledger that was replayed: the replica it gives, and the round that its proof begins at (0: the initial model)."""

    replica: Replica
    began: int


def prove(folder: Path, progress: Callable[[int], None] = lambda server_round: None) -> Proven:
    """Replay the ledger in `folder` and verify every vote, client signature, body, hash and checkpoint.

    Raises VerificationError, naming the round and the finding, or LedgerError for what cannot be read.
    """
    with _opened(folder) as (ledger, federation):
        return Proven(*_replay(ledger, federation, progress))


def newest(folder: Path) -> Replica:
    """The replica at the end of the ledger in `folder`, folded and not verified. Raises LedgerError."""
    with _opened(folder) as (ledger, federation):
        return restore(ledger, federation)


def _replay(ledger: Ledger, federation: Federation, progress: Callable[[int], None]) -> tuple[Replica, int]:
    """Fold the whole ledger from its oldest checkpoint, or the initial model, and prove every step.

    Gives the replica and the round that the replay began at. Every vote, client signature, body, hash and checkpoint is
    verified. Raises VerificationError, naming the round and the finding.
    """
    checkpoints = dict(ledger.checkpoints())
    try:
        if checkpoints:
            oldest = min(checkpoints)
            replica = from_checkpoint(ledger, federation, oldest, checkpoints[oldest])
        else:
            replica = from_initial(ledger, federation)
    except LedgerError as error:
        raise VerificationError(error.what, error.remedy) from error
    except SchemaMismatch:
        raise VerificationError("the initial model is not the one that the federation signs") from None
    began = replica.head.server_round
    for commit, body in _commits(ledger, began):
        try:
            check_votes(replica.federation, commit)
            check_body(replica.federation, replica.head, body, ledger.blobs.read(body.evidence.hash))
            replica.fold(body, commit.body, updates_of(body, ledger.blobs))
            if body.server_round in checkpoints:
                from_checkpoint(ledger, federation, body.server_round, checkpoints[body.server_round])
        except VerificationError:
            raise
        except RavnestError as error:
            raise VerificationError(f"round {body.server_round}: {error.what}", error.remedy) from error
        progress(body.server_round)
    return replica, began


def _commits(ledger: Ledger, after: int) -> Iterator[tuple[Commit, Body]]:
    try:
        yield from ledger.commits(after)
    except LedgerError as error:
        raise VerificationError(error.what, error.remedy) from error


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[Ledger, Federation]]:
    federation = Federation.load(folder / FILE_NAME)
    ledger = Ledger(folder, federation.fingerprint, create=False)
    try:
        yield ledger, federation
    finally:
        ledger.close()


def lost_rounds(folder: Path, told: Mapping[int, Set[bytes]]) -> list[int]:
    """The rounds in `told` that the ledgers below `folder` do not hold, or not all alike, as they were told.

    `told` gives the hashes of the models that were named as committed, by round. Raises LedgerError for what cannot be
    read; nothing is replayed here.
    """
    held: dict[int, set[bytes]] = {}
    for one in ledgers_in(folder):
        with _opened(one.path) as (ledger, _):
            for row in ledger.rows(0, ledger.last_round()):
                held.setdefault(row.server_round, set()).add(row.model_hash)
    return sorted(number for number, hashes in told.items() if held.get(number, set()) != hashes or len(hashes) != 1)


def furthest(folder: Path) -> Path:
    """The folder of the ledger below `folder` that is furthest ahead. Raises LedgerError if there is none."""
    best: tuple[int, Path] | None = None
    for one in ledgers_in(folder):
        with _opened(one.path) as (ledger, _):
            reached = ledger.last_round()
        if best is None or reached > best[0]:
            best = (reached, one.path)
    if best is None:
        raise LedgerError(f"there is no ledger in {folder}", "name the folder of a federation or broker that has run")
    return best[1]
