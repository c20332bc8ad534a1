"""Brokers joined in memory: their real cores and workbenches, with messages on a list instead of sockets.

`deliver` lets the network run until it is silent; with a seed, messages arrive in a random order that the seed gives.
Time stands still unless `pass_time` moves it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from brokers import effects as fx
from brokers import events as ev
from brokers.consolidation import Consolidation
from brokers.core import BrokerCore
from brokers.pace import Pace
from brokers.workbench import Workbench
from ravnest_fed.blobs import MemoryBlobs
from ravnest_fed.encoding import encode_delta
from ravnest_fed.facts import BlobRef, Commit, Manifest, WorkOrder, decode, encode, sign
from ravnest_fed.federation import Federation, from_tables
from ravnest_fed.framing import pack
from ravnest_fed.hashing import merkle_root
from ravnest_fed.head import Head
from ravnest_fed.identity import Identity, Signed
from ravnest_fed.ledger import Admitted, VoteRecord
from ravnest_fed.messages import (
    PROTOCOL_VERSION,
    CommitNotice,
    Hello,
    Message,
    Offer,
    OrderNotice,
    Ready,
    ReceiptNotice,
    Refused,
)
from ravnest_fed.parameters import BLOCK, ModelState, Schema
from ravnest_fed.replica import Replica, model_hash


def identity(name: str) -> Identity:
    """The same keys for the same name, in every run."""
    return Identity(name.encode().ljust(32, b"."))


def federation_of(
    brokers: int,
    clients: int,
    values: int = 3 * BLOCK,
    shard_size: int = BLOCK,
    schema: Schema | None = None,
    small: bool = False,
    **settings: dict[str, object],
) -> tuple[Federation, ModelState]:
    """A federation and its initial state; `settings` by table.

    Without a `schema` of its own it has `values` parameters and, unless it is `small`, a buffer and a counter.
    """
    default = {
        "parameters": [["weight", [values], "float32"]],
        "buffers": [] if small else [["norm.running_var", [5], "float32", 0.0]],
        "counters": [] if small else [["norm.num_batches_tracked", [1], "int64"]],
        "frozen_hash": "",
        "shard_size": shard_size,
    }
    tables: dict[str, object] = {
        "federation": {
            "format": 1,
            "name": "joined",
            "created": "",
            "seed": 0,
            "recipe": "none",
            "recipe_hash": "",
            "model_hash": "",
            **settings.pop("federation", {}),
        },
        "operator": keys_of(identity("operator")),
        "brokers": [
            {"name": f"b{n}", **keys_of(identity(f"b{n}")), "client_address": "", "peer_address": ""}
            for n in range(1, brokers + 1)
        ],
        "members": [{"name": f"c{n}", **keys_of(identity(f"c{n}"))} for n in range(1, clients + 1)],
        "schema": msgspec.to_builtins(schema) if schema else default,
        **settings,
    }
    federation = from_tables(tables, "the test")
    state = ModelState.zeros(federation.schema)
    if schema:
        return federation, state
    state.vector[:values] = np.random.default_rng(7).standard_normal(values, np.float32)
    state.vector[federation.schema.parameter_stop :][:5] = 1.0
    return federation, state


def keys_of(one: Identity) -> dict[str, str]:
    return {"public_key": one.public_key.hex(), "curve_key": one.curve_public.hex()}


@dataclass
class Disk:
    """What survives a broker's restart."""

    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    spool: MemoryBlobs = field(default_factory=MemoryBlobs)
    commits: dict[int, Commit] = field(default_factory=dict)
    promises: dict[int, int] = field(default_factory=dict)
    votes: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    admitted: dict[bytes, tuple[int, Admitted]] = field(default_factory=dict)
    equivocations: list[str] = field(default_factory=list)

    def record(self, server_round: int) -> VoteRecord:
        view, body = self.votes.get(server_round, (-1, None))
        return VoteRecord(max(view, self.promises.get(server_round, 0)), view, body)


class JoinedBroker:
    """One broker of the joined federation."""

    def __init__(self, joined: "Joined", name: str) -> None:
        self.joined = joined
        self.name = name
        self.identity = identity(name)
        self.disk = Disk()
        self.alive = False
        self.said: list[str] = []
        self.abandoned: list[tuple[int, str]] = []

    def start(self) -> None:
        federation, initial = self.joined.federation, self.joined.initial
        self.replica = Replica(federation, ModelState(initial.vector.copy(), initial.counters.copy()))
        for server_round in sorted(self.disk.commits):
            self._fold(self.disk.commits[server_round])
        self.bench = Workbench(self.replica, self.disk.blobs, self.disk.spool)
        self.memory = MemoryBlobs()
        head = self.replica.head
        oldest = head.server_round - federation.rounds.max_staleness
        kept = [one for base, one in self.disk.admitted.values() if base >= oldest]
        nothing = BlobRef.of(b"")
        self.core = BrokerCore(
            federation,
            self.identity,
            head,
            self.disk.record(head.server_round + 1),
            kept,
            [],
            {},
            (nothing, nothing),
            Consolidation(federation.checkpoints, [], {}),
            Pace(federation.rounds),
            self.joined.now,
        )
        self.alive = True
        self.carry(self.core.start(self.joined.now))

    def handle(self, event: ev.Event) -> None:
        if self.alive:
            self.carry(self.core.handle(event, self.joined.now))

    def carry(self, effects: list[fx.Effect]) -> None:
        for effect in effects:
            self._carry(effect)

    def _carry(self, effect: fx.Effect) -> None:
        joined = self.joined
        match effect:
            case fx.SendPeer(node_id, message):
                joined.send(self.identity.node_id, node_id, message)
            case fx.SendClient(session, message):
                joined.to_client.append((self.name, session, message))
                if session in joined.clients:
                    joined.clients[session].receive(self, message)
            case fx.SendCommits(to, peer, after):
                for server_round in range(after + 1, self.core.head.server_round + 1):
                    record = pack(encode(self.disk.commits[server_round]))
                    self.memory.put(record)
                    notice = CommitNotice(server_round, BlobRef.of(record))
                    if peer:
                        joined.send(self.identity.node_id, to, notice)
                    elif to in joined.clients:
                        joined.clients[to].receive(self, notice)
            case fx.Fetch():
                joined.post(self, lambda: self._fetch(effect))
            case fx.Abandon(into):
                self.abandoned.append((max(self.disk.commits), into))
            case fx.Cache(blob):
                self.memory.put(blob)
            case fx.SaveBlob(blob):
                self.disk.blobs.put(blob)
            case fx.SavePromise(server_round, view):
                self.disk.promises[server_round] = view
            case fx.SaveVote(server_round, view, body):
                self.disk.votes[server_round] = (view, body)
            case fx.SaveContribution(manifest, opened, shards):
                self.disk.admitted[opened.payload_root] = (opened.base_round, Admitted(manifest, shards))
            case fx.SaveEquivocation(client=client):
                self.disk.equivocations.append(client)
            case fx.SaveCommit(commit, body):
                self.disk.commits[body.server_round] = commit
            case fx.Fold(commit):
                self._fold(commit)
            case fx.Say(event, fields):
                self.said.append(f"{event}: {fields}")
            case fx.Accumulate():
                self.bench.accumulate(effect)
            case fx.Inspect():
                joined.post(self, lambda: self.handle(self.bench.inspect(effect)))
            case fx.Reduce():
                joined.post(self, lambda: self._reduced(effect))
            case fx.Preview():
                joined.post(self, lambda: self.handle(self.bench.preview(effect)))
            case fx.Examine():
                joined.post(self, lambda: self.handle(self.bench.examine(effect)))

    def _reduced(self, effect: fx.Reduce) -> None:
        event = self.bench.reduce(effect)
        if event is not None:
            self.handle(event)

    def _fold(self, commit: Commit) -> None:
        from ravnest_fed.facts import Body
        from ravnest_fed.replica import updates_of

        body = decode(Body, commit.body)
        self.replica.fold(body, commit.body, updates_of(body, self.disk.blobs))

    def _fetch(self, effect: fx.Fetch) -> None:
        store = {"ledger": self.disk.blobs, "spool": self.disk.spool, "memory": self.memory}[effect.into]
        if not store.has(effect.ref.hash):
            data = effect.ref.inline or self._from_donors(effect)
            if data is None:
                self.handle(ev.Missed(effect.ref.hash, effect.into, ()))
                return
            store.put(data)
        data = store.read(effect.ref.hash) if effect.into == "memory" else None
        self.handle(ev.Fetched(effect.ref.hash, effect.into, data))

    def _from_donors(self, effect: fx.Fetch) -> bytes | None:
        for donor in effect.donors:
            client = self.joined.clients.get(donor)
            broker = self.joined.by_id.get(donor)
            stores: list[MemoryBlobs] = [client.outbox] if client else []
            if broker is not None and broker.alive and self.joined.linked(self.identity.node_id, donor):
                stores = [broker.disk.blobs, broker.disk.spool, broker.memory]
            for store in stores:
                if store.has(effect.ref.hash):
                    return store.read(effect.ref.hash)
        return None


class JoinedClient:
    """A client that sends the delta it is told to send. Its session is called by its name."""

    def __init__(self, joined: "Joined", name: str) -> None:
        self.joined = joined
        self.name = name
        self.identity = identity(name)
        self.outbox = MemoryBlobs()
        self.order: Signed | None = None
        self.received: list[Message] = []
        self.sequence = 0

    def join(self, broker: str) -> None:
        """Greet a broker as a client that holds the newest model, and get its order."""
        fingerprint = self.joined.federation.fingerprint
        core = self.joined.brokers[broker].core
        hello = Hello(PROTOCOL_VERSION, fingerprint, self.identity.node_id, "", core.head.server_round)
        self.say(broker, hello)
        self.say(broker, Ready(core.head.server_round))

    def say(self, broker: str, message: Message) -> None:
        key = self.identity.curve_public.hex()
        self.joined.brokers[broker].handle(ev.FromClient(self.name, key, message))

    def receive(self, broker: JoinedBroker, message: Message) -> None:
        self.received.append(message)
        if isinstance(message, OrderNotice):
            self.order = message.order

    def offer(self, delta: np.ndarray, **changes: object) -> Offer:
        """An offer of `delta` (the parameters' part) for the order at hand; `changes` overwrite the manifest."""
        assert self.order is not None
        federation = self.joined.federation
        order = decode(WorkOrder, self.order.payload)
        state = ModelState.zeros(federation.schema)
        state.vector[: delta.size] = delta
        state.vector[federation.schema.parameter_stop :] = 0.125
        state.counters[:] = order.local_steps
        return self.offer_state(state, **changes)

    def offer_state(self, state: ModelState, **changes: object) -> Offer:
        """An offer of a delta with its buffers and counters, as `offer` makes it."""
        assert self.order is not None
        federation = self.joined.federation
        order = decode(WorkOrder, self.order.payload)
        steps = federation.steps_counted(int(changes.get("local_steps", order.local_steps)))  # type: ignore[call-overload]
        encoded = encode_delta(federation.schema, order.codec, state, steps=steps)
        refs = [self.outbox.put(payload) for payload in encoded.payloads]
        self.sequence += 1
        fields: dict[str, object] = {
            "federation": federation.fingerprint,
            "client": self.identity.node_id,
            "sequence": self.sequence,
            "base_round": order.base_round,
            "base_hash": order.base_hash,
            "last_round": order.base_round + 1 + federation.rounds.max_staleness,
            "codec": order.codec,
            "payload_root": merkle_root("payload", [ref.hash for ref in refs]),
            "shard_count": len(refs),
            "num_examples": order.max_examples // 2 + len(self.name) + int(self.name[1:]),
            "local_steps": order.local_steps,
            "norm": encoded.norm,
            "max_abs": encoded.max_abs,
            "metrics": {"loss": 1.0},
            "training_seconds": 1.0,
            "order": self.order,
        }
        manifest = Manifest(**(fields | changes))  # type: ignore[arg-type]
        return Offer(sign(self.identity, manifest), tuple(refs))

    def contribute(self, broker: str, scale: float = 0.01, **changes: object) -> None:
        """Offer a delta that the client's name and the round give."""
        assert self.order is not None
        base = decode(WorkOrder, self.order.payload).base_round
        generator = np.random.default_rng([int(self.name[1:]), base])
        delta = generator.standard_normal(self.joined.federation.schema.parameter_stop, np.float32) * np.float32(scale)
        self.say(broker, self.offer(delta, **changes))

    def refusals(self) -> list[str]:
        """The reasons for which it was refused so far."""
        return [message.reason for message in self.received if isinstance(message, Refused)]

    def receipts(self) -> int:
        """How many receipts it got."""
        return sum(isinstance(message, ReceiptNotice) for message in self.received)


class Joined:
    """All nodes of a federation in one memory."""

    def __init__(self, federation: Federation, initial: ModelState, seed: int | None = None) -> None:
        self.federation = federation
        self.initial = initial
        self.now = 0.0
        self.random = random.Random(seed) if seed is not None else None
        self.brokers = {broker.name: JoinedBroker(self, broker.name) for broker in federation.brokers}
        self.by_id = {broker.identity.node_id: broker for broker in self.brokers.values()}
        self.clients = {member.name: JoinedClient(self, member.name) for member in federation.members}
        self.to_client: list[tuple[str, str, Message]] = []
        self.cut: set[frozenset[str]] = set()
        self.dropping: Callable[[str, str, Message], bool] = lambda source, target, message: False
        self._waiting: list[Callable[[], None]] = []

    @classmethod
    def started(cls, brokers: int, clients: int, seed: int | None = None, **settings: object) -> "Joined":
        """All brokers up and linked, every client joined to one of them in turn."""
        federation, initial = federation_of(brokers, clients, **settings)  # type: ignore[arg-type]
        joined = cls(federation, initial, seed)
        joined.start_brokers()
        joined.join_clients()
        return joined

    def start_brokers(self) -> None:
        for broker in self.brokers.values():
            broker.start()
        for broker in self.brokers.values():
            for other in self.brokers.values():
                if other is not broker:
                    broker.handle(ev.PeerUp(other.identity.node_id))
        self.deliver()

    def join_clients(self) -> None:
        names = [name for name, broker in self.brokers.items() if broker.alive]
        for number, client in enumerate(self.clients.values()):
            client.join(names[number % len(names)])
        self.deliver()

    def home_of(self, client: str) -> str:
        """The broker that a client is joined to, as `join_clients` chose."""
        names = [name for name, broker in self.brokers.items() if broker.alive]
        return names[list(self.clients).index(client) % len(names)]

    def contribute(self, *clients: str) -> None:
        """Let these clients (all by default) contribute to the open round, and the network run."""
        for name in clients or tuple(self.clients):
            self.clients[name].contribute(self.home_of(name))
        self.deliver()

    def linked(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self.cut

    def send(self, source: str, target: str, message: Message) -> None:
        if self.linked(source, target) and not self.dropping(source, target, message):
            broker = self.by_id[target]
            self.post(broker, lambda: broker.handle(ev.FromPeer(source, message)))

    def post(self, broker: JoinedBroker, action: Callable[[], None]) -> None:
        self._waiting.append(lambda: action() if broker.alive else None)

    def deliver(self) -> None:
        """Let everything that waits happen, in order, or in an order that the seed gives."""
        while self._waiting:
            position = self.random.randrange(len(self._waiting)) if self.random else 0
            self._waiting.pop(position)()

    def pass_time(self, seconds: float, step: float = 0.5) -> None:
        """Move the clock on in steps, with a tick for every broker at each."""
        end = self.now + seconds
        while self.now < end:
            self.now += step
            for broker in self.brokers.values():
                broker.handle(ev.Tick(self.now))
            self.deliver()

    def kill(self, name: str) -> None:
        """A broker dies; the others see its connection close."""
        self.brokers[name].alive = False
        for other in self.brokers.values():
            other.handle(ev.PeerDown(self.brokers[name].identity.node_id))
        self.deliver()

    def restart(self, name: str) -> None:
        """A dead broker comes back from its disk."""
        broker = self.brokers[name]
        broker.start()
        for other in self.brokers.values():
            if other is not broker and other.alive:
                other.handle(ev.PeerUp(broker.identity.node_id))
                broker.handle(ev.PeerUp(other.identity.node_id))
        self.deliver()

    def heads(self) -> dict[str, Head]:
        """The heads of the living brokers."""
        return {name: broker.core.head for name, broker in self.brokers.items() if broker.alive}

    def rounds(self) -> set[int]:
        """The rounds that living brokers stand at."""
        return {head.server_round for head in self.heads().values()}

    def model_hashes(self) -> set[bytes]:
        """The hashes of the models that living brokers really hold."""
        return {
            model_hash(self.federation.schema, broker.replica.state) for broker in self.brokers.values() if broker.alive
        }
