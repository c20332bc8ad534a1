"""One client's session without a socket: a test says what brokers, transfers and training answer, and when."""

from dataclasses import dataclass, field
from typing import TypeVar

from clients import effects as fx
from clients import events as ev
from clients.residual import Standing
from clients.session import ClientSession
from ravnest_fed.facts import BlobRef
from ravnest_fed.head import Head
from ravnest_fed.identity import Signed
from ravnest_fed.links import link_for
from ravnest_fed.messages import PROTOCOL_VERSION, CommitNotice, Message, OrderNotice, Welcome
from tests.building import Tiny, delta, payload, tiny

ONE = tiny()
FEDERATION_FILE = BlobRef.of(b"the federation file", inline=False)
INITIAL_MODEL = BlobRef.of(b"the initial model", inline=False)
ROUND_0 = ONE.replica().head

E = TypeVar("E")


def broker_id(name: str) -> str:
    """The node id of the broker that the federation calls `name`."""
    return next(broker.node_id for broker in ONE.federation.brokers if broker.name == name)


def commit_ref(server_round: int) -> BlobRef:
    """The blob of a commit."""
    return BlobRef.of(f"commit {server_round}".encode(), inline=False)


def update_refs(server_round: int) -> tuple[BlobRef, ...]:
    """The updates that a commit names; two shards have the same bytes."""
    texts = [f"update {server_round} {shard}".encode() for shard in (0, 1, 1)]
    return tuple(BlobRef.of(text, inline=False) for text in texts)


@dataclass
class Client:
    """Member 0's session. Every call returns the effects of one event; `now` is moved by hand."""

    one: Tiny = ONE
    now: float = 100.0
    recipe_hash: str = "11" * 32
    all: list[fx.Effect] = field(default_factory=list)
    kept: Standing | None = None
    initial: Head = ROUND_0

    def __post_init__(self) -> None:
        member = self.one.members[0]
        self.me = member.node_id
        link = link_for(self.one.federation, member)
        self.session = ClientSession(link, member, self.recipe_hash, self.now, self.kept)

    def do(self, event: ev.Event) -> list[fx.Effect]:
        effects = self.session.handle(event, self.now)
        self.all += effects
        return effects

    def line(self, broker: str, state: ev.LineState) -> list[fx.Effect]:
        return self.do(ev.Line(broker, state))

    def tick(self, seconds: float = 0.0) -> list[fx.Effect]:
        self.now += seconds
        return self.do(ev.Tick())

    def hear(self, message: Message, broker: str | None = None) -> list[fx.Effect]:
        """A message of `broker`, or of home."""
        broker = broker or self.session.home
        assert broker is not None
        return self.do(ev.FromBroker(broker, message))

    def welcome(self, server_round: int = 0, highest_sequence: int = 0) -> list[fx.Effect]:
        assert self.session.home is not None
        home, fingerprint = broker_id(self.session.home), self.one.federation.fingerprint
        files = (FEDERATION_FILE, INITIAL_MODEL)
        return self.hear(Welcome(PROTOCOL_VERSION, fingerprint, home, server_round, highest_sequence, *files))

    def join(self, server_round: int = 0, highest_sequence: int = 0) -> list[fx.Effect]:
        """Come up at every broker and get as far as the initial model."""
        for broker in self.one.federation.brokers:
            self.line(broker.name, "up")
        self.tick(1.0)
        self.welcome(server_round, highest_sequence)
        self.do(ev.Fetched(FEDERATION_FILE.hash))
        self.do(ev.FederationRead(self.one.federation))
        self.do(ev.Fetched(INITIAL_MODEL.hash))
        return self.do(ev.Prepared(self.initial))

    def order(self, signed: Signed) -> list[fx.Effect]:
        return self.hear(OrderNotice(signed))

    def trained(self, base_round: int = 0, seed: int = 0) -> list[fx.Effect]:
        """Training gave a delta."""
        made = payload(self.one.federation, delta(self.one.federation.schema, seed))
        shards = tuple(BlobRef.of(shard) for shard in made.shards)
        return self.do(ev.Trained(base_round, shards, made.norm, made.max_abs, 8, 2, {"loss": 0.5}, 0.25))

    def fetch_commit(self, server_round: int) -> list[fx.Effect]:
        """A commit is announced, and everything of it arrives; it is to be folded now."""
        effects = self.hear(CommitNotice(server_round, commit_ref(server_round)))
        self.do(ev.Fetched(commit_ref(server_round).hash))
        self.do(ev.CommitOpened(server_round, update_refs(server_round)))
        for blob in dict.fromkeys(ref.hash for ref in update_refs(server_round)):
            effects = self.do(ev.Fetched(blob))
        return effects

    def commit(self, head: Head) -> list[fx.Effect]:
        """A commit is fetched and folded."""
        self.fetch_commit(head.server_round)
        return self.do(ev.Folded(head))


def sent(effects: list[fx.Effect], kind: type[E]) -> list[E]:
    """The messages of one kind among the effects."""
    return [effect.message for effect in effects if isinstance(effect, fx.Send) and isinstance(effect.message, kind)]


def only(effects: list[fx.Effect], kind: type[E]) -> list[E]:
    """The effects of one kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


def told(effects: list[fx.Effect]) -> list[str]:
    """What the owner is told."""
    return [effect.event for effect in only(effects, fx.Tell)]
