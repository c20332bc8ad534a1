"""A broker's durable memory: the chain of commits, its promises and votes, and what it admitted for the open round.

The chain begins after round 0, or with the commit of the oldest checkpoint, whose state a majority's votes prove.

SQLite with a write-ahead log and full synchronisation: when a method returns, what it wrote survives a power cut. Blobs
lie beside it as files. One thread at a time.
"""

import errno
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ravnest_fed.blobs import DiskBlobs
from ravnest_fed.errors import LedgerError, RemoteProtocolError, WrongFederation
from ravnest_fed.facts import BlobRef, Body, Commit, Manifest, body_hash, decode, encode, signed_hash
from ravnest_fed.identity import Signed
from ravnest_fed.messages import RoundRow

FILE_NAME = "ledger.db"
MOST_ROWS = 10_000
"""How many of the last rounds a ledger can tell people about, also those whose commits are consolidated."""
_TABLES = """
create table if not exists meta (key text primary key, value blob not null) strict;
create table if not exists commits (
    server_round integer primary key, body_hash blob not null, record blob not null) strict;
create table if not exists rounds (server_round integer primary key, row blob not null) strict;
create table if not exists checkpoints (
    server_round integer primary key, blob blob not null, length integer not null) strict;
create table if not exists promises (server_round integer primary key, view integer not null) strict;
create table if not exists votes (server_round integer primary key, view integer not null, body blob not null) strict;
create table if not exists contributions (
    manifest_hash blob primary key, base_round integer not null, manifest blob not null, shards blob not null) strict;
create table if not exists equivocations (
    client text not null, base_round integer not null, first blob not null, second blob not null) strict;
create table if not exists sequences (client text primary key, highest integer not null) strict;
create table if not exists evaluations (
    server_round integer not null, client text not null, signed blob not null,
    primary key (server_round, client)) strict;
create table if not exists traffic (
    client text primary key, bytes_up integer not null, bytes_down integer not null) strict;
"""


@dataclass(frozen=True)
class VoteRecord:
    """What a broker promised and voted in the open round; `body` is None where it has not voted."""

    promised: int = 0
    voted_view: int = -1
    body: bytes | None = None


@dataclass(frozen=True)
class Admitted:
    """A contribution kept for the open round."""

    manifest: Signed
    shards: tuple[BlobRef, ...]


class Ledger:
    """The ledger in `folder`, made on first use. Raises WrongFederation if it belongs to another federation.

    `blobs` holds what commits name, `spool` the payloads of the open round's contributions.
    """

    def __init__(self, folder: Path, fingerprint: bytes, create: bool = True) -> None:
        self.path = folder / FILE_NAME
        if not create and not self.path.exists():
            raise LedgerError(f"there is no ledger in {folder}", "name a broker's directory that has run")
        try:
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            if create:
                self._db.execute("pragma journal_mode = wal")
                self._db.execute("pragma synchronous = full")
                self._db.executescript(_TABLES)
            known = self._db.execute("select value from meta where key = 'federation'").fetchone()
            if known is None and not create:
                raise LedgerError(f"{self.path} holds nothing yet", "wait until its broker has started")
            if known is None and any((folder / "blobs").glob("*")):
                raise LedgerError(
                    f"{self.path} is new or empty, but {folder / 'blobs'} is not: the votes of this broker are lost",
                    "bring the ledger back; a broker that forgot its votes must not vote again under its key",
                )
            if known is None:
                self._db.execute("insert into meta values ('federation', ?)", (fingerprint,))
        except sqlite3.Error as error:
            raise LedgerError(
                f"{self.path} cannot be opened: {error}", "is the disk full or the file damaged?"
            ) from None
        if known is not None and known[0] != fingerprint:
            raise WrongFederation(
                f"{folder} holds the ledger of another federation", "use an empty directory for each federation"
            )
        # Who only reads must not take a running broker's half-written blobs away.
        self.blobs = DiskBlobs(folder / "blobs", tidy=create)
        self.spool = DiskBlobs(folder / "spool", tidy=create)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    # --- the chain ---------------------------------------------------------------------------------------------------

    def last_round(self) -> int:
        """The newest committed round; 0 before the first."""
        return int(self._db.execute("select coalesce(max(server_round), 0) from commits").fetchone()[0])

    def commit(self, server_round: int) -> Commit | None:
        """The commit of a round, or None if this ledger does not hold it."""
        found = self._db.execute("select record from commits where server_round = ?", (server_round,)).fetchone()
        return decode(Commit, found[0]) if found else None

    def commits(self, after: int = 0) -> Iterator[tuple[Commit, Body]]:
        """Commits in order, from the one after round `after`. Raises LedgerError at a gap or a damaged record."""
        for server_round in range(after + 1, self.last_round() + 1):
            yield self.checked(server_round)

    def checked(self, server_round: int) -> tuple[Commit, Body]:
        """The commit of a round, as whole and as the one it was when it was written."""
        where, remedy = f"{self.path}: round {server_round}", "copy the ledger of another broker"
        try:
            commit = self.commit(server_round)
            if commit is None:
                raise LedgerError(f"{self.path} misses round {server_round}", remedy)
            body = decode(Body, commit.body)
            kept = self._db.execute("select body_hash from commits where server_round = ?", (server_round,)).fetchone()
        except (RemoteProtocolError, sqlite3.Error) as error:
            raise LedgerError(f"{where} is damaged: {getattr(error, 'what', error)}", remedy) from None
        if body.server_round != server_round:
            raise LedgerError(f"{self.path} holds another round as round {server_round}", remedy)
        if kept[0] != body_hash(commit.body):
            raise LedgerError(f"{where} is damaged: its body has another hash than the one beside it", remedy)
        return commit, body

    def save_commit(self, commit: Commit, row: RoundRow) -> None:
        """Append a commit, and forget what the rounds up to it needed."""
        server_round = row.server_round
        with self._transaction():
            self._db.execute(
                "insert or ignore into commits values (?, ?, ?)",
                (server_round, body_hash(commit.body), encode(commit)),
            )
            self._db.execute("insert or replace into rounds values (?, ?)", (server_round, encode(row)))
            self._db.execute("delete from rounds where server_round <= ?", (server_round - MOST_ROWS,))
            self._db.execute("delete from promises where server_round <= ?", (server_round,))
            self._db.execute("delete from votes where server_round <= ?", (server_round,))

    def save_bytes_down(self, server_round: int, size: int) -> None:
        """Fill in what this broker's clients fetched of a round, known only after the round."""
        found = self._db.execute("select row from rounds where server_round = ?", (server_round,)).fetchone()
        if found:
            row = msgspec.structs.replace(decode(RoundRow, found[0]), bytes_down=size)
            self._db.execute("update rounds set row = ? where server_round = ?", (encode(row), server_round))

    def rows(self, after: int, most: int = 256) -> tuple[RoundRow, ...]:
        """What this broker saw of the rounds after `after`."""
        found = self._db.execute(
            "select row from rounds where server_round > ? order by server_round limit ?", (after, most)
        )
        return tuple(decode(RoundRow, row[0]) for row in found)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[tuple[int, BlobRef]]:
        """The checkpoints that stay, oldest first: each with its round, whose commit stays with it."""
        found = self._db.execute("select server_round, blob, length from checkpoints order by server_round")
        return [(row[0], BlobRef(row[1], row[2])) for row in found]

    def save_checkpoint(self, server_round: int, ref: BlobRef, keep: int) -> None:
        """Take the checkpoint of a round whose blob is durable into the ledger; the last `keep` stay, and what is older goes.

        Blobs that nothing names any more are left to `sweep`.
        """
        with self._transaction():
            self._db.execute(
                "insert or replace into checkpoints values (?, ?, ?)", (server_round, ref.hash, ref.length)
            )
            self._forget_before_checkpoints(keep)

    def adopt_checkpoint(self, commit: Commit, server_round: int, ref: BlobRef) -> None:
        """Go on from another broker's checkpoint: its commit and blob stand for all that this ledger held before."""
        with self._transaction():
            self._db.execute(
                "insert or replace into commits values (?, ?, ?)",
                (server_round, body_hash(commit.body), encode(commit)),
            )
            self._db.execute(
                "insert or replace into checkpoints values (?, ?, ?)", (server_round, ref.hash, ref.length)
            )
            self._db.execute("delete from promises where server_round <= ?", (server_round,))
            self._db.execute("delete from votes where server_round <= ?", (server_round,))
            self._forget_before_checkpoints(1)

    def _forget_before_checkpoints(self, keep: int) -> None:
        rows = self._db.execute("select server_round from checkpoints order by server_round desc").fetchmany(keep)
        oldest = rows[-1][0]
        for table in ("checkpoints", "commits", "evaluations"):
            self._db.execute(f"delete from {table} where server_round < ?", (oldest,))
        self._db.execute("delete from equivocations where base_round < ?", (oldest,))

    def sweep(self, also: Iterable[BlobRef]) -> None:
        """Remove the blobs that neither the chain, a checkpoint, a vote nor `also` names, and that lie idle."""
        named = {ref.hash for ref in also} | {ref.hash for _, ref in self.checkpoints()}
        for row in self._db.execute("select record from commits"):
            named |= _blobs_of(decode(Commit, row[0]).body)
        for row in self._db.execute("select body from votes"):
            named |= _blobs_of(row[0])
        self.blobs.sweep(named)

    # --- agreement ---------------------------------------------------------------------------------------------------

    def vote_record(self, server_round: int) -> VoteRecord:
        """What this broker promised and voted in a round."""
        promised = self._db.execute("select view from promises where server_round = ?", (server_round,)).fetchone()
        voted = self._db.execute("select view, body from votes where server_round = ?", (server_round,)).fetchone()
        view = promised[0] if promised else 0
        return VoteRecord(max(view, voted[0]), voted[0], voted[1]) if voted else VoteRecord(view)

    def save_promise(self, server_round: int, view: int) -> None:
        """Promise to vote in no view below `view`."""
        self._db.execute("insert or replace into promises values (?, ?)", (server_round, view))

    def save_vote(self, server_round: int, view: int, body: bytes) -> None:
        """Record the vote for `body` before it is said."""
        self._db.execute("insert or replace into votes values (?, ?, ?)", (server_round, view, body))

    # --- the open round ----------------------------------------------------------------------------------------------

    def save_contribution(self, signed: Signed, manifest: Manifest, shards: tuple[BlobRef, ...]) -> None:
        """Keep an admitted contribution, and the client's highest sequence."""
        with self._transaction():
            self._db.execute(
                "insert or ignore into contributions values (?, ?, ?, ?)",
                (signed_hash(signed), manifest.base_round, encode(signed), encode(shards)),
            )
            self._db.execute(
                "insert into sequences values (?, ?) on conflict (client) do update"
                " set highest = max(highest, excluded.highest)",
                (manifest.client, manifest.sequence),
            )

    def contributions(self, base_round: int) -> list[Admitted]:
        """The contributions kept that are based on `base_round` or on a later one."""
        found = self._db.execute("select manifest, shards from contributions where base_round >= ?", (base_round,))
        return [Admitted(decode(Signed, row[0]), decode(tuple[BlobRef, ...], row[1])) for row in found]

    def drop_contributions(self, before_base: int, counted: Iterable[bytes] = ()) -> set[bytes]:
        """Forget contributions based on rounds before `before_base`, and those `counted` (manifest hashes).

        Returns the blobs that the others still need.
        """
        with self._transaction():
            self._db.execute("delete from contributions where base_round < ?", (before_base,))
            self._db.executemany("delete from contributions where manifest_hash = ?", [(one,) for one in counted])
        found = self._db.execute("select shards from contributions")
        return {ref.hash for row in found for ref in decode(tuple[BlobRef, ...], row[0])}

    def save_equivocation(self, client: str, base_round: int, first: Signed, second: Signed) -> None:
        """Keep two different manifests of one client for one round as evidence."""
        values = (client, base_round, encode(first), encode(second))
        self._db.execute("insert into equivocations values (?, ?, ?, ?)", values)

    def highest_sequence(self, client: str) -> int:
        """The highest sequence seen of a client; 0 if none."""
        found = self._db.execute("select highest from sequences where client = ?", (client,)).fetchone()
        return int(found[0]) if found else 0

    # --- what clients measured and moved -----------------------------------------------------------------------------

    def save_evaluation(self, server_round: int, client: str, signed: Signed) -> None:
        """Keep a client's evaluation of a round's model."""
        values = (server_round, client, encode(signed))
        self._db.execute("insert or replace into evaluations values (?, ?, ?)", values)

    def evaluations(self, server_round: int) -> list[Signed]:
        """The evaluations of a round's model that arrived here."""
        found = self._db.execute(
            "select signed from evaluations where server_round = ? order by client", (server_round,)
        )
        return [decode(Signed, row[0]) for row in found]

    def evaluated(self) -> dict[str, int]:
        """The last round that each client evaluated, whose model it so proved to hold."""
        return dict(self._db.execute("select client, max(server_round) from evaluations group by client"))

    def save_traffic(self, totals: dict[str, tuple[int, int]]) -> None:
        """Keep each client's bytes up and down in all."""
        rows = [(client, up, down) for client, (up, down) in totals.items()]
        with self._transaction():
            self._db.executemany("insert or replace into traffic values (?, ?, ?)", rows)

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes up and down by client, as last kept."""
        return {row[0]: (row[1], row[2]) for row in self._db.execute("select * from traffic")}

    def _transaction(self) -> sqlite3.Connection:
        self._db.execute("begin")
        return self._db


def _blobs_of(raw: bytes) -> set[bytes]:
    body = decode(Body, raw)
    return {body.evidence.hash, *(ref.hash for ref in body.updates)}


def is_full(error: BaseException) -> bool:
    """Whether `error` says that the disk, or the user's share of it, is full."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
