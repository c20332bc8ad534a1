"""A simulated broker: the real core and workbench, with a disk that may lose what was not yet durable."""

from collections import deque
from dataclasses import dataclass, field

from brokers import effects as fx
from brokers import events as ev
from brokers.consolidation import Consolidation, update_bytes
from brokers.core import BrokerCore
from brokers.pace import Pace
from brokers.workbench import Workbench
from ravnest_fed.blobs import MemoryBlobs
from ravnest_fed.checkpoints import read_checkpoint
from ravnest_fed.errors import LedgerError
from ravnest_fed.facts import BlobRef, Body, Commit, decode, encode, signed_hash
from ravnest_fed.federation import Federation
from ravnest_fed.framing import pack
from ravnest_fed.identity import Identity, Signed
from ravnest_fed.ledger import Admitted, VoteRecord
from ravnest_fed.messages import CheckpointNotice, CommitNotice, Message, VoteNotice
from ravnest_fed.parameters import ModelState
from ravnest_fed.replica import Replica, updates_of
from tests.simulation.invariants import Invariants
from tests.simulation.world import World

DURABLE = (
    fx.SaveBlob,
    fx.SavePromise,
    fx.SaveVote,
    fx.SaveContribution,
    fx.SaveEquivocation,
    fx.SaveEvaluation,
    fx.SaveCommit,
    fx.SaveCheckpoint,
    fx.SaveAdopted,
)
WELCOME = (BlobRef.of(b"federation file"), BlobRef.of(b"initial model"))


@dataclass
class Disk:
    """What survives a crash."""

    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    spool: MemoryBlobs = field(default_factory=MemoryBlobs)
    commits: dict[int, Commit] = field(default_factory=dict)
    promises: dict[int, int] = field(default_factory=dict)
    votes: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    admitted: dict[bytes, tuple[int, Admitted]] = field(default_factory=dict)
    evaluations: dict[tuple[int, str], Signed] = field(default_factory=dict)
    highest: dict[str, int] = field(default_factory=dict)
    checkpoints: dict[int, BlobRef] = field(default_factory=dict)

    def record(self, server_round: int) -> VoteRecord:
        """What was promised and voted in a round."""
        view, body = self.votes.get(server_round, (-1, None))
        return VoteRecord(max(view, self.promises.get(server_round, 0)), view, body)

    def write(self, effect: fx.Effect) -> None:
        """Make one effect durable."""
        match effect:
            case fx.SaveBlob(blob):
                self.blobs.put(blob)
            case fx.SavePromise(server_round, view):
                self.promises[server_round] = view
            case fx.SaveVote(server_round, view, body):
                self.votes[server_round] = (view, body)
            case fx.SaveContribution(manifest, opened, shards):
                self.admitted[signed_hash(manifest)] = (opened.base_round, Admitted(manifest, shards))
                self.highest[opened.client] = max(self.highest.get(opened.client, 0), opened.sequence)
            case fx.SaveEvaluation(server_round, client, signed):
                self.evaluations[(server_round, client)] = signed
            case fx.SaveCommit(commit, body):
                self.commits[body.server_round] = commit
            case fx.SaveCheckpoint(server_round, ref, keep):
                self.checkpoints[server_round] = ref
                self._forget_before(sorted(self.checkpoints)[-keep:][0])
            case fx.SaveAdopted(commit, server_round, ref):
                self.commits[server_round] = commit
                self.checkpoints[server_round] = ref
                self._forget_before(server_round)

    def _forget_before(self, oldest: int) -> None:
        self.checkpoints = {number: ref for number, ref in self.checkpoints.items() if number >= oldest}
        self.commits = {number: commit for number, commit in self.commits.items() if number >= oldest}
        bodies = [decode(Body, commit.body) for commit in self.commits.values()]
        bodies += [decode(Body, body) for _, body in self.votes.values()]
        named = {ref.hash for body in bodies for ref in (body.evidence, *body.updates)}
        self.blobs.sweep(named | {ref.hash for ref in self.checkpoints.values()})

    def holds(self, server_round: int) -> bool:
        """Whether a committed round is here, as a commit or within a checkpoint."""
        return server_round in self.commits or server_round <= max(self.checkpoints, default=0)

    def restore(self, federation: Federation, initial: ModelState) -> Replica:
        """The replica that this disk gives."""
        newest = max(self.checkpoints, default=0)
        if newest:
            view = self.blobs.view(self.checkpoints[newest].hash)
            replica = read_checkpoint(view, federation, self.commits[newest].body)
        else:
            replica = Replica(federation, ModelState(initial.vector.copy(), initial.counters.copy()))
        for server_round in sorted(number for number in self.commits if number > newest):
            commit = self.commits[server_round]
            body = decode(Body, commit.body)
            replica.fold(body, commit.body, updates_of(body, self.blobs))
        return replica

    def consolidation(self, federation: Federation) -> Consolidation:
        """What a broker on this disk can offer to others."""
        oldest = min(self.checkpoints, default=0)
        bodies = [decode(Body, commit.body) for number, commit in self.commits.items() if number > oldest]
        sizes = {body.server_round: update_bytes(body) for body in bodies}
        return Consolidation(federation.checkpoints, sorted(self.checkpoints.items()), sizes)


class SimulatedBroker:
    """One broker. Its name is its place in the network; sessions are called by the client's name and a number."""

    core_class = BrokerCore
    bench_class = Workbench
    save_seconds = 0.002

    def __init__(self, world: World, invariants: Invariants, name: str, identity: Identity) -> None:
        self.world = world
        self.invariants = invariants
        self.name = name
        self.identity = identity
        self.disk = Disk()
        self.alive = False
        self.life = 0
        self.skew = 0.0
        self.armed = 0.0
        self.disk_lost = False
        self.peers_up: set[str] = set()
        self.others: dict[str, SimulatedBroker] = {}
        self.deliver_to_client = lambda session, message: None
        self.client_blobs = lambda session: None

    # --- life and death ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start from the disk."""
        world = self.world
        self.life += 1
        self.alive = True
        self._queue: deque[fx.Effect] = deque()
        self._writing = False
        self.replica = self.disk.restore(world.federation, world.initial)
        self.bench = self.bench_class(self.replica, self.disk.blobs, self.disk.spool)
        self.memory = MemoryBlobs()
        head = self.replica.head
        self.core = self.core_class(
            world.federation,
            self.identity,
            head,
            self.disk.record(head.server_round + 1),
            [
                one
                for base, one in self.disk.admitted.values()
                if base >= head.server_round - world.federation.rounds.max_staleness
            ],
            [one for (at, _), one in self.disk.evaluations.items() if at == head.server_round],
            dict(self.disk.highest),
            WELCOME,
            self.disk.consolidation(world.federation),
            Pace(world.federation.rounds),
            self.clock(),
        )
        world.note(self.name, f"starts at round {head.server_round}")
        self.apply(self.core.start(self.clock()))
        self._tick()

    def crash(self, torn: bool) -> None:
        """Die at once; a write under way is lost, or done just before, as `torn` says."""
        if not self.alive:
            return
        self.world.note(self.name, "crashes")
        if self._writing and not torn:
            self._write(self._queue[0])
        self.alive = False
        self.peers_up.clear()

    def _tick(self) -> None:
        life = self.life

        def tick() -> None:
            if self.alive and self.life == life:
                self.handle(ev.Tick(self.world.now))
                self.world.after(0.25, tick)

        self.world.after(0.25, tick)

    def clock(self) -> float:
        """This broker's own clock, which may have jumped."""
        return self.world.now + self.skew

    # --- events and effects ------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> None:
        """Feed the core."""
        if self.alive:
            self.apply(self.core.handle(event, self.clock()))

    def apply(self, effects: list[fx.Effect]) -> None:
        """Carry effects out in order; what stands behind a durable one waits until it is written."""
        self._queue.extend(effects)
        self._drain()

    def _drain(self) -> None:
        while self._queue and not self._writing and self.alive:
            effect = self._queue[0]
            if isinstance(effect, DURABLE):
                self._writing = True
                self._later(self.save_seconds, self._written)
            else:
                self._queue.popleft()
                self._carry(effect)

    def _write(self, effect: fx.Effect) -> None:
        self.disk.write(effect)
        if isinstance(effect, fx.SaveCommit):
            self.world.note(self.name, f"commits round {effect.body.server_round}, {len(effect.body.counted)} counted")
            self.invariants.committed(self, effect.commit, effect.body)

    def _written(self) -> None:
        effect = self._queue.popleft()
        self._writing = False
        self._write(effect)
        if isinstance(effect, fx.SaveCommit) and self.armed > 0.0:
            # Decided and on disk, and nobody else has heard of it: the hardest moment to die at.
            seconds, self.armed = self.armed, 0.0
            self.crash(torn=True)
            self.world.after(seconds, lambda: None if self.alive or self.disk_lost else self.start())
        self._drain()

    def _later(self, seconds: float, action) -> None:  # type: ignore[no-untyped-def]
        life = self.life
        self.world.after(seconds, lambda: action() if self.alive and self.life == life else None)

    def _carry(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendPeer(node_id, message):
                self._send_peer(node_id, message)
            case fx.SendClient(session, message):
                self.invariants.said_to_client(self, message)
                self.deliver_to_client(session, message)
            case fx.SendCommits(to, peer, after):
                self._send_commits(to, peer, after)
            case fx.SendCheckpoint(to, peer, server_round, ref):
                self._send_checkpoint(to, peer, server_round, ref)
            case fx.WriteCheckpoint():
                written = self.bench.write_checkpoint(effect)
                self._later(0.003, lambda: self.handle(written))
            case fx.Adopt():
                self._later(0.003, lambda: self.handle(self.bench.adopt(effect)))
            case fx.TakeUp():
                self.bench.take_up(effect)
                self.invariants.folded(self, self.replica.head)
            case fx.Fetch():
                self._later(self.world.latency() * 2, lambda: self._fetch(effect))
            case fx.Cache(blob):
                self.memory.put(blob)
            case fx.Fold(commit):
                try:
                    self._fold(commit)
                except LedgerError as error:
                    self._end(str(error))
                    return
                self.invariants.folded(self, self.replica.head)
            case fx.Damaged(finding):
                self._end(finding)
            case fx.Accumulate():
                self.bench.accumulate(effect)
            case fx.Inspect():
                self._later(0.001, lambda: self.handle(self.bench.inspect(effect)))
            case fx.Reduce():
                self._later(0.001, lambda: self._reduced(effect))
            case fx.Preview():
                self._later(0.001, lambda: self.handle(self.bench.preview(effect)))
            case fx.Examine():
                self._later(0.001, lambda: self.handle(self.bench.examine(effect)))
            case fx.Say(event, fields):
                self.world.note(self.name, f"{event} {fields}")

    def _end(self, finding: str) -> None:
        """As the real broker: it ends, and whatever watches it starts it again from its disk."""
        self.world.note(self.name, f"ends: {finding}")
        self.crash(torn=True)
        self.world.after(1.0, lambda: None if self.alive or self.disk_lost else self.start())

    def _send_peer(self, node_id: str, message: Message) -> None:
        target = self.others.get(node_id)
        if target is None or target.name not in self.peers_up:
            return
        self.invariants.said_to_peer(self, message)
        if isinstance(message, VoteNotice) and self.world.random.random() < self.world.weather.drop_votes:
            return
        self.world.note(self.name, f"-> {target.name} {type(message).__name__}")
        sender = self.identity.node_id
        self.world.send(self.name, target.name, lambda: target.handle(ev.FromPeer(sender, message)))

    def _send_commits(self, to: str, peer: bool, after: int) -> None:
        for server_round in range(after + 1, min(after + 16, max(self.disk.commits, default=0)) + 1):
            if server_round not in self.disk.commits:
                return
            record = pack(encode(self.disk.commits[server_round]))
            self.memory.put(record)
            notice = CommitNotice(server_round, BlobRef.of(record))
            if peer:
                self._send_peer(to, notice)
            else:
                self.deliver_to_client(to, notice)

    def _send_checkpoint(self, to: str, peer: bool, server_round: int, ref: BlobRef) -> None:
        if server_round not in self.disk.commits:
            return
        record = pack(encode(self.disk.commits[server_round]))
        self.memory.put(record)
        notice = CheckpointNotice(server_round, BlobRef.of(record), ref)
        if peer:
            self._send_peer(to, notice)
        else:
            self.deliver_to_client(to, notice)

    def _reduced(self, effect: fx.Reduce) -> None:
        event = self.bench.reduce(effect)
        if event is not None:
            self.handle(event)

    def _fold(self, commit: Commit) -> None:
        body = decode(Body, commit.body)
        self.replica.fold(body, commit.body, updates_of(body, self.disk.blobs))

    # --- blobs -------------------------------------------------------------------------------------------------------

    def serve(self, blob: bytes) -> bytes | None:
        """A blob for somebody else."""
        for store in (self.memory, self.disk.blobs, self.disk.spool) if self.alive else ():
            if store.has(blob):
                return store.read(blob)
        return None

    def _fetch(self, effect: fx.Fetch) -> None:
        ref = effect.ref
        store = {"ledger": self.disk.blobs, "spool": self.disk.spool, "memory": self.memory}[effect.into]
        if not store.has(ref.hash):
            data = ref.inline or self._from_donors(effect)
            if data is None:
                self.handle(ev.Missed(ref.hash, effect.into, ()))
                return
            store.put(data)
        self.handle(ev.Fetched(ref.hash, effect.into, store.read(ref.hash) if effect.into == "memory" else None))

    def _from_donors(self, effect: fx.Fetch) -> bytes | None:
        for donor in effect.donors:
            broker = self.others.get(donor)
            if broker is not None:
                reachable = self.world.linked(self.name, broker.name) and self.world.linked(broker.name, self.name)
                data = broker.serve(effect.ref.hash) if reachable else None
            else:
                data = self.client_blobs(donor, effect.ref.hash)  # type: ignore[call-arg]
            if data is not None:
                return data
        return None
