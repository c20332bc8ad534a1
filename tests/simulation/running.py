"""One whole run: a federation under its faults, then in peace, until it has committed more rounds."""

import random
from dataclasses import dataclass, field

from brokers import events as ev
from ravnest_fed.errors import RavnestError
from tests.joined import federation_of, identity
from tests.simulation.brokers import Disk, SimulatedBroker
from tests.simulation.clients import SimulatedClient
from tests.simulation.faults import FAULTY_SECONDS, Fault, draw
from tests.simulation.invariants import InvariantBroken, Invariants
from tests.simulation.world import Weather, World

PEACE_SECONDS = 400.0
ROUNDS_IN_PEACE = 3
LINK_SECONDS = 0.4
SILENCE_SECONDS = 3.0
_FEDERATIONS: dict[tuple[int, int, tuple[int, int]], object] = {}


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the rounds committed, and what broke, if anything did."""

    seed: int
    rounds: int
    finding: str
    trace: tuple[str, ...] = ()


@dataclass
class Run:
    """The nodes of one run and the connections between them."""

    seed: int
    traced: bool = False
    broker_class: type[SimulatedBroker] = SimulatedBroker
    client_class: type[SimulatedClient] = SimulatedClient
    lost: set[str] = field(default_factory=set)
    flipped: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        source = random.Random(self.seed)
        size = source.choice([(3, 3), (3, 4), (3, 2), (1, 2), (5, 3), (2, 2)])
        federation, initial = _federation(*size, source.choice([(0, 1), (1, 1), (2, 1), (3, 2)]))
        self.world = World(federation, initial, source, trace=[] if self.traced else None)
        self.invariants = Invariants(federation)
        names = [broker.name for broker in federation.brokers]
        clients = [member.name for member in federation.members]
        self.plan = draw(source, names, clients)
        self.world.weather = self.plan.weather
        self.brokers = {name: self.broker_class(self.world, self.invariants, name, identity(name)) for name in names}
        self.clients = {
            name: self.client_class(self.world, name, identity(name), name in self.plan.cheaters) for name in clients
        }
        self.invariants.brokers = list(self.brokers.values())
        self._sessions: dict[str, tuple[SimulatedClient, str]] = {}
        self._numbers = 0
        for broker in self.brokers.values():
            broker.others = {one.identity.node_id: one for one in self.brokers.values() if one is not broker}
            broker.deliver_to_client = lambda session, message, name=broker.name: self._to_client(
                name, session, message
            )  # type: ignore[misc]
            broker.client_blobs = self._client_blob  # type: ignore[assignment]
        for client in self.clients.values():
            client.brokers = self.brokers

    def go(self) -> Outcome:
        """Run it."""
        world = self.world
        try:
            for broker in self.brokers.values():
                broker.start()
            for client in self.clients.values():
                client.start()
            for one in self.brokers.values():
                for other in self.brokers.values():
                    if one is not other:
                        self._watch(one, other)
                for client in self.clients.values():
                    self._watch_client(client, one)
            for fault in self.plan.faults:
                world.after(fault.at, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
            world.run(FAULTY_SECONDS, lambda: False)
            self._make_peace()
            goal = max(self.invariants.bodies, default=0) + ROUNDS_IN_PEACE
            began = world.now
            world.run(began + PEACE_SECONDS, lambda: self._reached(goal))
            if not self._reached(goal):
                heads = {name: broker.core.head.server_round for name, broker in self.brokers.items() if broker.alive}
                raise InvariantBroken(f"no round {goal} within {PEACE_SECONDS} s of peace: {heads}")
            finding = ""
        except (InvariantBroken, RavnestError, AssertionError) as error:
            finding = f"{type(error).__name__}: {error}"
        return Outcome(self.seed, max(self.invariants.bodies, default=0), finding, tuple(world.trace or ()))

    def _reached(self, goal: int) -> bool:
        level = [broker for broker in self.brokers.values() if broker.name not in self.lost]
        if not all(broker.alive and broker.replica.head.server_round >= goal for broker in level):
            return False
        for client in self.clients.values():
            for server_round, model in client.models.items():
                if self.invariants.models.setdefault(server_round, model) != model:
                    raise InvariantBroken(f"{client.name} folded another model at round {server_round}")
        return True

    def _make_peace(self) -> None:
        self.world.note("", "peace")
        self.world.weather = Weather()
        self.world.cut.clear()
        for broker in self.brokers.values():
            broker.save_seconds = 0.002
            broker.armed = 0.0
            if broker.name in self.flipped:
                broker.crash(torn=True)
            if not broker.alive and broker.name not in self.lost:
                broker.start()
        for client in self.clients.values():
            if not client.alive:
                client.start()

    # --- connections -------------------------------------------------------------------------------------------------

    def _watch(self, one: SimulatedBroker, other: SimulatedBroker) -> None:
        """Bring the connection from `one` to `other` up and down as their lives and the network have it."""
        state = {"life": (0, 0), "up": False, "broken": 0.0}

        def look() -> None:
            alive = one.alive and other.alive
            whole = alive and self._both_ways(one.name, other.name)
            life = (one.life, other.life)
            if state["up"] and (life != state["life"] or not alive):
                state["up"] = False
                one.peers_up.discard(other.name)
                one.handle(ev.PeerDown(other.identity.node_id))
            elif state["up"] and not whole:
                state["broken"] += LINK_SECONDS
                if state["broken"] > SILENCE_SECONDS:
                    state["up"] = False
                    one.peers_up.discard(other.name)
                    one.handle(ev.PeerDown(other.identity.node_id))
            elif state["up"]:
                state["broken"] = 0.0
            elif whole:
                state.update(up=True, life=life, broken=0.0)
                one.peers_up.add(other.name)
                one.handle(ev.PeerUp(other.identity.node_id))
            self.world.after(LINK_SECONDS * (0.75 + self.world.random.random() / 2), look)

        self.world.after(self.world.random.random() / 10, look)

    def _watch_client(self, client: SimulatedClient, broker: SimulatedBroker) -> None:
        state = {"life": (0, 0), "session": "", "broken": 0.0}

        def down() -> None:
            session, state["session"] = state["session"], ""
            self._sessions.pop(session, None)
            broker.handle(ev.SessionLost(session))
            client.line_down(broker.name)

        def look() -> None:
            alive = client.alive and broker.alive
            whole = alive and self._both_ways(client.name, broker.name)
            life = (client.life, broker.life)
            if state["session"] and (life != state["life"] or not alive):
                down()
            elif state["session"] and not whole:
                state["broken"] += LINK_SECONDS
                if state["broken"] > SILENCE_SECONDS:
                    down()
            elif state["session"]:
                state["broken"] = 0.0
            elif whole:
                self._numbers += 1
                session = f"{client.name}/{self._numbers}"
                state.update(session=session, life=life, broken=0.0)
                self._sessions[session] = (client, broker.name)
                client.line_up(broker.name, session)
            self.world.after(LINK_SECONDS * (0.75 + self.world.random.random() / 2), look)

        self.world.after(self.world.random.random() / 10, look)

    def _both_ways(self, one: str, other: str) -> bool:
        return self.world.linked(one, other) and self.world.linked(other, one)

    def _to_client(self, broker: str, session: str, message: object) -> None:
        known = self._sessions.get(session)
        if known is not None:
            client = known[0]
            self.world.send(broker, client.name, lambda: client.receive(broker, message))  # type: ignore[arg-type]

    def _client_blob(self, session: str, blob: bytes) -> bytes | None:
        known = self._sessions.get(session)
        if known is None or not known[0].alive or not self._both_ways(known[0].name, known[1]):
            return None
        return known[0].outbox.read(blob) if known[0].outbox.has(blob) else None

    # --- faults ------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        world = self.world
        world.note("", f"fault: {fault.kind} {fault.node} {fault.other if fault.other != fault.node else ''}")
        names = list(self.brokers) + list(self.clients)
        match fault.kind:
            case "crash":
                self.brokers[fault.node].crash(torn=world.random.random() < 0.5)
                world.after(fault.seconds, lambda: self._revive(fault.node))
            case "crash-at-commit":
                self.brokers[fault.node].armed = fault.seconds
            case "vanish":
                client = self.clients[fault.node]
                client.crash()
                world.after(fault.seconds, lambda: None if client.alive else client.start())
            case "partition":
                side = set(world.random.sample(names, world.random.randint(1, len(names) - 1)))
                pairs = {(a, b) for a in names for b in names if (a in side) != (b in side)}
                self._cut(pairs, fault.seconds)
            case "one-way":
                self._cut({(fault.node, name) for name in names if world.random.random() < 0.5}, fault.seconds)
            case "jump":
                self.brokers[fault.node].skew += fault.seconds * 5
            case "slow-disk":
                broker = self.brokers[fault.node]
                broker.save_seconds = 0.3
                world.after(fault.seconds, lambda: setattr(broker, "save_seconds", 0.002))
            case "flip":
                # A broker that miscounts is not a crash: a minority of such is found out, more are not tolerated.
                if self.brokers[fault.node].alive and self._spared() and not self.flipped:
                    self.flipped.add(fault.node)
                    self.brokers[fault.node].replica.state.vector.view("uint32")[7] ^= 1 << 18
            case "lose-disk":
                if self._spared():
                    self.lost.add(fault.node)
                    self.brokers[fault.node].crash(torn=True)
                    self.brokers[fault.node].disk = Disk()
                    self.brokers[fault.node].disk_lost = True
                    self.invariants.nothing_is_gone()

    def _spared(self) -> bool:
        """Whether one more broker may go bad for good: only a minority does."""
        return len(self.lost | self.flipped) + 1 <= (len(self.brokers) - 1) // 2

    def _revive(self, name: str) -> None:
        broker = self.brokers[name]
        if not broker.alive and name not in self.lost:
            broker.start()

    def _cut(self, pairs: set[tuple[str, str]], seconds: float) -> None:
        self.world.cut |= pairs
        self.world.after(seconds, lambda: self.world.cut.difference_update(pairs))


def _federation(brokers: int, clients: int, checkpoints: tuple[int, int]):  # type: ignore[no-untyped-def]
    key = (brokers, clients, checkpoints)
    if key not in _FEDERATIONS:
        every, keep = checkpoints
        # Both ways of waiting for the rest are in use.
        rounds = {
            "grace_seconds": 3.0 if keep == 1 else 0.0,
            "max_grace_seconds": 5.0,
            "min_contributions": min(2, clients),
        }
        if keep == 2:
            # Late contributions count, in rounds that wait for everybody and in rounds that wait for nobody.
            rounds["max_staleness"] = 3
            if clients == 3:
                rounds |= {"mode": "asynchronous", "target_contributions": 2}
        schema = {"brokers": brokers, "clients": clients, "values": 2 * 4096, "rounds": rounds}
        if every < 2 or clients == 3:
            schema["data"] = {"samples": 1000}
        schema["checkpoints"] = {"checkpoint_every": every, "keep": keep}
        _FEDERATIONS[key] = federation_of(**schema, small=True)  # type: ignore[arg-type]
    return _FEDERATIONS[key]
