"""How a broker that is behind gets to the head of the others: commit by commit, or by a checkpoint. No I/O.

Nothing is believed that a majority's votes do not prove: a commit's votes are checked before its blobs are fetched, and a
checkpoint counts only if its whole state has the hash that its round's commit names. Blobs come from every connected
broker at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from brokers.effects import Adopt, Damaged, Effect, Examine, Fetch, Say, SendPeer
from brokers.events import Adopted, Examined, Fetched
from ravnest_fed.decree import check_votes, open_commit
from ravnest_fed.errors import RavnestError
from ravnest_fed.facts import BlobRef, Body, Commit, decode
from ravnest_fed.federation import Federation
from ravnest_fed.identity import Signed
from ravnest_fed.messages import CheckpointNotice, CommitNotice, CommitsRequest
from ravnest_fed.roster import roster_for

ASK_SECONDS = 0.5
"""How often others are asked for what is missing, at the most."""
DISTRUST_SECONDS = 30.0
"""How long a broker is not asked after a checkpoint of its own turned out to be wrong."""


@dataclass
class _Pursuit:
    """What is being fetched: a commit's record first, then its blobs, or the checkpoint of its round."""

    donor: str
    server_round: int
    record: BlobRef
    checkpoint: BlobRef | None
    changes: tuple[tuple[int, Signed], ...] = ()
    commit: Commit | None = None
    missing: set[bytes] = field(default_factory=set)


class CatchingUp:
    """One broker's catching up. Times are in seconds."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.caught: Commit | None = None
        """A commit that was fetched and found sound: the outcome of the open round."""
        self.adopted: Adopted | None = None
        """A checkpoint that was fetched and found sound."""
        self._rounds: dict[str, int] = {}
        self._distrusted: dict[str, float] = {}
        self._pursuit: _Pursuit | None = None
        self._asked_at = -1e9
        self._asked = 0

    def heard(self, node_id: str, server_round: int) -> None:
        """Another broker said where it stands."""
        self._rounds[node_id] = server_round

    def moved_on(self) -> None:
        """The head is another one now: what was pursued for the round before is pointless."""
        self._pursuit = self.caught = self.adopted = None
        self._asked_at = -1e9

    def ask(self, peers: Iterable[str], server_round: int, now: float) -> list[Effect]:
        """Ask one of the connected brokers that are ahead of `server_round`, each time another one."""
        ahead = sorted(
            node
            for node in peers
            if self._rounds.get(node, 0) > server_round and self._distrusted.get(node, 0.0) <= now
        )
        if not ahead or self._pursuit is not None or now - self._asked_at < ASK_SECONDS:
            return []
        self._asked_at = now
        self._asked += 1
        return [SendPeer(ahead[self._asked % len(ahead)], CommitsRequest(server_round))]

    def on_notice(self, node_id: str, notice: CommitNotice | CheckpointNotice, server_round: int) -> list[Effect]:
        """A broker offers the commit after `server_round`, or a checkpoint further on."""
        checkpoint = notice.checkpoint if isinstance(notice, CheckpointNotice) else None
        fits = notice.server_round > server_round if checkpoint else notice.server_round == server_round + 1
        if not fits or self._pursuit is not None:
            return []
        changes = notice.changes if isinstance(notice, CheckpointNotice) else ()
        self._pursuit = _Pursuit(node_id, notice.server_round, notice.commit, checkpoint, changes)
        return [Fetch(notice.commit, (node_id,), "memory")]

    def on_fetched(self, event: Fetched, peers: Iterable[str]) -> list[Effect]:
        """A blob arrived."""
        pursuit = self._pursuit
        if pursuit is None:
            return []
        if pursuit.commit is None:
            wanted = event.blob == pursuit.record.hash and event.data is not None
            return self._open(pursuit, event.data or b"", peers) if wanted else []
        if event.blob not in pursuit.missing or event.into != "ledger":
            return []
        pursuit.missing.discard(event.blob)
        if pursuit.missing:
            return []
        if pursuit.checkpoint is None:
            return [Examine(pursuit.commit.body, pursuit.commit)]
        return [Adopt(pursuit.commit, pursuit.server_round, pursuit.checkpoint.bare())]

    def on_missed(self, blob: bytes) -> None:
        """Nobody had a blob: begin anew with whoever is asked next."""
        pursuit = self._pursuit
        if pursuit is not None and (blob == pursuit.record.hash or blob in pursuit.missing):
            self._pursuit = None

    def on_examined(self, event: Examined) -> list[Effect] | None:
        """The pursued commit was examined; None where the event is about another body."""
        pursuit = self._pursuit
        if pursuit is None or pursuit.commit is None or pursuit.commit.body != event.raw or pursuit.checkpoint:
            return None
        self._pursuit = None
        if event.finding:
            return [Damaged(event.finding)]
        self.caught = pursuit.commit
        return []

    def on_adopted(self, event: Adopted, now: float) -> list[Effect]:
        """The pursued checkpoint was read."""
        pursuit = self._pursuit
        if pursuit is None or pursuit.checkpoint is None or pursuit.commit != event.commit:
            return []
        self._pursuit = None
        if event.head is None:
            self._distrusted[pursuit.donor] = now + DISTRUST_SECONDS
            name = self.federation.name_of(pursuit.donor)
            return [Say("checkpoint refused", {"broker": name, "finding": event.finding}, warning=True)]
        self.adopted = event
        return []

    def _open(self, pursuit: _Pursuit, record: bytes, peers: Iterable[str]) -> list[Effect]:
        try:
            commit = open_commit(record)
            ruling = self.federation
            if pursuit.checkpoint:
                ruling = roster_for(self.federation, pursuit.changes, pursuit.server_round)
            check_votes(ruling, commit)
            body = decode(Body, commit.body)
            if body.server_round != pursuit.server_round:
                raise RavnestError(f"it is of round {body.server_round}, not {pursuit.server_round}")
        except RavnestError as error:
            self._pursuit = None
            return [Say("commit refused", {"finding": str(error)}, warning=True)]
        pursuit.commit = commit
        blobs = (pursuit.checkpoint,) if pursuit.checkpoint else (body.evidence, *body.updates)
        pursuit.missing = {ref.hash for ref in blobs}
        donors = (pursuit.donor, *sorted(node for node in peers if node != pursuit.donor))
        return [Fetch(ref, donors, "ledger") for ref in blobs]
