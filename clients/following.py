"""What a client knows of the log ahead of it, and what it fetches of it: one commit after the other, or a checkpoint."""

from dataclasses import dataclass, field

from ravnest_fed.facts import BlobRef
from ravnest_fed.identity import Signed
from ravnest_fed.messages import CheckpointNotice, CommitsRequest


@dataclass
class Catching:
    """The commit being fetched, or the checkpoint of its round. `missing` blobs are known once its record is opened.

    `changes` are those of the roster up to a checkpoint.
    """

    server_round: int
    missing: set[bytes] = field(default_factory=set)
    checkpoint: BlobRef | None = None
    changes: tuple[tuple[int, Signed], ...] | None = None


@dataclass
class Following:
    """One client's following. `at` is the round that it stands at."""

    catching: Catching | None = None
    folding: bool = False
    _notices: dict[int, BlobRef] = field(default_factory=dict)
    _checkpoint: CheckpointNotice | None = None
    _newest: int = 0
    _asked_after: int | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is fetched or folded."""
        return self.catching is None and not self.folding

    def forget_home(self) -> None:
        """What the lost home said is worth nothing: the next one may not have it."""
        self.catching = self._checkpoint = self._asked_after = None
        self._notices = {}
        self._newest = 0

    def heard_of(self, server_round: int) -> None:
        """The home broker holds this round."""
        self._newest = max(self._newest, server_round)

    def commit_named(self, server_round: int, record: BlobRef, at: int | None) -> None:
        """The home broker names the record of a commit."""
        self.heard_of(server_round)
        if at is None or server_round > at:
            self._notices[server_round] = record

    def checkpoint_named(self, notice: CheckpointNotice) -> None:
        """The home broker offers a checkpoint."""
        self.heard_of(notice.server_round)
        self._checkpoint = notice

    def next(self, at: int) -> BlobRef | CommitsRequest | None:
        """The record to fetch next, or what to ask for: a broker names a limited number of commits at once."""
        if not self.idle:
            return None
        further = self._checkpoint
        if further is not None and further.server_round > at:
            self.catching = Catching(further.server_round, set(), further.checkpoint.bare(), further.changes)
            return further.commit
        record = self._notices.get(at + 1)
        if record is not None:
            self.catching = Catching(at + 1)
            return record
        if self._newest <= at or self._asked_after == at:
            return None
        self._asked_after = at
        return CommitsRequest(at)

    def opened(self, updates: tuple[BlobRef, ...]) -> list[BlobRef]:
        """The record being fetched is sound: the blobs to fetch now, each once."""
        assert self.catching is not None
        blobs = (self.catching.checkpoint,) if self.catching.checkpoint is not None else updates
        by_hash = {ref.hash: ref for ref in blobs}
        self.catching.missing = set(by_hash)
        return list(by_hash.values())

    def arrived(self, blob: bytes) -> Catching | None:
        """A blob is here; what was fetched, once it is whole and to be folded."""
        catching = self.catching
        if catching is None or blob not in catching.missing:
            return None
        catching.missing.discard(blob)
        if catching.missing:
            return None
        self.catching, self.folding = None, True
        return catching

    def moved_to(self, at: int) -> None:
        """A commit was folded, or a checkpoint taken up."""
        self.folding = False
        self._notices = {number: record for number, record in self._notices.items() if number > at}
