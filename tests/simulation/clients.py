"""A simulated client: the real session and replica; training is a random delta that takes its time."""

import random

import numpy as np

from clients import effects as fx
from clients import events as ev
from clients.residual import Standing
from clients.session import ClientSession
from ravnest_fed.blobs import MemoryBlobs
from ravnest_fed.checkpoints import read_checkpoint
from ravnest_fed.decree import check_votes, open_commit
from ravnest_fed.encoding import encode_delta
from ravnest_fed.errors import RavnestError
from ravnest_fed.facts import Body, Commit, WorkOrder, decode
from ravnest_fed.identity import Identity
from ravnest_fed.links import link_for
from ravnest_fed.messages import Message, Offer
from ravnest_fed.parameters import ModelState
from ravnest_fed.replica import Replica, updates_of
from ravnest_fed.slices import Slice
from tests.simulation.brokers import SimulatedBroker
from tests.simulation.world import World


class SimulatedClient:
    """One client. `cheats` makes it sign two different deltas for some rounds."""

    session_class = ClientSession

    def __init__(self, world: World, name: str, identity: Identity, cheats: bool = False) -> None:
        self.world = world
        self.name = name
        self.identity = identity
        self.cheats = cheats
        self.alive = False
        self.life = 0
        self.brokers: dict[str, SimulatedBroker] = {}
        self.lines: dict[str, str] = {}
        self.models: dict[int, bytes] = {}
        self.outbox = MemoryBlobs()
        self.kept = Standing(world.federation.fingerprint, identity.node_id)
        self._random = random.Random(world.random.random())

    # --- life and death ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start with the link and the contribution on disk: the rest of a client's memory does not survive."""
        world = self.world
        self.life += 1
        self.alive = True
        self.fetched = MemoryBlobs()
        self.replica: Replica | None = None
        self._commits: dict[int, tuple[Commit, Body]] = {}
        self._training = 0
        self._slice: Slice = ()
        self.session = self.session_class(
            link_for(world.federation, self.identity), self.identity, "", world.now, self.kept
        )
        # What brokers serve as federation file and initial model are mere names here; both are at hand.
        self.session.federation = world.federation
        world.note(self.name, "starts")
        self._later(0.1, self._tick)

    def crash(self) -> None:
        """Vanish."""
        if self.alive:
            self.world.note(self.name, "vanishes")
            self.alive = False
            self.lines.clear()

    def _tick(self) -> None:
        self.handle(ev.Tick())
        self._later(0.3, self._tick)

    def _later(self, seconds: float, action) -> None:  # type: ignore[no-untyped-def]
        life = self.life
        self.world.after(seconds, lambda: action() if self.alive and self.life == life else None)

    # --- the network -------------------------------------------------------------------------------------------------

    def line_up(self, broker: str, session: str) -> None:
        """A connection to a broker stands."""
        self.lines[broker] = session
        self.handle(ev.Line(broker, "up"))

    def line_down(self, broker: str) -> None:
        """A connection is lost."""
        if self.lines.pop(broker, None) is not None:
            self.handle(ev.Line(broker, "down"))

    def receive(self, broker: str, message: Message) -> None:
        """A broker's message."""
        if self.alive:
            self.handle(ev.FromBroker(broker, message))

    def handle(self, event: ev.Event) -> None:
        """Feed the session."""
        if self.alive:
            for effect in self.session.handle(event, self.world.now):
                self._carry(effect)

    def _carry(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Send(broker, message):
                self._send(broker, message)
            case fx.Fetch(ref, broker, also):
                self._later(self.world.latency() * 2, lambda: self._fetch(ref, (broker, *also)))
            case fx.ReadFederation():
                self._later(0.001, lambda: self.handle(ev.FederationRead(self.world.federation)))
            case fx.Prepare():
                self._later(0.01, self._prepare)
            case fx.OpenCommit(ref):
                self._later(0.001, lambda: self._open(ref.hash))
            case fx.Fold(server_round):
                self._later(0.002, lambda: self._fold(server_round))
            case fx.TakeUp(server_round, ref):
                self._later(0.002, lambda: self._take_up(server_round, ref.hash))
            case fx.Evaluate(server_round):
                self._later(0.002, lambda: self.handle(ev.Evaluated(server_round, {"loss": 1.0}, 10)))
            case fx.Train(order, slice):
                self._training += 1
                self._slice = slice
                number = self._training
                self._later(0.3 + 2.0 * self._random.random(), lambda: self._trained(order, number))
            case fx.Encode(order):
                self._later(0.01, lambda: self.handle(self._result(order)))
            case fx.AbandonTraining():
                self._training += 1
            case fx.Keep(offer, residual):
                self.kept = self.kept.keep(offer, residual)
            case fx.Forget(counted):
                self.kept = self.kept.forget(counted)
            case fx.Tell(event, fields):
                self.world.note(self.name, f"{event} {fields}")
            case fx.End(reason, error):
                self.world.note(self.name, f"ends: {reason} {error or ''}")
                self.crash()
                # Its owner tries again.
                self.world.after(3.0, lambda: None if self.alive else self.start())

    def _send(self, broker: str, message: Message) -> None:
        session = self.lines.get(broker)
        if session is None:
            return
        target, key = self.brokers[broker], self.identity.curve_public.hex()
        self.world.send(self.name, broker, lambda: target.handle(ev_from_client(session, key, message)))
        if isinstance(message, Offer) and self.cheats and self._random.random() < 0.5:
            self._cheat(message)

    def _fetch(self, ref, donors: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
        data = ref.inline or None
        for broker in donors:
            reachable = self.world.linked(self.name, broker) and self.world.linked(broker, self.name)
            data = data or (self.brokers[broker].serve(ref.hash) if reachable else None)
        if ref.length and data is None:
            self.handle(ev.Missed(ref.hash))
            return
        self.fetched.put(data or b"")
        self.handle(ev.Fetched(ref.hash))

    # --- the model ---------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        initial = self.world.initial
        self.replica = Replica(self.world.federation, ModelState(initial.vector.copy(), initial.counters.copy()))
        self.handle(ev.Prepared(self.replica.head))

    def _open(self, blob: bytes) -> None:
        try:
            commit = open_commit(self.fetched.read(blob))
            check_votes(self.world.federation, commit)
            body = decode(Body, commit.body)
        except RavnestError as error:
            self.handle(ev.CommitRefused(str(error)))
            return
        self._commits = {body.server_round: (commit, body)}
        self.handle(ev.CommitOpened(body.server_round, body.updates))

    def _fold(self, server_round: int) -> None:
        assert self.replica is not None
        commit, body = self._commits.pop(server_round)
        self.replica.fold(body, commit.body, updates_of(body, self.fetched))
        self.models[server_round] = self.replica.head.model_hash
        self.handle(ev.Folded(self.replica.head))

    def _take_up(self, server_round: int, blob: bytes) -> None:
        assert self.replica is not None
        commit, _ = self._commits.pop(server_round)
        try:
            self.replica.take(read_checkpoint(self.fetched.view(blob), self.world.federation, commit.body))
        except RavnestError as error:
            self.handle(ev.CommitRefused(str(error)))
            return
        self.models[server_round] = self.replica.head.model_hash
        self.handle(ev.Folded(self.replica.head))

    def _trained(self, order: WorkOrder, number: int) -> None:
        if number != self._training:
            return
        if self._random.random() < 0.02:
            self.handle(ev.TrainingFailed(order.base_round, RavnestError("the loss is not finite")))
            return
        if self.world.federation.rounds.max_staleness and self.kept.offer is not None:
            self.handle(ev.Finished(order.base_round))
            return
        self.handle(self._result(order))

    def _result(self, order: WorkOrder) -> ev.Trained:
        schema = self.world.federation.schema
        delta = ModelState.zeros(schema)
        seed = self._random.getrandbits(32)
        delta.vector[: schema.parameter_count] = np.random.default_rng(seed).standard_normal(
            schema.parameter_count, np.float32
        )
        done = order.local_steps
        if self._slice:
            # A client may end its round early; what it did not train on is dealt again.
            done = self._random.randint(1, done)
        steps = self.world.federation.steps_counted(done)
        encoded = encode_delta(schema, order.codec, delta, steps=steps)
        return ev.Trained(
            order.base_round,
            tuple(self.outbox.put(payload) for payload in encoded.payloads),
            encoded.norm,
            encoded.max_abs,
            order.micro_batch * order.accumulation * done,
            done,
            {"loss": 1.0},
            1.0,
        )

    def _cheat(self, honest: Offer) -> None:
        """Sign another delta under the same sequence and offer it elsewhere."""
        import msgspec

        from ravnest_fed.facts import Manifest, sign
        from ravnest_fed.hashing import merkle_root

        manifest = decode(Manifest, honest.manifest.payload)
        other = self._result(decode(WorkOrder, manifest.order.payload))
        forged = msgspec.structs.replace(
            manifest,
            payload_root=merkle_root("payload", [ref.hash for ref in other.shards]),
            norm=other.norm,
            max_abs=other.max_abs,
        )
        if manifest.slice and self._random.random() < 0.5:
            # In the place of its own samples, others'.
            forged = msgspec.structs.replace(forged, slice=((0, manifest.num_examples),))
        offer = Offer(sign(self.identity, forged), other.shards)
        broker = self._random.choice(sorted(self.brokers))
        if self.lines.get(broker):
            self.world.note(self.name, f"cheats at {broker}")
            session, key = self.lines[broker], self.identity.curve_public.hex()
            target = self.brokers[broker]
            self.world.send(self.name, broker, lambda: target.handle(ev_from_client(session, key, offer)))


def ev_from_client(session: str, key: str, message: Message):  # type: ignore[no-untyped-def]
    """The broker's event for a client's message."""
    from brokers.events import FromClient

    return FromClient(session, key, message)
