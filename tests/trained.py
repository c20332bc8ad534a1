"""A federation in memory whose clients really train: real trainers on top of joined brokers, without a socket.

Deltas are encoded, admitted, reduced and folded as over the network. Who takes part in a round is the caller's choice;
who does not is away, as a client whose machine was switched off.
"""

from collections.abc import Iterable

from brokers import events as ev
from clients.trainer import LocalResult, LocalWork, Trainer
from ravnest_fed.facts import WorkOrder, decode
from ravnest_fed.head import Head
from ravnest_fed.model_state import read_state, schema_of
from ravnest_fed.parameters import BLOCK, ModelState
from ravnest_fed.partition import Partition
from ravnest_fed.recipe import LoadedRecipe
from tests.joined import Joined, federation_of

PATIENCE_SECONDS = 60.0


class Trained:
    """Brokers joined in memory, and a trainer for each of `clients` clients. `model` is the initial model, if given.

    `strategy` holds settings of the federation file's table of that name.
    """

    def __init__(
        self,
        loaded: LoadedRecipe,
        clients: int,
        brokers: int = 1,
        model: ModelState | None = None,
        seed: int = 0,
        strategy: dict[str, object] | None = None,
    ) -> None:
        recipe = loaded.recipe
        built = loaded.build_model(seed)
        self.loaded = loaded
        self.schema = schema_of(built, 16 * BLOCK)
        initial = model if model is not None else read_state(built, self.schema)
        rounds = {"local_steps": recipe.local_steps, "micro_batch": recipe.micro_batch, "min_contributions": 1}
        federation, _ = federation_of(
            brokers,
            clients,
            schema=self.schema,
            federation={"seed": seed},
            strategy=strategy or {},
            rounds={**rounds, "accumulation": recipe.accumulation, "grace_seconds": 1.0},
        )
        self.joined = Joined(federation, initial)
        self.joined.start_brokers()
        self.joined.join_clients()
        self.trainers = {name: self.new_trainer(name) for name in self.joined.clients}

    @property
    def state(self) -> ModelState:
        """The newest committed model, as a broker holds it."""
        return next(broker.replica.state for broker in self.joined.brokers.values() if broker.alive)

    @property
    def head(self) -> Head:
        """The head that all brokers stand at."""
        (head,) = {head.commit_hash: head for head in self.joined.heads().values()}.values()
        return head

    @property
    def server_round(self) -> int:
        """The newest committed round."""
        return self.head.server_round

    def new_trainer(self, name: str) -> Trainer:
        """A trainer for a client, as it is when the client has just started."""
        federation = self.joined.federation
        members = [member.name for member in federation.members]
        seed = federation.federation.seed
        return Trainer(self.loaded, self.schema, Partition(members.index(name), len(members), seed), "cpu", seed)

    def work(self, name: str) -> LocalResult:
        """Let a client do its work of the open round, and keep the delta to itself."""
        signed = self.joined.clients[name].order
        assert signed is not None
        order = decode(WorkOrder, signed.payload)
        work = LocalWork.ordered(order, self.joined.federation.strategy.proximal)
        return self.trainers[name].local_round(work, self.state)

    def contribute(self, name: str) -> None:
        """Let a client do its work of the open round and offer the delta."""
        client, result = self.joined.clients[name], self.work(name)
        changes = {"num_examples": result.num_examples, "local_steps": result.local_steps, "metrics": result.metrics}
        offer = client.offer_state(result.delta, **changes)
        client.say(self.joined.home_of(name), offer)

    def round(self, taking_part: Iterable[str] | None = None) -> None:
        """One round to its commit, with these clients (all by default)."""
        chosen = set(self.trainers if taking_part is None else taking_part)
        following = self.server_round + 1
        for name in self.trainers.keys() - chosen:
            self.joined.brokers[self.joined.home_of(name)].handle(ev.SessionLost(name))
        self.joined.deliver()
        for name in sorted(chosen):
            self.contribute(name)
        self.joined.deliver()
        if self.joined.rounds() != {following}:
            self.joined.pass_time(PATIENCE_SECONDS)
        assert self.joined.rounds() == {following}, f"round {following} was not committed"
        for name in self.trainers.keys() - chosen:
            self.joined.clients[name].join(self.joined.home_of(name))
        self.joined.deliver()
