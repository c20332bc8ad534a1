"""The broker's core: events and the time in, effects out. Knows no socket, file, clock, thread or random source.

It holds the head of the ledger, the open round, the uploads and the sessions, catches up when it is behind, and lets
every message go to the part that decides about it.
"""

from datetime import datetime

from brokers.admission import check_manifest
from brokers.catching_up import CatchingUp
from brokers.closing import Readiness
from brokers.consolidation import Consolidation
from brokers.effects import (
    Abandon,
    Cache,
    Effect,
    EndSession,
    Fold,
    Reconnect,
    SaveAdopted,
    SaveCheckpoint,
    SaveCommit,
    SaveEvaluation,
    Say,
    SendClient,
    SendPeer,
    Stop,
    TakeUp,
)
from brokers.events import (
    Adopted,
    CheckpointWritten,
    Drain,
    Event,
    Examined,
    Fetched,
    FromClient,
    FromPeer,
    Inspected,
    Missed,
    PeerDown,
    PeerUp,
    Previewed,
    Reduced,
    SessionLost,
    Tick,
)
from brokers.intake import Intake
from brokers.orders import WorkOrders
from brokers.pace import Latecomers, Pace
from brokers.room import Room
from brokers.round import OpenRound
from brokers.sequences import Sequences
from brokers.sessions import Session, Sessions
from ravnest_fed.decree import evaluation_of
from ravnest_fed.errors import AdmissionRefused
from ravnest_fed.facts import BlobRef, Body, Commit, Holding, Manifest, decode, encode, open_signed, signed_hash
from ravnest_fed.federation import Federation
from ravnest_fed.framing import pack
from ravnest_fed.hashing import digest
from ravnest_fed.head import Head
from ravnest_fed.identity import Identity, Signed
from ravnest_fed.ledger import Admitted, VoteRecord
from ravnest_fed.manifests import still_countable
from ravnest_fed.messages import (
    PROTOCOL_VERSION,
    Announcement,
    CapabilityNotice,
    ChangeNotice,
    CheckpointNotice,
    CommitNotice,
    CommitsRequest,
    EvaluationNotice,
    Goodbye,
    Hello,
    Message,
    Offer,
    PeerHello,
    Presence,
    Ready,
    Reason,
    Refused,
    Skip,
    Waiting,
    Welcome,
    round_of,
)
from ravnest_fed.roster import change_finding

MINORITY_SECONDS = 10.0
"""How long a broker without a majority keeps its clients, at the least."""
GREETING_SECONDS = 2.0
"""How often brokers tell each other where they stand."""
STARTING_SECONDS = 3.0
"""How long after its own start a broker takes those that are not connected for starting up too."""
DRAIN_SECONDS = 10.0
"""How long a broker that is to stop stays at the most, until others hold what was handed in here."""
STOPPING = "this broker stops"
MAX_EARLY = 4096
"""Most messages about the next round that are kept until this broker gets there."""


class BrokerCore:
    """One broker's decisions."""

    def __init__(
        self,
        federation: Federation,
        identity: Identity,
        head: Head,
        record: VoteRecord,
        admitted: list[Admitted],
        evaluations: list[Signed],
        highest_sequences: dict[str, int],
        welcome: tuple[BlobRef, BlobRef],
        consolidation: Consolidation,
        pace: Pace,
        now: float,
    ) -> None:
        """`admitted`, `evaluations` and `record` are what the ledger kept of the open round; `welcome` names the blobs of
        the federation file and the initial model; `consolidation` and `pace` know what
        the ledger holds of rounds before; `now` is in seconds, as in every method."""
        self.federation = federation
        self.head = head
        self.sessions = Sessions(federation)
        self.intake = Intake(federation, identity)
        self._orders = WorkOrders(federation, identity)
        self._identity = identity
        self._me = identity.node_id
        self._welcome = welcome
        self._peers: set[str] = set()
        self._peer_known: dict[str, bytes] = {}
        self._sequences = Sequences(highest_sequences, 1 + federation.rounds.max_staleness)
        self._early: list[tuple[str, Message]] = []
        self._consolidation = consolidation
        self._pace = pace
        self._catching = CatchingUp(federation)
        self._drained_by: float | None = None
        self._stopped = False
        self._change: Signed | None = None
        self._room = Room(federation.schema.vector_size)
        self._latecomers = Latecomers(pace)
        self._greeted_at = now
        self._majority_at = now
        self._patient_until = now + STARTING_SECONDS
        self.round = OpenRound(federation, head, identity, record, pace, self._patient_until, now)
        self._admitted_before = admitted
        self._evaluations_before = evaluations

    def start(self, now: float) -> list[Effect]:
        """Begin: the first effects, with what the ledger kept of the open round."""
        for signed in self._evaluations_before:
            self.round.add_evaluation(signed.node_id, signed)
        effects = self.round.start(now) + self.round.set_live(self._live(), now)
        for kept in self._admitted_before:
            manifest = open_signed(Manifest, kept.manifest, self.federation.public_key(kept.manifest.node_id))
            if manifest is not None and still_countable(self.federation, self.head, manifest):
                effects += self.round.add_contribution(kept.manifest, manifest, kept.shards, self._me, now)
        return effects + self._settle(now)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event."""
        match event:
            case PeerUp(node_id):
                self._peers.add(node_id)
                effects: list[Effect] = [SendPeer(node_id, self._hello())]
                effects.append(SendPeer(node_id, self.sessions.presence(self.head.server_round)))
                effects += self.round.set_live(self._live(), now)
                effects += self.round.introduce(node_id)
                if self._change is not None:
                    effects.append(SendPeer(node_id, ChangeNotice(self._change)))
            case PeerDown(node_id):
                effects = self._lose_peer(node_id, now)
            case FromPeer(node_id, message):
                effects = self._on_peer(node_id, message, now)
            case FromClient(session, curve_key, message):
                effects = self._on_client(session, curve_key, message, now)
            case SessionLost(session):
                effects = self._lose(session, now)
            case Fetched(blob, into):
                effects = self.intake.on_fetched(blob) if into == "spool" else []
                effects += self._catching.on_fetched(event, self._peers)
                effects += self.round.on_fetched(event, now)
            case Missed(blob, into, lying):
                effects = self.intake.on_missed(blob, lying) if into == "spool" else []
                self._catching.on_missed(blob)
                effects += self.round.on_missed(event, now)
            case Inspected():
                effects = self.intake.on_inspected(event, self.head)
            case Reduced():
                effects = self.round.on_reduced(event, now)
            case Previewed():
                effects = self.round.on_previewed(event, now)
            case Examined():
                caught = self._catching.on_examined(event)
                effects = self.round.on_examined(event, now) if caught is None else caught
            case CheckpointWritten():
                effects = self._on_checkpoint(event)
            case Adopted():
                effects = self._catching.on_adopted(event, now)
            case Drain():
                effects = self._drain(now)
            case Tick(wall, free):
                effects = self._room.look(free) + self._tick(wall, now)
        effects += self._settle(now)
        return effects + self._stop_when_drained(now)

    def waiting(self, now: float) -> Readiness:
        """What the open round waits for."""
        if self._room.left:
            return self.round.readiness(now)
        return Readiness(False, None, "disk is full: takes no contributions")

    def peers(self) -> tuple[str, ...]:
        """The brokers that are connected."""
        return tuple(sorted(self._peers))

    # --- peers -------------------------------------------------------------------------------------------------------

    def _on_peer(self, node_id: str, message: Message, now: float) -> list[Effect]:
        match message:
            case ChangeNotice(change=signed):
                return self._take_change(signed)[0]
            case PeerHello(server_round=server_round):
                self._catching.heard(node_id, server_round)
                effects = self._catch_up(now) + self._fill_in(node_id, message)
                return effects + self._consolidation.compare(node_id, message)
            case Presence():
                self.sessions.hear(node_id, message)
                return self.round.set_clients(self.sessions.live(), self.sessions.away(), now)
            case EvaluationNotice(evaluation=signed):
                return self._take_evaluation(signed)
            case CommitsRequest(server_round=server_round):
                return self._ask_for_commits(node_id, True, server_round)
            case CommitNotice() | CheckpointNotice():
                return self._catching.on_notice(node_id, message, self.head.server_round)
            case Goodbye():
                return self._lose_peer(node_id, now)
            case Announcement():
                return self._on_announcement(node_id, message, now)
        about = round_of(message)
        if about is not None and about != self.round.server_round:
            return self._about_another_round(node_id, message, about)
        return self.round.on_peer(node_id, message, now)

    def _fill_in(self, node_id: str, hello: PeerHello) -> list[Effect]:
        """Tell a broker at the same round what we know, where it has been knowing something else for a while."""
        before, self._peer_known[node_id] = self._peer_known.get(node_id), hello.known
        if hello.server_round != self.head.server_round or hello.known != before:
            return []
        return self.round.introduce(node_id) if hello.known != self.round.contributions.digest() else []

    def _about_another_round(self, node_id: str, message: Message, about: int) -> list[Effect]:
        if about == self.round.server_round + 1 and len(self._early) < MAX_EARLY:
            self._early.append((node_id, message))
            return []
        if about < self.round.server_round:
            return self._ask_for_commits(node_id, True, about - 1)
        return []

    def _on_announcement(self, node_id: str, message: Announcement, now: float) -> list[Effect]:
        signed, shards, about = message.manifest, message.shards, message.server_round
        if about and about != self.round.server_round:
            return self._about_another_round(node_id, message, about)
        manifest_hash = signed_hash(signed)
        known = self.round.contributions.get(manifest_hash)
        if known is not None:
            # Its client has handed it in at this broker too.
            self.round.contributions.hold(node_id, Holding(manifest_hash, tuple(range(len(known.shards)))))
            return self.round.advance(now)
        try:
            manifest = check_manifest(self.federation, self.head, signed, shards, 0)
        except AdmissionRefused:
            opened = open_signed(Manifest, signed, self.federation.public_key(signed.node_id))
            early = opened is not None and opened.base_round == self.head.server_round + 1
            if early and len(self._early) < MAX_EARLY:
                self._early.append((node_id, message))
            return []
        self._sequences.saw(manifest.client, manifest.sequence, manifest_hash)
        return self.round.add_contribution(signed, manifest, shards, node_id, now)

    def _catch_up(self, now: float) -> list[Effect]:
        return self._catching.ask(self._peers, self.head.server_round, now)

    # --- clients -----------------------------------------------------------------------------------------------------

    def _on_client(self, session: str, curve_key: str, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Hello):
            return self._greet(session, curve_key, message, now)
        known = self.sessions.by_session.get(session)
        if known is None:
            return [SendClient(session, Goodbye("say hello first"))]
        if known.guest and isinstance(message, Ready | Offer):
            # A greeting as a guest that came late, or twice, does not outweigh what only a home is told.
            self.sessions.come_home(known)
            return self._presence_changed(now) + self._on_client(session, curve_key, message, now)
        if known.guest and not isinstance(message, Goodbye):
            return []
        match message:
            case ChangeNotice(change=signed) if known.operator:
                effects, wrong = self._take_change(signed)
                refused = Refused(Reason.WRONG_CHANGE, wrong, signed_hash(signed))
                return [*effects, SendClient(session, refused)] if wrong else effects
            case Ready(server_round=server_round):
                known.ready = server_round
                # The order stands until the client has folded its way up to it: the round may wait for this client.
                return [*self._ask_for_commits(session, False, server_round), *self._order(known, now)]
            case CommitsRequest(server_round=server_round):
                return self._ask_for_commits(session, False, server_round)
            case Offer() if not self._room.left:
                manifest_hash = signed_hash(message.manifest)
                text = "this broker's disk is full; other brokers may have room"
                return [SendClient(session, Refused(Reason.NO_ROOM, text, manifest_hash))]
            case Offer() if not known.operator:
                if message.manifest.node_id != known.node_id:
                    return [SendClient(session, Refused("wrong-signature", "this is another client's contribution"))]
                opened = open_signed(Manifest, message.manifest, self.federation.public_key(known.node_id))
                if opened is not None:
                    self._latecomers.came(known.node_id, opened.base_round, now)
                return self.intake.offer(session, message, self.head, self.round.contributions, self._sequences)
            case Skip(base_round=base_round, reason=reason):
                if base_round == self.head.server_round:
                    self.sessions.skip(known.node_id)
                    name = self.federation.name_of(known.node_id)
                    said = Say("client skips the round", {"client": name, "reason": reason[:200]}, warning=True)
                    return [said, *self._presence_changed(now)]
            case EvaluationNotice(evaluation=signed) if signed.node_id == known.node_id:
                effects = self._take_evaluation(signed)
                return effects + self._to_peers(message) if effects else []
            case CapabilityNotice(capability=capability) if not known.operator:
                self._orders.hear(known.node_id, capability)
            case Goodbye():
                answer = SendClient(session, Goodbye("heard"))
                return [answer, EndSession(session), *self._lose(session, now)]
        return []

    def _greet(self, session: str, curve_key: str, hello: Hello, now: float) -> list[Effect]:
        if self._drained_by is not None:
            return [SendClient(session, Goodbye(STOPPING))]
        greeted = self.sessions.greet(session, curve_key, hello, now)
        if isinstance(greeted, Refused):
            self.intake.refusals[greeted.reason] = self.intake.refusals.get(greeted.reason, 0) + 1
            said = Say("client refused", {"client": hello.node_id[:8], "reason": greeted.reason}, warning=True)
            return [SendClient(session, greeted), said]
        welcome = Welcome(
            PROTOCOL_VERSION,
            self.federation.fingerprint,
            self._me,
            self.head.server_round,
            self._sequences.highest(hello.node_id, self.head),
            *self._welcome,
        )
        effects: list[Effect] = [SendClient(session, welcome)]
        return effects if greeted.operator else effects + self._presence_changed(now)

    def _order(self, known: Session, now: float) -> list[Effect]:
        if known.operator or self.head.stop:
            return []
        contributions = self.round.contributions
        done = contributions.of_client(known.node_id)
        if (done and done.manifest.base_round == self.head.server_round) or contributions.equivocated(known.node_id):
            # A client that lost its memory would sign a second delta for the round.
            return []
        return self._orders.give(known, self.head, now)

    def _lose(self, session: str, now: float) -> list[Effect]:
        return self._presence_changed(now) if self.sessions.lose(session) else []

    def _presence_changed(self, now: float) -> list[Effect]:
        effects = self._to_peers(self.sessions.presence(self.head.server_round))
        return effects + self.round.set_clients(self.sessions.live(), self.sessions.away(), now)

    def _take_evaluation(self, signed: Signed) -> list[Effect]:
        if self.round.has_evaluation(signed.node_id):
            return []
        evaluation = evaluation_of(self.federation, self.head, signed)
        if evaluation is None:
            return []
        self.round.add_evaluation(signed.node_id, signed)
        return [SaveEvaluation(evaluation.server_round, evaluation.client, signed)]

    # --- commits -----------------------------------------------------------------------------------------------------

    def _ask_for_commits(self, who: str, peer: bool, after: int) -> list[Effect]:
        changes = self.head.changes
        return [self._consolidation.offer(who, peer, after, changes)] if 0 <= after < self.head.server_round else []

    def _on_checkpoint(self, written: CheckpointWritten) -> list[Effect]:
        if written.checkpoint is None:
            said = {"round": written.server_round, "finding": written.finding}
            return [Say("no checkpoint", said, warning=True)]
        self._consolidation.written(written.server_round, written.checkpoint)
        keep = self.federation.checkpoints.keep
        return [SaveCheckpoint(written.server_round, written.checkpoint, keep)]

    def _settle(self, now: float) -> list[Effect]:
        """Hand admitted contributions to the round, and turn its outcome into the next head."""
        effects: list[Effect] = []
        while self.intake.admitted or self.round.outcome or self._catching.caught or self._catching.adopted:
            while self.intake.admitted:
                upload = self.intake.admitted.pop()
                if still_countable(self.federation, self.head, upload.manifest):
                    client, sequence = upload.manifest.client, upload.manifest.sequence
                    self._sequences.saw(client, sequence, signed_hash(upload.signed))
                    self._orders.delivered(upload.manifest, sum(ref.length for ref in upload.shards), now)
                    effects += self.round.add_contribution(upload.signed, upload.manifest, upload.shards, self._me, now)
            adopted, decided = self._catching.adopted, self.round.outcome or self._catching.caught
            if adopted is not None and adopted.server_round > self.head.server_round:
                effects += self._adopt(adopted, now)
            elif decided is not None:
                effects += self._close(decided, now)
            else:
                self._catching.moved_on()
        return effects

    def _close(self, commit: Commit, now: float) -> list[Effect]:
        body = decode(Body, commit.body)
        record = pack(encode(commit))
        ref = BlobRef.of(record)
        seconds = now - self.round.started
        present = self.sessions.by_node.keys() - self.sessions.away()
        self._orders.closed(self.round.contributions, present, now)
        head = self.head.after(body, commit.body, self.federation)
        kept = self._kept(head)
        effects: list[Effect] = [SaveCommit(commit, body, seconds, kept), Fold(commit, body), Cache(record)]
        effects += self._consolidation.committed(body)
        self._pace.took(seconds)
        return effects + self._begin_round(head, ref, kept, now)

    def _kept(self, head: Head) -> frozenset[bytes]:
        """The blobs of contributions, admitted or on their way, that a round on top of `head` may still count."""
        late = self.round.contributions.uncounted(head)
        return frozenset(ref.hash for one in late for ref in one.shards) | self.intake.blobs_on(head)

    def _adopt(self, adopted: Adopted, now: float) -> list[Effect]:
        """Go on from a checkpoint, whose state was checked against its commit's votes."""
        assert adopted.head is not None
        kept = self._kept(adopted.head)
        record = pack(encode(adopted.commit))
        self._consolidation.adopted(adopted.server_round, adopted.checkpoint)
        effects: list[Effect] = [
            SaveAdopted(adopted.commit, adopted.server_round, adopted.checkpoint, kept),
            TakeUp(adopted.server_round),
            Cache(record),
            Say("checkpoint taken up", {"round": adopted.server_round}),
        ]
        return effects + self._begin_round(adopted.head, BlobRef.of(record), kept, now)

    def _begin_round(self, head: Head, ref: BlobRef, kept: frozenset[bytes], now: float) -> list[Effect]:
        """The round after `head` begins; `ref` is the record of the head's commit.

        Contributions that are still on their way were made on a base that is left now; the blobs `kept` may still count.
        """
        effects: list[Effect] = [Abandon("spool", kept)]
        late = self.round.contributions.at_home(self._me)
        self._latecomers.closed(self.head.server_round, self.round.started)
        self.head = head
        effects += self._follow_roster()
        self.intake.forget_before(self.head)
        self.sessions.new_round()
        self._catching.moved_on()
        self.round = OpenRound(
            self.federation, self.head, self._identity, VoteRecord(), self._pace, self._patient_until, now
        )
        self.round.change = self._change
        notice = CommitNotice(self.head.server_round, ref)
        for session in self.sessions.by_node.values():
            if session.ready >= 0:
                effects.append(SendClient(session.session, notice))
                effects += self._order(session, now)
        effects += self._to_peers(self._hello())
        effects += self.round.start(now)
        effects += self.round.set_live(self._live(), now)
        effects += self._presence_changed(now)
        for one in late:
            if still_countable(self.federation, self.head, one.manifest):
                effects += self.round.add_contribution(one.signed, one.manifest, one.shards, self._me, now)
        early, self._early = self._early, []
        for node_id, message in early:
            effects += self._on_peer(node_id, message, now)
        return effects + self._catch_up(now)

    # --- the roster ----------------------------------------------------------------------------------------------------

    def _take_change(self, signed: Signed) -> tuple[list[Effect], str]:
        """A change that the operator wants committed: told to everybody, and put into the next draft; or what is wrong."""
        if signed == self._change or any(signed == made for _, made in self.head.changes):
            return [], ""
        wrong = change_finding(self.federation, self.head, signed)
        if wrong:
            return [], wrong
        self._change = self.round.change = signed
        return self._to_peers(ChangeNotice(signed)), ""

    def _follow_roster(self) -> list[Effect]:
        """Let the roster of the head be in force."""
        if self._change is not None and change_finding(self.federation, self.head, self._change):
            self._change = None
        if self.head.brokers == self.federation.brokers:
            return []
        member = self._me in self.federation.broker_by_id
        self.federation = self.federation.with_brokers(self.head.brokers)
        self.sessions.federation = self._catching.federation = self.federation
        self.intake.follow(self.federation)
        names = " ".join(broker.name for broker in self.head.brokers)
        effects: list[Effect] = [Reconnect(self.head.brokers), Say("roster changed", {"brokers": names})]
        gone = self._peers - set(self.federation.roster)
        self._peers -= gone
        for node_id in gone:
            self.sessions.forget_peer(node_id)
        if member and self._me not in self.federation.broker_by_id:
            effects.append(Say("this broker was removed from the roster", {}, warning=True))
            for session in list(self.sessions.by_session):
                effects.append(SendClient(session, Goodbye("this broker was removed from the roster")))
            self._stopped = True
            effects.append(Stop())
        return effects

    # --- stopping --------------------------------------------------------------------------------------------------

    def _lose_peer(self, node_id: str, now: float) -> list[Effect]:
        self._peers.discard(node_id)
        self.sessions.forget_peer(node_id)
        self.round.contributions.forget_holder(node_id)
        effects = self.round.set_live(self._live(), now)
        return effects + self.round.set_clients(self.sessions.live(), self.sessions.away(), now)

    def _drain(self, now: float) -> list[Effect]:
        """Send the clients elsewhere, and stay until others hold what was handed in here."""
        if self._drained_by is not None:
            return []
        self._drained_by = now + DRAIN_SECONDS
        effects: list[Effect] = [Say("draining", {"clients": len(self.sessions.by_node)})]
        for session in list(self.sessions.by_session):
            effects += [SendClient(session, Goodbye(STOPPING)), EndSession(session), *self._lose(session, now)]
        return effects

    def _stop_when_drained(self, now: float) -> list[Effect]:
        if self._drained_by is None or self._stopped:
            return []
        alone = self._live() == {self._me}
        needed = not self.head.stop and self.round.contributions.only_held_by(self._me, self._live())
        if needed and not alone and now < self._drained_by:
            return []
        self._stopped = True
        return [*self._to_peers(Goodbye(STOPPING)), Stop()]

    # --- time --------------------------------------------------------------------------------------------------------

    def _tick(self, wall: float, now: float) -> list[Effect]:
        date = self.federation.stop.date
        reached = bool(date) and wall >= datetime.fromisoformat(date).timestamp()
        effects = self.round.tick(reached, now) + self._catch_up(now)
        if now - self._greeted_at >= GREETING_SECONDS:
            self._greeted_at = now
            effects += self._to_peers(self._hello())
        text = "" if self.head.stop else self.round.readiness(now).waiting.split(";")[0]
        for session in self.sessions.by_node.values():
            if session.ready >= 0 and session.told != text:
                session.told = text
                effects.append(SendClient(session.session, Waiting(self.head.server_round + 1, text)))
        return effects + self._send_elsewhere(now)

    def _send_elsewhere(self, now: float) -> list[Effect]:
        """A broker that has long been without a majority sends its clients to others, one by one over a while."""
        if len(self._live()) >= self.federation.majority:
            self._majority_at = now
            return []
        effects: list[Effect] = []
        for session in list(self.sessions.by_node.values()):
            spread = digest("elsewhere", session.node_id.encode(), self._me.encode())[0] / 256
            if now - max(self._majority_at, session.since) > MINORITY_SECONDS * (1.0 + spread):
                effects.append(SendClient(session.session, Goodbye("this broker sees no majority of brokers")))
                effects += [EndSession(session.session), *self._lose(session.session, now)]
        return effects

    def _hello(self) -> PeerHello:
        newest, checkpoint = self._consolidation.newest
        return PeerHello(
            PROTOCOL_VERSION,
            self.federation.fingerprint,
            self._me,
            self.head.server_round,
            self.round.contributions.digest(),
            newest,
            checkpoint.hash if checkpoint else b"",
        )

    def _live(self) -> frozenset[str]:
        return frozenset((self._me, *self._peers)).intersection(self.federation.roster)

    def _to_peers(self, message: Message) -> list[Effect]:
        return [SendPeer(node, message) for node in sorted(self._peers)]
