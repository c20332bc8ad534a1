"""The broker's core: events and the time in, effects out. Knows no socket, file, clock, thread or random source.

It holds the head of the ledger, the open round, the uploads and the sessions, catches up when it is behind, and lets
every message go to the part that decides about it.
"""

from datetime import datetime

from brokers.admission import check_manifest
from brokers.closing import Readiness
from brokers.effects import (
    Cache,
    Damaged,
    Effect,
    EndSession,
    Examine,
    Fetch,
    Fold,
    SaveCommit,
    SaveEvaluation,
    Say,
    SendClient,
    SendCommits,
    SendPeer,
)
from brokers.events import (
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
from brokers.round import OpenRound
from brokers.sessions import Session, Sessions
from ravnest_fed.decree import check_votes, evaluation_of, open_commit
from ravnest_fed.errors import AdmissionRefused, RavnestError
from ravnest_fed.facts import BlobRef, Body, Commit, Manifest, decode, encode, open_signed, signed_hash
from ravnest_fed.federation import Federation
from ravnest_fed.framing import pack
from ravnest_fed.hashing import digest
from ravnest_fed.head import Head
from ravnest_fed.identity import Identity, Signed
from ravnest_fed.ledger import Admitted, VoteRecord
from ravnest_fed.messages import (
    PROTOCOL_VERSION,
    Announcement,
    CapabilityNotice,
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
    Refused,
    Skip,
    Waiting,
    Welcome,
)

MINORITY_SECONDS = 10.0
"""How long a broker without a majority keeps its clients, at the least."""
GREETING_SECONDS = 2.0
"""How often brokers tell each other where they stand."""
STARTING_SECONDS = 3.0
"""How long after its own start a broker takes those that are not connected for starting up too."""
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
        now: float,
    ) -> None:
        """`admitted`, `evaluations` and `record` are what the ledger kept of the open round; `welcome` names the blobs of
        the federation file and the initial model; `now` is in seconds, as in every method."""
        self.federation = federation
        self.head = head
        self.sessions = Sessions(federation)
        self.intake = Intake(federation, identity)
        self._orders = WorkOrders(federation, identity)
        self._identity = identity
        self._me = identity.node_id
        self._welcome = welcome
        self._peers: set[str] = set()
        self._peer_rounds: dict[str, int] = {}
        self._peer_known: dict[str, bytes] = {}
        self._highest = dict(highest_sequences)
        self._early: list[tuple[str, Message]] = []
        self._commit_refs: dict[int, BlobRef] = {}
        self._catching: BlobRef | None = None
        self._catching_commit: tuple[Commit, Body, set[bytes]] | None = None
        self._asked_at = -1e9
        self._asked = 0
        self._greeted_at = now
        self._majority_at = now
        self._patient_until = now + STARTING_SECONDS
        self.round = OpenRound(federation, head, identity, record, self._patient_until, now)
        self._admitted_before = admitted
        self._evaluations_before = evaluations

    def start(self, now: float) -> list[Effect]:
        """Begin: the first effects, with what the ledger kept of the open round."""
        for signed in self._evaluations_before:
            self.round.add_evaluation(signed.node_id, signed)
        effects = self.round.start(now) + self.round.set_live(self._live(), now)
        for kept in self._admitted_before:
            manifest = open_signed(Manifest, kept.manifest, self.federation.public_key(kept.manifest.node_id))
            if manifest is not None:
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
            case PeerDown(node_id):
                self._peers.discard(node_id)
                self.sessions.forget_peer(node_id)
                self.round.contributions.forget_holder(node_id)
                effects = self.round.set_live(self._live(), now)
                effects += self.round.set_clients(self.sessions.live(), self.sessions.away(), now)
            case FromPeer(node_id, message):
                effects = self._on_peer(node_id, message, now)
            case FromClient(session, curve_key, message):
                effects = self._on_client(session, curve_key, message, now)
            case SessionLost(session):
                effects = self._lose(session, now)
            case Fetched(blob, into):
                effects = self.intake.on_fetched(blob) if into == "spool" else self._catching_fetched(event, now)
                effects += self.round.on_fetched(event, now)
            case Missed(blob, into, lying):
                effects = self.intake.on_missed(blob, lying) if into == "spool" else []
                caught = self._catching_commit
                if self._catching is not None and (blob == self._catching.hash or (caught and blob in caught[2])):
                    self._catching = self._catching_commit = None
                effects += self.round.on_missed(event, now)
            case Inspected():
                effects = self.intake.on_inspected(event, self.head)
            case Reduced():
                effects = self.round.on_reduced(event, now)
            case Previewed():
                effects = self.round.on_previewed(event, now)
            case Examined():
                effects = self._on_examined(event, now)
            case Tick(wall):
                effects = self._tick(wall, now)
        return effects + self._settle(now)

    def waiting(self, now: float) -> Readiness:
        """What the open round waits for."""
        return self.round.readiness(now)

    def peers(self) -> tuple[str, ...]:
        """The brokers that are connected."""
        return tuple(sorted(self._peers))

    # --- peers -------------------------------------------------------------------------------------------------------

    def _on_peer(self, node_id: str, message: Message, now: float) -> list[Effect]:
        if node_id not in self.federation.broker_by_id:
            return []
        match message:
            case PeerHello(server_round=server_round):
                self._peer_rounds[node_id] = server_round
                return self._catch_up(now) + self._fill_in(node_id, message)
            case Presence():
                self.sessions.hear(node_id, message)
                return self.round.set_clients(self.sessions.live(), self.sessions.away(), now)
            case EvaluationNotice(evaluation=signed):
                return self._take_evaluation(signed)
            case CommitsRequest(server_round=server_round):
                return self._ask_for_commits(node_id, True, server_round)
            case CommitNotice(server_round=server_round, commit=ref):
                if server_round != self.head.server_round + 1 or self._catching is not None:
                    return []
                self._catching = ref
                return [Fetch(ref, (node_id,), "memory")]
            case Goodbye():
                return []
            case Announcement(manifest=signed, shards=shards):
                return self._on_announcement(node_id, signed, shards, now)
        about = _round_of(message)
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

    def _on_announcement(self, node_id: str, signed: Signed, shards: tuple[BlobRef, ...], now: float) -> list[Effect]:
        manifest_hash = signed_hash(signed)
        if self.round.contributions.get(manifest_hash) is not None:
            return []
        try:
            manifest = check_manifest(self.federation, self.head, signed, shards, 0)
        except AdmissionRefused:
            opened = open_signed(Manifest, signed, self.federation.public_key(signed.node_id))
            early = opened is not None and opened.base_round == self.head.server_round + 1
            if early and len(self._early) < MAX_EARLY:
                self._early.append((node_id, Announcement(signed, shards)))
            return []
        highest = self._highest.get(manifest.client, 0)
        self._highest[manifest.client] = max(highest, manifest.sequence)
        return self.round.add_contribution(signed, manifest, shards, node_id, now)

    def _catch_up(self, now: float) -> list[Effect]:
        ahead = sorted(node for node in self._peers if self._peer_rounds.get(node, 0) > self.head.server_round)
        if not ahead or self._catching is not None or now - self._asked_at < 0.5:
            return []
        self._asked_at = now
        self._asked += 1
        return [SendPeer(ahead[self._asked % len(ahead)], CommitsRequest(self.head.server_round))]

    def _catching_fetched(self, event: Fetched, now: float) -> list[Effect]:
        if self._catching is not None and event.blob == self._catching.hash and event.data is not None:
            try:
                commit = open_commit(event.data)
                check_votes(self.federation, commit)
                body = decode(Body, commit.body)
            except RavnestError as error:
                self._catching = None
                return [Say("commit refused", {"finding": str(error)}, warning=True)]
            blobs = (body.evidence, *body.updates)
            self._catching_commit = (commit, body, {ref.hash for ref in blobs})
            return [Fetch(ref, tuple(sorted(self._peers)), "ledger") for ref in blobs]
        if self._catching_commit is None or event.blob not in self._catching_commit[2]:
            return []
        commit, _, missing = self._catching_commit
        missing.discard(event.blob)
        return [] if missing else [Examine(commit.body, commit)]

    def _on_examined(self, event: Examined, now: float) -> list[Effect]:
        caught = self._catching_commit
        if caught is not None and caught[0].body == event.raw and self.round.outcome is None:
            self._catching = self._catching_commit = None
            if event.finding:
                return [Damaged(event.finding)]
            self.round.outcome = caught[0]
            return []
        return self.round.on_examined(event, now)

    # --- clients -----------------------------------------------------------------------------------------------------

    def _on_client(self, session: str, curve_key: str, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Hello):
            return self._greet(session, curve_key, message, now)
        known = self.sessions.by_session.get(session)
        if known is None:
            return [SendClient(session, Goodbye("say hello first"))]
        match message:
            case Ready(server_round=server_round):
                known.ready = server_round
                # The order stands until the client has folded its way up to it: the round may wait for this client.
                return [*self._ask_for_commits(session, False, server_round), *self._order(known, now)]
            case CommitsRequest(server_round=server_round):
                return self._ask_for_commits(session, False, server_round)
            case Offer() if not known.operator:
                if message.manifest.node_id != known.node_id:
                    return [SendClient(session, Refused("wrong-signature", "this is another client's contribution"))]
                highest = self._highest_of(known.node_id)
                return self.intake.offer(session, message, self.head, self.round.contributions, highest)
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
            self._highest_of(hello.node_id),
            *self._welcome,
        )
        effects: list[Effect] = [SendClient(session, welcome)]
        return effects if greeted.operator else effects + self._presence_changed(now)

    def _highest_of(self, client: str) -> int:
        counted = self.head.counted.get(client)
        return max(self._highest.get(client, 0), counted.highest if counted else 0)

    def _order(self, known: Session, now: float) -> list[Effect]:
        if known.operator or self.head.stop:
            return []
        contributions = self.round.contributions
        if contributions.of_client(known.node_id) or contributions.equivocated(known.node_id):
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
        return [SendCommits(who, peer, after)] if 0 <= after < self.head.server_round else []

    def _settle(self, now: float) -> list[Effect]:
        """Hand admitted contributions to the round, and turn its outcome into the next head."""
        effects: list[Effect] = []
        while self.intake.admitted or self.round.outcome is not None:
            while self.intake.admitted:
                upload = self.intake.admitted.pop()
                if upload.manifest.base_round == self.head.server_round:
                    self._highest[upload.manifest.client] = max(
                        self._highest.get(upload.manifest.client, 0), upload.manifest.sequence
                    )
                    self._orders.delivered(upload.manifest, sum(ref.length for ref in upload.shards), now)
                    effects += self.round.add_contribution(upload.signed, upload.manifest, upload.shards, self._me, now)
            if self.round.outcome is not None:
                effects += self._close(self.round.outcome, now)
        return effects

    def _close(self, commit: Commit, now: float) -> list[Effect]:
        body = decode(Body, commit.body)
        record = pack(encode(commit))
        ref = BlobRef.of(record)
        seconds = now - self.round.started
        present = self.sessions.by_node.keys() - self.sessions.away()
        self._orders.closed(self.round.contributions, present, now)
        effects: list[Effect] = [SaveCommit(commit, body, seconds), Fold(commit, body), Cache(record)]
        self.head = self.head.after(body, commit.body, self.federation.strategy.norm_history)
        self.intake.forget_before(self.head.server_round)
        self.sessions.new_round()
        self._catching = self._catching_commit = None
        self._asked_at = -1e9
        self.round = OpenRound(self.federation, self.head, self._identity, VoteRecord(), self._patient_until, now)
        notice = CommitNotice(self.head.server_round, ref)
        for session in self.sessions.by_node.values():
            if session.ready >= 0:
                effects.append(SendClient(session.session, notice))
                effects += self._order(session, now)
        effects += self._to_peers(self._hello())
        effects += self.round.start(now)
        effects += self.round.set_live(self._live(), now)
        effects += self._presence_changed(now)
        early, self._early = self._early, []
        for node_id, message in early:
            effects += self._on_peer(node_id, message, now)
        return effects + self._catch_up(now)

    # --- time --------------------------------------------------------------------------------------------------------

    def _tick(self, wall: float, now: float) -> list[Effect]:
        date = self.federation.stop.date
        reached = bool(date) and wall >= datetime.fromisoformat(date).timestamp()
        effects = self.round.tick(reached, now) + self._catch_up(now)
        if now - self._greeted_at >= GREETING_SECONDS:
            self._greeted_at = now
            effects += self._to_peers(self._hello())
        text = "" if self.head.stop else self.round.readiness(now).waiting.split(",")[0]
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
        return PeerHello(
            PROTOCOL_VERSION,
            self.federation.fingerprint,
            self._me,
            self.head.server_round,
            self.round.contributions.digest(),
        )

    def _live(self) -> frozenset[str]:
        return frozenset((self._me, *self._peers))

    def _to_peers(self, message: Message) -> list[Effect]:
        return [SendPeer(node, message) for node in sorted(self._peers)]


def _round_of(message: Message) -> int | None:
    """The round that a broker's message is about, where it is about one."""
    reduction = getattr(message, "reduction", None)
    if reduction is not None:
        return int(reduction.server_round)
    server_round = getattr(message, "server_round", None)
    return None if server_round is None else int(server_round)
