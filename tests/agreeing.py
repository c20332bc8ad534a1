"""Brokers that agree in memory, over a network that drops, repeats and reorders, with crashes between any two effects."""

from dataclasses import dataclass, field
from random import Random

from brokers import agreement as paxos
from brokers.agreement import Agreement
from ravnest_fed.facts import Vote, body_hash, decode, encode
from ravnest_fed.hashing import digest
from ravnest_fed.identity import Signed
from ravnest_fed.ledger import VoteRecord
from ravnest_fed.messages import Message, Prepare, Promise, Propose, Refusal, VoteNotice

FINGERPRINT = digest("federation", b"agreeing")


def signed_vote(node_id: str, server_round: int, view: int, body: bytes) -> Signed:
    """A vote whose signature the network takes for good."""
    return _signed(node_id, Vote(FINGERPRINT, server_round, view, body_hash(body)))


def _signed(node_id: str, vote: Vote) -> Signed:
    return Signed(node_id, encode(vote), b"")


@dataclass
class Machine:
    """One broker: what is durable, what runs (None while it is down), and what it is about to do."""

    node_id: str
    record: VoteRecord
    agreement: Agreement | None = None
    tasks: list[tuple[str, int, bytes]] = field(default_factory=list)
    recorded_votes: set[tuple[int, bytes]] = field(default_factory=set)
    bodies: int = 0
    decided: bytes | None = None


class Network:
    """`brokers` machines in one round, the messages between them, and what was found wrong."""

    def __init__(self, brokers: int, server_round: int, kind: type[Agreement] = Agreement) -> None:
        self.server_round = server_round
        self.roster = tuple(f"broker{index}" for index in range(brokers))
        self.kind = kind
        self.machines = {node: Machine(node, VoteRecord()) for node in self.roster}
        self.messages: list[tuple[str, str, Message]] = []
        self.decided: set[bytes] = set()
        self.findings: list[str] = []

    def agreement(self, kind: type[Agreement], node_id: str, record: VoteRecord) -> Agreement:
        """The agreement of one broker, begun from what is durable."""
        return kind(
            FINGERPRINT,
            self.server_round,
            node_id,
            self.roster,
            record,
            lambda vote: _signed(node_id, vote),
            lambda signed: decode(Vote, signed.payload),
        )

    def up(self, machine: Machine) -> Agreement | None:
        """Start a machine, or start it again."""
        machine.agreement = self.agreement(self.kind, machine.node_id, machine.record)
        machine.tasks = []
        return machine.agreement

    def carry(self, machine: Machine, effects: list[paxos.AgreementEffect], done: int | None = None) -> None:
        """Carry out the first `done` effects (None: all), then crash if some are left or `done` was given."""
        for effect in effects if done is None else effects[:done]:
            self._carry(machine, effect)
        if done is not None:
            machine.agreement = None

    def _carry(self, machine: Machine, effect: paxos.AgreementEffect) -> None:
        record = machine.record
        match effect:
            case paxos.RecordPromise(view):
                machine.record = VoteRecord(max(record.promised, view), record.voted_view, record.body)
            case paxos.RecordVote(view, body):
                machine.record = VoteRecord(max(record.promised, view), view, body)
                machine.recorded_votes.add((view, body_hash(body)))
            case paxos.ToPeer(node_id, message):
                self._say(machine, node_id, message)
            case paxos.ToAll(message):
                for node in self.roster:
                    if node != machine.node_id:
                        self._say(machine, node, message)
            case paxos.Free(view):
                machine.bodies += 1
                machine.tasks.append(("propose", view, f"{machine.node_id} {machine.bodies}".encode()))
            case paxos.Bound(view, ref, _):
                machine.tasks.append(("propose", view, ref.inline))
            case paxos.Consider(view, ref, _):
                machine.tasks.append(("examine", view, ref.inline))
            case paxos.Decided(_, decided, _):
                machine.decided = decided
                self.decided.add(decided)
                if len(self.decided) > 1:
                    self._find("two bodies decided")

    def _say(self, machine: Machine, node_id: str, message: Message) -> None:
        match message:
            case VoteNotice(vote=signed):
                vote = decode(Vote, signed.payload)
                if (vote.view, vote.body_hash) not in machine.recorded_votes:
                    self._find("vote not recorded")
            case Propose(view=view, body=ref):
                if (view, body_hash(ref.inline)) not in machine.recorded_votes:
                    self._find("own vote not recorded")
            case Promise(view=view) | Prepare(view=view):
                if view > machine.record.promised:
                    self._find("promise not recorded")
        self.messages.append((machine.node_id, node_id, message))

    def _find(self, finding: str) -> None:
        if finding not in self.findings:
            self.findings.append(finding)

    def work(self, machine: Machine, index: int) -> list[paxos.AgreementEffect]:
        """Do one of the things that a machine is about to do."""
        assert machine.agreement is not None
        what, view, body = machine.tasks.pop(index)
        if what == "examine":
            return machine.agreement.examined(view, body)
        return machine.agreement.propose(view, body)

    def deliver(self, index: int, keep: bool = False) -> tuple[Machine, list[paxos.AgreementEffect]]:
        """Deliver one message (and `keep` it, to come again); lost if its receiver is down."""
        sender, receiver, message = self.messages[index]
        if not keep:
            self.messages[index] = self.messages[-1]
            self.messages.pop()
        machine = self.machines[receiver]
        one = machine.agreement
        if one is None:
            return machine, []
        match message:
            case Prepare(view=view):
                return machine, one.on_prepare(sender, view)
            case Promise():
                return machine, one.on_promise(sender, message)
            case Refusal(promised=promised):
                return machine, one.on_refusal(promised)
            case Propose(view=view, body=ref):
                return machine, one.on_propose(sender, view, ref)
            case VoteNotice(vote=signed):
                return machine, one.on_vote(signed)
        raise AssertionError(message)


def run(kind: type[Agreement], brokers: int, seed: int, steps: int = 120) -> Network:
    """One run in trouble: everything happens in an order that `seed` draws."""
    random = Random(seed)
    network = Network(brokers, random.randrange(brokers), kind)
    machines = list(network.machines.values())
    fault = random.choice((0.0, 0.05, 0.2))
    crash = random.choice((0.0, 0.02, 0.1))
    hurry = random.choice((0.02, 0.06, 0.15))
    for machine in machines:
        one = network.up(machine)
        assert one is not None
        network.carry(machine, one.start())
    for _ in range(steps):
        machine = random.choice(machines)
        one, drawn = machine.agreement, random.random()
        effects: list[paxos.AgreementEffect] = []
        if one is None:
            if drawn < 0.3:
                one = network.up(machine)
                assert one is not None
                effects = one.start()
        elif drawn < hurry:
            effects = one.enter(one.view + random.randrange(1, brokers + 1))
        elif drawn < hurry + 0.03:
            effects = one.ask_again()
        elif machine.tasks and drawn < 0.5:
            effects = network.work(machine, random.randrange(len(machine.tasks)))
        elif network.messages:
            index = random.randrange(len(network.messages))
            if random.random() < fault:
                network.messages.pop(index)
                continue
            machine, effects = network.deliver(index, keep=random.random() < fault)
        done = random.randrange(len(effects) + 1) if machine.agreement and random.random() < crash else None
        network.carry(machine, effects, done)
    return network


def settle(network: Network) -> None:
    """Faults stop: every machine is up, every message arrives, and everybody moves on to one new view."""
    for machine in network.machines.values():
        if machine.agreement is None:
            one = network.up(machine)
            assert one is not None
            network.carry(machine, one.start())
    _drain(network)
    following = max(machine.agreement.view for machine in network.machines.values() if machine.agreement) + 1
    for machine in network.machines.values():
        assert machine.agreement is not None
        network.carry(machine, machine.agreement.enter(following))
    _drain(network)


def _drain(network: Network) -> None:
    busy = True
    while busy:
        busy = bool(network.messages)
        if network.messages:
            network.carry(*network.deliver(0))
        for machine in network.machines.values():
            while machine.tasks:
                busy = True
                network.carry(machine, network.work(machine, 0))
