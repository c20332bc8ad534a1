"""The open round: contributions come in, a plan is made, owners reduce it, a body is put to the vote and decided.

One object a round and broker. Methods take what happened and the time (s) and return effects; `outcome` is set once a
majority decided and this broker holds and has examined everything that was decided.
"""

from collections.abc import Iterable

import msgspec

from brokers import agreement as paxos
from brokers.closing import Readiness, expected_clients, missing_clients, named, readiness
from brokers.contributions import Contribution, Contributions, lightened
from brokers.effects import (
    Accumulate,
    Cache,
    Damaged,
    Effect,
    Examine,
    Preview,
    Reduce,
    SaveBlob,
    SaveEquivocation,
    SavePromise,
    SaveVote,
    Say,
    SendPeer,
)
from brokers.events import Examined, Fetched, Missed, Previewed, Reduced
from brokers.pace import Pace
from brokers.supply import Supply
from brokers.view_time import ViewTime
from ravnest_fed.aggregation.weighting import Weight
from ravnest_fed.decree import draft, evidence_for, reduction_of
from ravnest_fed.errors import RavnestError, RemoteProtocolError
from ravnest_fed.facts import (
    BlobRef,
    Body,
    Commit,
    Holding,
    Inventory,
    Manifest,
    Vote,
    body_hash,
    decode,
    encode,
    open_signed,
    reduction_hash,
    sign,
)
from ravnest_fed.federation import Federation
from ravnest_fed.hashing import blob_hash
from ravnest_fed.head import Head, balanced_owners
from ravnest_fed.identity import Identity, Signed
from ravnest_fed.ledger import VoteRecord
from ravnest_fed.messages import (
    Announcement,
    InventoryNotice,
    InventoryRequest,
    Message,
    PlanNotice,
    Prepare,
    Promise,
    Propose,
    Refusal,
    ShardReduced,
    VoteNotice,
)
from ravnest_fed.roster import roster_with


class OpenRound:
    """The round after `head`, from the side of the broker `identity`."""

    def __init__(
        self,
        federation: Federation,
        head: Head,
        identity: Identity,
        record: VoteRecord,
        pace: Pace,
        patient_until: float,
        now: float,
    ) -> None:
        """Until `patient_until` (s) a broker that is not connected counts as starting up, not as gone."""
        self.federation = federation
        self.head = head
        self.server_round = head.server_round + 1
        self.contributions = Contributions(federation, head)
        self.outcome: Commit | None = None
        self.started = now
        self._pace = pace
        self._patient_until = patient_until
        self._identity = identity
        self._me = identity.node_id
        self._live: frozenset[str] = frozenset((self._me,))
        self._clients_live: frozenset[str] = frozenset()
        self._clients_away: frozenset[str] = frozenset()
        self._minimum_since: float | None = None
        self._evaluations: dict[str, Signed] = {}
        self._date_reached = False

        self._agreement = paxos.Agreement(
            federation.fingerprint, self.server_round, self._me, federation.roster, record, self._sign, self._open_vote
        )
        self._free_view: int | None = None
        self._bound: tuple[int, BlobRef, tuple[str, ...]] | None = None
        self._considering: tuple[int, BlobRef, tuple[str, ...]] | None = None
        self._sound: dict[bytes, bytes] = {}
        self._unsound: set[bytes] = set()
        self._examining: set[bytes] = set()
        self._decided: paxos.Decided | None = None
        self._view_time = ViewTime(self._me, self.server_round)

        self._plan: PlanNotice | None = None
        self._planned_view = -1
        self._reducing: set[tuple[bytes, int]] = set()
        self._updates: dict[bytes, dict[int, BlobRef]] = {}
        self._drafting: Body | None = None
        self.change: Signed | None = None

        self._supply = Supply()
        self._arriving: dict[bytes, list[tuple[bytes, int]]] = {}
        self._expected_updates: dict[bytes, list[tuple[bytes, int, BlobRef]]] = {}

    # --- what the round is told --------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Effect]:
        """Begin the round, or begin it again after a restart."""
        voted = self._agreement.voted_body
        effects: list[Effect] = []
        if voted is not None:
            # The body may be decided by now, and is folded only after it was examined again.
            ref = BlobRef.of(voted)
            self._supply.load(ref.hash, voted)
            self._considering = (-1, ref, ())
            self._view_time.start(now)
            effects.append(Cache(voted))
        return effects + self._carry(self._agreement.start(), now)

    def set_live(self, brokers: frozenset[str], now: float) -> list[Effect]:
        """The brokers that are connected, this one included. A view whose proposer is gone is passed over at once."""
        self._live = brokers
        return self._pass_over_the_dead(now) + self.advance(now)

    def set_clients(self, live: frozenset[str], away: frozenset[str], now: float) -> list[Effect]:
        """The clients that any broker has a session with, and those seen leaving or skipping this round."""
        self._clients_live, self._clients_away = live, away
        return self.advance(now)

    def has_evaluation(self, client: str) -> bool:
        """Whether the client's evaluation of the head's model is known."""
        return client in self._evaluations

    def add_evaluation(self, client: str, signed: Signed) -> None:
        """A client's sound evaluation of the head's model."""
        self._evaluations[client] = signed

    def add_contribution(
        self, signed: Signed, manifest: Manifest, shards: tuple[BlobRef, ...], home: str, now: float
    ) -> list[Effect]:
        """A contribution was admitted here or at another broker; its owner's shards are fetched.
        A client may have one on each base: a round counts the oldest of them.
        """
        contribution = self.contributions.add(signed, manifest, shards, home)
        known = self.contributions.rival(contribution.manifest_hash, manifest)
        effects: list[Effect] = []
        if known is not None:
            if not self.contributions.equivocated(manifest.client):
                effects.append(SaveEquivocation(manifest.client, self.head.server_round, known.signed, signed))
            self.contributions.mark_equivocator(manifest.client)
        if home == self._me:
            effects += self._to_all(Announcement(signed, lightened(shards), self.server_round))
            for ref in shards:
                self._supply.add(ref.hash, "spool")
        mine = [shard for shard, owner in enumerate(self.head.owners) if self.federation.roster[owner] == self._me]
        for shard in mine:
            if self._supply.has(shards[shard].hash, "spool"):
                effects += self._accumulate(contribution, shard)
            else:
                self._arriving.setdefault(shards[shard].hash, []).append((contribution.manifest_hash, shard))
                effects += self._supply.want(shards[shard], (home,), "spool")
        return effects + self.advance(now)

    def on_peer(self, node_id: str, message: Message, now: float) -> list[Effect]:
        """A broker's message about this round."""
        match message:
            case InventoryNotice(inventory=signed):
                effects = self._on_inventory(signed)
            case InventoryRequest():
                effects = self.introduce(node_id)
            case PlanNotice():
                effects = self._on_plan(node_id, message, now)
            case ShardReduced():
                effects = self._on_shard_reduced(node_id, message)
            case Prepare(view=view):
                effects = self._carry(self._agreement.on_prepare(node_id, view), now)
            case Promise():
                effects = self._carry(self._agreement.on_promise(node_id, message), now)
            case Refusal(promised=promised):
                effects = self._carry(self._agreement.on_refusal(promised), now)
            case Propose(view=view, body=ref):
                self._view_time.progress(now)
                effects = self._carry(self._agreement.on_propose(node_id, view, ref), now)
            case VoteNotice(vote=signed):
                effects = self._carry(self._agreement.on_vote(signed), now)
            case _:
                effects = []
        return effects + self.advance(now)

    def introduce(self, node_id: str) -> list[Effect]:
        """Tell one broker everything about this round that it may have missed."""
        effects: list[Effect] = [
            SendPeer(node_id, Announcement(one.signed, one.shards, self.server_round))
            for one in self.contributions.at_home(self._me)
        ]
        holdings = self.contributions.holdings_of(self._me)
        for start in range(0, len(holdings), 256):
            effects.append(SendPeer(node_id, self._inventory(holdings[start : start + 256])))
        if self._plan is not None and self._agreement.proposer(self._plan.view) == self._me:
            effects.append(SendPeer(node_id, self._plan))
        for tag, updates in self._updates.items():
            effects += [SendPeer(node_id, ShardReduced(self.server_round, tag, s, ref)) for s, ref in updates.items()]
        for message in self._agreement.ask_again():
            if isinstance(message, paxos.ToAll):
                effects.append(SendPeer(node_id, message.message))
        return effects

    def on_fetched(self, event: Fetched, now: float) -> list[Effect]:
        """A blob that was asked for is here."""
        self._supply.arrived(event)
        self._view_time.progress(now)
        effects: list[Effect] = []
        arriving = self._arriving.pop(event.blob, []) if event.into == "spool" else []
        for manifest_hash, shard in arriving:
            contribution = self.contributions.get(manifest_hash)
            if contribution is not None:
                effects += self._accumulate(contribution, shard)
        if event.into == "ledger" and event.blob in self._expected_updates:
            for tag, shard, ref in self._expected_updates.pop(event.blob):
                self._updates.setdefault(tag, {})[shard] = ref
        return effects + self.advance(now)

    def on_missed(self, event: Missed, now: float) -> list[Effect]:
        """Nobody asked had the blob; it is asked for again, of everybody, after a while."""
        self._supply.missed(event, now)
        return []

    def on_reduced(self, event: Reduced, now: float) -> list[Effect]:
        """A shard that this broker owns is reduced."""
        self._supply.add(event.update.hash, "ledger")
        self._updates.setdefault(event.reduction_hash, {})[event.shard] = event.update.bare()
        notice = ShardReduced(self.server_round, event.reduction_hash, event.shard, event.update)
        return self._to_all(notice) + self.advance(now)

    def on_previewed(self, event: Previewed, now: float) -> list[Effect]:
        """The draft's hashes are known: put it to the vote."""
        if event.draft.parent != self.head.commit_hash or self._drafting != event.draft:
            return []
        self._drafting = None
        if event.finding:
            self._free_view = None
            return [Say("draft refused", {"round": self.server_round, "finding": event.finding}, warning=True)]
        body = msgspec.structs.replace(event.draft, model_hash=event.model_hash, state_hash=event.state_hash)
        raw = encode(body)
        self._sound[body_hash(raw)] = raw
        if self._free_view is None or self._free_view != self._agreement.view:
            return []
        view, self._free_view = self._free_view, None
        self._view_time.progress(now)
        return [Cache(raw), *self._carry(self._agreement.propose(view, raw), now), *self.advance(now)]

    def on_examined(self, event: Examined, now: float) -> list[Effect]:
        """A body was examined."""
        self._examining.discard(event.raw)
        if event.finding:
            self._unsound.add(body_hash(event.raw))
            return [Say("body refused", {"round": self.server_round, "finding": event.finding}, warning=True)]
        self._sound[body_hash(event.raw)] = event.raw
        self._view_time.progress(now)
        return [Cache(event.raw), *self.advance(now)]

    def tick(self, date_reached: bool, now: float) -> list[Effect]:
        """Time has passed: the grace may be over, a view may have run out, a fetch may be due again."""
        self._date_reached = date_reached
        effects = self._pass_over_the_dead(now) + self.advance(now)
        effects += self._supply.retries(tuple(sorted(self._live - {self._me})), now)
        if self._view_time.over(now) and self.outcome is None:
            effects += self._change_view(now)
        return effects

    # --- what it waits for -------------------------------------------------------------------------------------------

    def readiness(self, now: float) -> Readiness:
        """Whether the round may close, by what this broker knows."""
        rounds = self.federation.rounds
        if len(self._live) < self.federation.majority:
            text = f"waiting for a majority of brokers ({len(self._live)} of {len(self.federation.brokers)} here)"
            return Readiness(False, None, text)
        arrived = self.contributions.arrived(self._live)
        if arrived >= rounds.min_contributions and self._minimum_since is None:
            self._minimum_since = now
        expected = expected_clients(
            self.head.last_clients,
            self._clients_live,
            self._clients_away,
            self.contributions.clients(),
            self.server_round,
            rounds.target_contributions,
            len(self.federation.members),
        )
        if self._minimum_since is None:
            return readiness(rounds, arrived, expected, (), now, now)
        at = self._pace.close_at(self.started, self._minimum_since, self.contributions.longest_training())
        return readiness(rounds, arrived, expected, self.missing(), at, now)

    def missing(self) -> list[str]:
        """The names of the clients that are waited for."""
        missing = missing_clients(
            self.head.last_clients,
            self._clients_live,
            self._clients_away,
            self.contributions.clients(),
            self.server_round,
            self.federation.member_by_id,
        )
        return [self.federation.name_of(client) for client in missing]

    def advance(self, now: float) -> list[Effect]:
        """Take every step that is possible by now."""
        if self.outcome is not None:
            return []
        if self._free_view is not None and self._free_view != self._agreement.view:
            self._free_view = None
        effects: list[Effect] = []
        if not self.head.stop:
            ready = self.readiness(now)
            if ready.ready and not self._view_time.running:
                self._view_time.start(now)
            if ready.ready and self._free_view is not None and self._planned_view < self._free_view:
                effects += self._make_plan(self._free_view, now)
            effects += self._reduce()
            effects += self._draft()
        effects += self._examine(now)
        if self._decided is not None and self._decided.body_hash in self._unsound:
            effects.append(Damaged("a majority voted for a body that this broker finds unsound"))
        if self._decided is not None and self._decided.body_hash in self._sound:
            self.outcome = Commit(self._sound[self._decided.body_hash], self._decided.votes)
        return effects

    # --- plan, reduce, draft -----------------------------------------------------------------------------------------

    def _make_plan(self, view: int, now: float) -> list[Effect]:
        owners = self.contributions.owners(self._live)
        counted = [one.counted for one in self.contributions.countable(self._live)]
        reduction = reduction_of(self.federation, self.head, counted)
        plan = PlanNotice(view, reduction, owners)
        self._planned_view = view
        effects: list[Effect] = []
        if missing := self.missing():
            effects.append(Say("not waited for", {"round": self.server_round, "clients": named(missing).strip(" ()")}))
        return [*effects, *self._to_all(plan), *self._on_plan(self._me, plan, now)]

    def _on_plan(self, node_id: str, plan: PlanNotice, now: float) -> list[Effect]:
        schema, roster = self.federation.schema, self.federation.roster
        if (
            node_id != self._agreement.proposer(plan.view)
            or plan.view < self._agreement.view
            or plan.reduction.parent != self.head.commit_hash
            or len(plan.owners) != len(schema.shards)
            or not all(0 <= owner < len(roster) for owner in plan.owners)
        ):
            return []
        self._plan = plan
        self._view_time.progress(now)
        return []

    def _reduce(self) -> list[Effect]:
        """Start the reductions of this broker's shards whose payloads are all here; fetch what is not."""
        plan = self._plan
        if plan is None or plan.view < self._agreement.view:
            return []
        tag = reduction_hash(plan.reduction)
        effects: list[Effect] = []
        for shard, owner in enumerate(plan.owners):
            if self.federation.roster[owner] != self._me or (tag, shard) in self._reducing:
                continue
            contributions = [self.contributions.get(one.manifest_hash) for one in plan.reduction.counted]
            known = [one for one in contributions if one is not None]
            if len(known) < len(contributions):
                continue
            missing = [one for one in known if not self._supply.has(one.shards[shard].hash, "spool")]
            for one in missing:
                donors = self.contributions.holders(one.manifest_hash, shard)
                effects += self._supply.want(
                    one.shards[shard], tuple(node for node in donors if node != self._me), "spool"
                )
            if not missing:
                self._reducing.add((tag, shard))
                effects.append(Reduce(plan.reduction, tag, shard, tuple(one.shards[shard] for one in known)))
        return effects

    def _on_shard_reduced(self, node_id: str, notice: ShardReduced) -> list[Effect]:
        shards = self.federation.schema.shards
        if (
            not 0 <= notice.shard < len(shards)
            or len(self._updates) > 64
            or len(self._expected_updates) > 4 * len(shards)
        ):
            return []
        if self._supply.has(notice.update.hash, "ledger"):
            self._updates.setdefault(notice.reduction_hash, {})[notice.shard] = notice.update.bare()
            return []
        expected = self._expected_updates.setdefault(notice.update.hash, [])
        expected.append((notice.reduction_hash, notice.shard, notice.update.bare()))
        return self._supply.want(notice.update, (node_id,), "ledger")

    def _draft(self) -> list[Effect]:
        """If this broker's own plan is reduced, draft the body and have its hashes computed."""
        plan = self._plan
        if plan is None or self._free_view is None or plan.view != self._free_view or self._drafting is not None:
            return []
        tag = reduction_hash(plan.reduction)
        updates = self._updates.get(tag, {})
        if len(updates) < len(self.federation.schema.shards):
            return []
        manifests = [self.contributions.get(one.manifest_hash) for one in plan.reduction.counted]
        evidence = evidence_for([one.signed for one in manifests if one is not None], self._evaluations.values())
        change = self.change
        roster = tuple(broker.node_id for broker in roster_with(self.head, change))
        live = tuple(node for node in roster if node in self._live)
        owners = balanced_owners(self.federation.schema, roster, live, self.server_round + 1)
        ordered = [updates[shard] for shard in range(len(updates))]
        try:
            body = draft(
                self.federation, self.head, plan.reduction, evidence, ordered, owners, self._date_reached, change
            )
        except RavnestError as error:
            self._free_view = None
            return [Say("no draft", {"round": self.server_round, "finding": str(error)}, warning=True)]
        self._drafting = body
        return [SaveBlob(evidence), Preview(body)]

    # --- examine, agree ----------------------------------------------------------------------------------------------

    def _examine(self, now: float) -> list[Effect]:
        """Gather what the bodies under consideration need, have them examined, and vote or propose."""
        effects: list[Effect] = []
        voted = self._agreement.voted_body
        if self._decided is not None and voted is not None and body_hash(voted) == self._decided.body_hash:
            ref = BlobRef.of(voted)
            self._supply.load(ref.hash, voted)
            self._gather(ref, (), effects)
        if self._considering is not None:
            view, ref, donors = self._considering
            raw = self._gather(ref, donors, effects)
            if raw is not None:
                self._considering = None
                effects += self._carry(self._agreement.examined(view, raw), now)
        if self._bound is not None:
            view, ref, donors = self._bound
            raw = self._gather(ref, donors, effects)
            known = self._supply.loaded(ref.hash)
            if raw is not None:
                self._bound = None
                effects += self._carry(self._agreement.propose(view, raw), now)
            elif known is not None and body_hash(known) in self._unsound:
                self._bound = None
                effects += self._carry(self._agreement.disown(ref.hash), now)
        return effects

    def _gather(self, ref: BlobRef, donors: tuple[str, ...], effects: list[Effect]) -> bytes | None:
        """The bytes of the body `ref` once it was found sound; until then, what is missing is asked for."""
        raw = self._supply.loaded(ref.hash)
        if raw is None:
            effects += self._supply.want(ref, donors, "memory")
            return None
        wanted = body_hash(raw)
        if wanted in self._sound:
            return raw
        if wanted in self._unsound or raw in self._examining:
            return None
        try:
            body = decode(Body, raw)
        except RemoteProtocolError:
            self._unsound.add(wanted)
            return None
        if len(body.updates) != len(self.federation.schema.shards):
            self._unsound.add(wanted)
            return None
        blobs = (body.evidence, *body.updates)
        missing = [blob for blob in blobs if not self._supply.has(blob.hash, "ledger")]
        everybody = (*donors, *sorted(self._live - {self._me, *donors}))
        for blob in missing:
            effects += self._supply.want(blob, everybody, "ledger")
        if not missing:
            self._examining.add(raw)
            effects.append(Examine(raw, None))
        return None

    def _carry(self, decided: Iterable[paxos.AgreementEffect], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for effect in decided:
            match effect:
                case paxos.ToPeer(node_id, message):
                    effects.append(SendPeer(node_id, message))
                case paxos.ToAll(message):
                    effects += self._to_all(message)
                case paxos.RecordPromise(view):
                    effects.append(SavePromise(self.server_round, view))
                case paxos.RecordVote(view, body):
                    effects.append(SaveVote(self.server_round, view, body))
                case paxos.Free(view):
                    self._free_view = view
                    if view > 0:
                        effects += self._to_all(InventoryRequest(self.server_round, view))
                case paxos.Bound(view, ref, donors):
                    self._bound = (view, ref, donors)
                    voted = self._agreement.voted_body
                    if voted is not None and blob_hash(voted) == ref.hash:
                        self._supply.load(ref.hash, voted)
                case paxos.Consider(view, ref, proposer):
                    self._considering = (view, ref, (proposer,))
                case paxos.Decided():
                    self._decided = effect
        return effects

    def _change_view(self, now: float) -> list[Effect]:
        view = self._agreement.view + 1
        while self._agreement.proposer(view) not in self._live:
            view += 1
        self._view_time.changed(now)
        said = Say("view changed", {"round": self.server_round, "view": view}, warning=True)
        return [said, *self._enter(view, now)]

    def _pass_over_the_dead(self, now: float) -> list[Effect]:
        if len(self._live) < self.federation.majority or now < self._patient_until:
            return []
        view = self._agreement.view
        while self._agreement.proposer(view) not in self._live:
            view += 1
        return self._enter(view, now) if view != self._agreement.view else []

    def _enter(self, view: int, now: float) -> list[Effect]:
        self._free_view = None
        self._bound = None
        effects = self._carry(self._agreement.enter(view), now)
        return effects + self._carry(self._agreement.ask_again(), now)

    # --- small things ------------------------------------------------------------------------------------------------

    def _accumulate(self, contribution: Contribution, shard: int) -> list[Effect]:
        self.contributions.hold(self._me, Holding(contribution.manifest_hash, (shard,)))
        effects: list[Effect] = []
        if contribution.home != self._me:
            effects += self._to_all(self._inventory((Holding(contribution.manifest_hash, (shard,)),)))
        scale, counted = self.head.scale_bits, contribution.counted
        if scale is not None and self.federation.schema.shards[shard].kind == "parameters":
            ref, weight = contribution.shards[shard], Weight(counted.weight, counted.share)
            effects.append(Accumulate(self.server_round, shard, scale, contribution.manifest_hash, ref, weight))
        return effects

    def _on_inventory(self, signed: Signed) -> list[Effect]:
        key = self.federation.public_key(signed.node_id)
        inventory = open_signed(Inventory, signed, key) if signed.node_id in self.federation.broker_by_id else None
        if inventory is not None and inventory.server_round == self.server_round:
            for holding in inventory.holdings:
                self.contributions.hold(signed.node_id, holding)
        return []

    def _inventory(self, holdings: tuple[Holding, ...]) -> InventoryNotice:
        inventory = Inventory(self.federation.fingerprint, self.server_round, holdings)
        return InventoryNotice(self.server_round, sign(self._identity, inventory))

    def _to_all(self, message: Message) -> list[Effect]:
        return [SendPeer(node, message) for node in self.federation.roster if node != self._me and node in self._live]

    def _sign(self, vote: Vote) -> Signed:
        return sign(self._identity, vote)

    def _open_vote(self, signed: Signed) -> Vote | None:
        vote = open_signed(Vote, signed, self.federation.public_key(signed.node_id))
        return vote if vote is not None and vote.federation == self.federation.fingerprint else None
