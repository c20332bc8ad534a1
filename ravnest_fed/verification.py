"""Replaying a ledger: proof, from the signed federation file alone, that every commit is what a majority decided."""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from ravnest_fed.checkpoints import read_model
from ravnest_fed.decree import check_body, check_votes
from ravnest_fed.errors import LedgerError, RavnestError, VerificationError
from ravnest_fed.facts import Body, Commit, body_hash
from ravnest_fed.federation import FILE_NAME, INITIAL_MODEL, Federation
from ravnest_fed.ledger import FILE_NAME as LEDGER_FILE
from ravnest_fed.ledger import Ledger
from ravnest_fed.replica import Replica, updates_of


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


def replay(folder: Path, check: bool, progress: Callable[[int], None] = lambda server_round: None) -> Replica:
    """The replica that the ledger in `folder` gives, from the initial model.

    With `check`, every vote, client signature, body and hash is verified; without it only the state after each fold is.
    Raises VerificationError, naming the round and the finding, or LedgerError for what cannot be read.
    """
    federation = Federation.load(folder / FILE_NAME)
    ledger = Ledger(folder, federation.fingerprint, create=False)
    try:
        replica = Replica(federation, read_model(folder / INITIAL_MODEL, federation.schema))
        if replica.head.model_hash.hex() != federation.federation.model_hash:
            raise VerificationError("the initial model is not the one that the federation signs")
        for commit, body in _commits(ledger):
            where = f"round {body.server_round}"
            try:
                if check:
                    check_votes(federation, commit)
                    check_body(federation, replica.head, body, ledger.blobs.read(body.evidence.hash))
                replica.fold(body, commit.body, updates_of(body, ledger.blobs))
            except VerificationError:
                raise
            except RavnestError as error:
                raise VerificationError(f"{where}: {error.what}", error.remedy) from error
            assert replica.head.commit_hash == body_hash(commit.body)
            progress(body.server_round)
        return replica
    finally:
        ledger.close()


def _commits(ledger: Ledger) -> Iterator[tuple[Commit, Body]]:
    try:
        yield from ledger.commits()
    except LedgerError as error:
        raise VerificationError(error.what, error.remedy) from error


def lost_rounds(folder: Path, told: Mapping[int, Set[bytes]]) -> list[int]:
    """The rounds in `told` that the ledgers below `folder` do not hold, or not all alike, as they were told.

    `told` gives the hashes of the models that were named as committed, by round. Raises LedgerError for what cannot be
    read; nothing is replayed here.
    """
    held: dict[int, set[bytes]] = {}
    for one in ledgers_in(folder):
        federation = Federation.load(one.path / FILE_NAME)
        ledger = Ledger(one.path, federation.fingerprint, create=False)
        try:
            for _, body in ledger.commits():
                held.setdefault(body.server_round, set()).add(body.model_hash)
        finally:
            ledger.close()
    return sorted(number for number, hashes in told.items() if held.get(number, set()) != hashes or len(hashes) != 1)


def furthest(folder: Path) -> Path:
    """The folder of the ledger below `folder` that is furthest ahead. Raises LedgerError if there is none."""
    best: tuple[int, Path] | None = None
    for one in ledgers_in(folder):
        federation = Federation.load(one.path / FILE_NAME)
        ledger = Ledger(one.path, federation.fingerprint, create=False)
        reached = ledger.last_round()
        ledger.close()
        if best is None or reached > best[0]:
            best = (reached, one.path)
    if best is None:
        raise LedgerError(f"there is no ledger in {folder}", "name the folder of a federation or broker that has run")
    return best[1]
