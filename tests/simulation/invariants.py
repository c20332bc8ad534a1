"""What must hold after every event, whatever goes wrong."""

from typing import TYPE_CHECKING

from ravnest_fed.decree import check_votes, open_evidence
from ravnest_fed.facts import Body, Commit, Manifest, Receipt, Vote, body_hash, decode
from ravnest_fed.federation import Federation
from ravnest_fed.head import Head
from ravnest_fed.identity import Signed
from ravnest_fed.messages import CheckpointNotice, CommitNotice, Message, Promise, ReceiptNotice, VoteNotice
from ravnest_fed.slices import Interval, joined, size, without

if TYPE_CHECKING:
    from tests.simulation.brokers import SimulatedBroker


class InvariantBroken(AssertionError):
    """A guarantee did not hold."""


class Invariants:
    """Watches one run."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.bodies: dict[int, bytes] = {}
        self.models: dict[int, bytes] = {}
        self.counted: dict[tuple[str, int], int] = {}
        self.covering: set[int] = set()
        self.covered: list[Interval] = []
        self.brokers: list[SimulatedBroker] = []

    def committed(self, broker: "SimulatedBroker", commit: Commit, body: Body) -> None:
        """A commit became durable on a broker: one a round, by a majority, counting nothing twice."""
        found = body_hash(commit.body)
        known = self.bodies.setdefault(body.server_round, found)
        if known != found:
            raise InvariantBroken(f"two commits of round {body.server_round}, the second on {broker.name}")
        if known == found and len(self._holders(body.server_round)) == 1:
            check_votes(self.federation, commit)
            self._voters_hold_their_votes(commit, body)
            if len({one.client for one in body.counted}) < len(body.counted):
                raise InvariantBroken(f"round {body.server_round} counts a client twice")
            facts = open_evidence(self.federation, broker.disk.blobs.read(body.evidence.hash))
            for signed in facts.manifests:
                self._base_is_committed(decode(Manifest, signed.payload), body)
            self._covers_once(body)
            for one in body.counted:
                at = self.counted.setdefault((one.client, one.sequence), body.server_round)
                if at != body.server_round:
                    raise InvariantBroken(
                        f"{one.client[:8]} #{one.sequence} is counted in rounds {at} and {body.server_round}"
                    )

    def _base_is_committed(self, manifest: Manifest, body: Body) -> None:
        """A delta was taken from a model that was committed, and not too long ago."""
        base = self.bodies.get(manifest.base_round)
        known = self.federation.fingerprint if manifest.base_round == 0 else base
        if manifest.base_hash != known:
            raise InvariantBroken(f"round {body.server_round} counts a delta that was taken from another model")
        behind = body.server_round - 1 - manifest.base_round
        if not 0 <= behind <= self.federation.rounds.max_staleness:
            raise InvariantBroken(f"round {body.server_round} counts a delta that is {behind} rounds behind")

    def _covers_once(self, body: Body) -> None:
        """No sample of shared data is trained on twice: positions are taken once, whoever takes them."""
        if body.server_round in self.covering:
            return
        self.covering.add(body.server_round)
        for one in body.counted:
            if size(without(one.covered, self.covered)) < size(one.covered):
                raise InvariantBroken(f"round {body.server_round} covers samples of {one.client[:8]} once more")
            self.covered = joined([*self.covered, *one.covered])

    def folded(self, broker: "SimulatedBroker", head: Head) -> None:
        """A broker folded a commit: equal rounds, equal models."""
        known = self.models.setdefault(head.server_round, head.model_hash)
        if known != head.model_hash:
            raise InvariantBroken(f"two models at round {head.server_round}, the second on {broker.name}")

    def said_to_peer(self, broker: "SimulatedBroker", message: Message) -> None:
        """A broker speaks to another: votes and promises are durable before they are said."""
        disk = broker.disk
        if isinstance(message, VoteNotice) and message.vote.node_id == broker.identity.node_id:
            self._vote_is_durable(broker, message.vote)
        elif isinstance(message, Promise):
            held = disk.record(message.server_round).promised
            if not disk.holds(message.server_round) and held < message.view:
                raise InvariantBroken(f"{broker.name} said a promise of view {message.view} that is not on its disk")
        elif isinstance(message, CheckpointNotice) and message.server_round not in disk.checkpoints:
            raise InvariantBroken(f"{broker.name} offered a checkpoint that is not on its disk")
        elif isinstance(message, CommitNotice) and message.server_round not in disk.commits:
            raise InvariantBroken(f"{broker.name} announced a commit that is not on its disk")

    def said_to_client(self, broker: "SimulatedBroker", message: Message) -> None:
        """A broker speaks to a client: receipts and commits are durable before they are said."""
        if isinstance(message, ReceiptNotice):
            receipt = decode(Receipt, message.receipt.payload)
            if receipt.manifest_hash not in broker.disk.admitted:
                raise InvariantBroken(f"{broker.name} gave a receipt for what is not on its disk")
        elif isinstance(message, CommitNotice) and message.server_round not in broker.disk.commits:
            raise InvariantBroken(f"{broker.name} announced a commit that is not on its disk")

    def nothing_is_gone(self) -> None:
        """Every committed round is still held by a broker, or can still be proposed from the votes of a majority."""
        for server_round, body in self.bodies.items():
            if not self._holders(server_round) and not self._voters(server_round, body):
                raise InvariantBroken(f"round {server_round} was committed and is on no disk")

    def _holders(self, server_round: int) -> list[str]:
        return [broker.name for broker in self.brokers if broker.disk.holds(server_round)]

    def _voters(self, server_round: int, body: bytes) -> list[str]:
        held = [(broker.name, broker.disk.votes.get(server_round)) for broker in self.brokers]
        return [name for name, vote in held if vote is not None and body_hash(vote[1]) == body]

    def _vote_is_durable(self, broker: "SimulatedBroker", signed: Signed) -> None:
        vote = decode(Vote, signed.payload)
        held = broker.disk.votes.get(vote.server_round)
        if broker.disk.holds(vote.server_round):
            return
        if held is None or held[0] < vote.view or (held[0] == vote.view and body_hash(held[1]) != vote.body_hash):
            raise InvariantBroken(f"{broker.name} said a vote in view {vote.view} that is not on its disk")

    def _voters_hold_their_votes(self, commit: Commit, body: Body) -> None:
        by_id = {broker.identity.node_id: broker for broker in self.brokers}
        for signed in commit.votes:
            broker = by_id[signed.node_id]
            if broker.disk_lost:
                continue
            if not broker.disk.holds(body.server_round) and body.server_round not in broker.disk.votes:
                raise InvariantBroken(f"{broker.name} voted for round {body.server_round} and its disk does not know")
