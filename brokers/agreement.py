"""One round's agreement: single-decree Paxos with the view as its ballot.

Rules, each of which a vote obeys:

- a majority is more than half of the roster that the federation file signs;
- view v of round r is proposed by `roster[(r + v) % n]`, and only by it;
- view 0 needs no promises; a proposer of any later view first gathers promises from a majority, and proposes the body
  of the highest vote among them, byte for byte, if there is one;
- a broker votes at most once in a view, and never in a view below its promise;
- a promise and a vote are durable before they are said; the proposer's own vote before its proposal;
- a proposer never proposes in a view that it has used, also after a restart.

Sources: Lamport, "The part-time parliament" (1998) and "Paxos made simple" (2001).
"""

from collections.abc import Callable
from dataclasses import dataclass

from ravnest_fed.errors import LocalProtocolError
from ravnest_fed.facts import BlobRef, Vote, body_hash
from ravnest_fed.identity import Signed
from ravnest_fed.ledger import VoteRecord
from ravnest_fed.messages import Message, Prepare, Promise, Propose, Refusal, VoteNotice


@dataclass(frozen=True)
class ToPeer:
    """Effect: send `message` to one broker."""

    node_id: str
    message: Message


@dataclass(frozen=True)
class ToAll:
    """Effect: send `message` to every other broker."""

    message: Message


@dataclass(frozen=True)
class RecordPromise:
    """Effect: make the promise of `view` durable, before what follows."""

    view: int


@dataclass(frozen=True)
class RecordVote:
    """Effect: make the vote for `body` in `view` durable, before what follows."""

    view: int
    body: bytes


@dataclass(frozen=True)
class Free:
    """Effect: this broker may propose any body in `view`."""

    view: int


@dataclass(frozen=True)
class Bound:
    """Effect: this broker must propose exactly the body `ref`, held by `donors`, in `view`."""

    view: int
    ref: BlobRef
    donors: tuple[str, ...]


@dataclass(frozen=True)
class Consider:
    """Effect: examine the body `ref` that `proposer` put to the vote; answer with `examined`."""

    view: int
    ref: BlobRef
    proposer: str


@dataclass(frozen=True)
class Decided:
    """Effect: a majority voted for the body with this hash."""

    view: int
    body_hash: bytes
    votes: tuple[Signed, ...]


AgreementEffect = ToPeer | ToAll | RecordPromise | RecordVote | Free | Bound | Consider | Decided


class Agreement:
    """The agreement on one round, from one broker's side."""

    def __init__(
        self,
        fingerprint: bytes,
        server_round: int,
        me: str,
        roster: tuple[str, ...],
        record: VoteRecord,
        sign: Callable[[Vote], Signed],
        open_vote: Callable[[Signed], Vote | None],
    ) -> None:
        self.server_round = server_round
        self.view = record.promised
        self._fingerprint = fingerprint
        self._me = me
        self._roster = roster
        self._majority = len(roster) // 2 + 1
        self._promised = record.promised
        self._voted_view = record.voted_view
        self._voted_body = record.body
        self._sign = sign
        self._open_vote = open_vote
        self._promises: dict[str, Promise] = {}
        self._disowned: set[bytes] = set()
        self._preparing = False
        self._may_propose = False
        self._votes: dict[tuple[int, bytes], dict[str, Signed]] = {}
        self._decided = False

    def proposer(self, view: int) -> str:
        """Who proposes in `view`."""
        return self._roster[(self.server_round + view) % len(self._roster)]

    @property
    def voted_body(self) -> bytes | None:
        """The body of the highest vote that this broker cast."""
        return self._voted_body

    def start(self) -> list[AgreementEffect]:
        """Begin, or begin again after a restart: view 0's proposer is free, a vote cast before is said again."""
        if self._voted_body is not None:
            return self._say_vote(self._voted_view, self._voted_body)
        if self.view == 0 and self.proposer(0) == self._me:
            self._may_propose = True
            return [Free(0)]
        return []

    def enter(self, view: int) -> list[AgreementEffect]:
        """Move on to a later `view`; its proposer asks everybody for promises."""
        if view <= self.view:
            return []
        self._move_to(view)
        if self.proposer(view) != self._me:
            return []
        self._promised = view
        self._preparing = True
        effects: list[AgreementEffect] = [RecordPromise(view), ToAll(Prepare(self.server_round, view))]
        return effects + self.on_promise(self._me, self._promise(view))

    def ask_again(self) -> list[AgreementEffect]:
        """Repeat what this broker waits for answers to; every message is idempotent."""
        if self._preparing:
            return [ToAll(Prepare(self.server_round, self.view))]
        if self._voted_body is None:
            return []
        effects = self._say_vote(self._voted_view, self._voted_body)
        if self.proposer(self._voted_view) == self._me and self._voted_view == self.view:
            effects.append(ToAll(Propose(self.server_round, self._voted_view, BlobRef.of(self._voted_body))))
        return effects

    def propose(self, view: int, body: bytes) -> list[AgreementEffect]:
        """Put `body` to the vote in `view`, unless a later view has begun. Raises LocalProtocolError without the right."""
        if view < self._promised or view != self.view:
            return []
        if not self._may_propose:
            raise LocalProtocolError(f"round {self.server_round}: no right to propose in view {view}")
        self._may_propose = False
        effects: list[AgreementEffect] = [self._cast(view, body)]
        effects.append(ToAll(Propose(self.server_round, view, BlobRef.of(body))))
        return effects + self._say_vote(view, body)

    def on_prepare(self, node_id: str, view: int) -> list[AgreementEffect]:
        """The proposer of `view` asks for a promise."""
        if node_id != self.proposer(view):
            return []
        if view < self._promised:
            return [ToPeer(node_id, Refusal(self.server_round, self._promised))]
        self._move_to(view)
        effects: list[AgreementEffect] = []
        if view > self._promised:
            self._promised = view
            effects.append(RecordPromise(view))
        return [*effects, ToPeer(node_id, self._promise(view))]

    def on_promise(self, node_id: str, promise: Promise) -> list[AgreementEffect]:
        """A promise arrived; with a majority of them this broker may propose."""
        if not self._preparing or promise.view != self.view or node_id not in self._roster:
            return []
        self._promises[node_id] = promise
        return self._use_promises()

    def disown(self, body: bytes) -> list[AgreementEffect]:
        """The body (its blob's hash) that this broker was bound to is unsound: do without the promises that told of it.

        No majority voted for an unsound body, so the promises of any majority that does not tell of it decide.
        """
        if self._voted_view == self.view or not (self._may_propose or self._preparing):
            return []
        told = [node for node, one in self._promises.items() if one.body is not None and one.body.hash == body]
        for node in told:
            del self._promises[node]
        self._disowned.add(body)
        self._may_propose, self._preparing = False, True
        return self._use_promises()

    def _use_promises(self) -> list[AgreementEffect]:
        usable = {
            node: one for node, one in self._promises.items() if one.body is None or one.body.hash not in self._disowned
        }
        if len(usable) < self._majority:
            return []
        self._preparing = False
        self._may_propose = True
        highest = max(usable.values(), key=lambda one: one.voted_view)
        if highest.voted_view < 0 or highest.body is None:
            return [Free(self.view)]
        donors = [node for node, one in usable.items() if one.voted_view == highest.voted_view]
        return [Bound(self.view, highest.body, tuple(donors))]

    def on_refusal(self, promised: int) -> list[AgreementEffect]:
        """A later view was promised elsewhere: follow it."""
        self._move_to(promised)
        return []

    def on_propose(self, node_id: str, view: int, ref: BlobRef) -> list[AgreementEffect]:
        """A proposer puts a body to the vote."""
        if node_id != self.proposer(view):
            return []
        if view < self._promised:
            return [ToPeer(node_id, Refusal(self.server_round, self._promised))]
        if view <= self._voted_view:
            return self._say_vote(self._voted_view, self._voted_body) if self._voted_body else []
        self._move_to(view)
        return [Consider(view, ref, node_id)]

    def examined(self, view: int, body: bytes) -> list[AgreementEffect]:
        """The body proposed in `view` was found sound: vote for it, unless a later view has begun."""
        if view < self._promised or view <= self._voted_view:
            return []
        return [self._cast(view, body), *self._say_vote(view, body)]

    def on_vote(self, signed: Signed) -> list[AgreementEffect]:
        """A vote arrived, our own too; with a majority for one body in one view it is decided."""
        vote = self._open_vote(signed)
        if vote is None or signed.node_id not in self._roster or vote.server_round != self.server_round:
            return []
        votes = self._votes.setdefault((vote.view, vote.body_hash), {})
        votes[signed.node_id] = signed
        if len(votes) < self._majority or self._decided:
            return []
        self._decided = True
        return [Decided(vote.view, vote.body_hash, tuple(votes[node] for node in sorted(votes)))]

    def _move_to(self, view: int) -> None:
        if view > self.view:
            self.view = view
            self._promises = {}
            self._preparing = self._may_propose = False

    def _promise(self, view: int) -> Promise:
        body = BlobRef.of(self._voted_body) if self._voted_body is not None else None
        return Promise(self.server_round, view, self._voted_view, body)

    def _cast(self, view: int, body: bytes) -> RecordVote:
        self._promised = view
        self._voted_view, self._voted_body = view, body
        return RecordVote(view, body)

    def _say_vote(self, view: int, body: bytes) -> list[AgreementEffect]:
        signed = self._sign(Vote(self._fingerprint, self.server_round, view, body_hash(body)))
        return [ToAll(VoteNotice(self.server_round, signed)), *self.on_vote(signed)]
