"""The orders of one broker to its clients: the same for all, or sized to each where the federation names a target time.

Sizing is this broker's own matter: an order is signed, and whoever checks it asks only whether it is within what the
federation allows. What is known of a client's speed comes from its deliveries here, from those that others announced,
and until then from its own word.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from brokers.contributions import Contributions
from brokers.effects import Effect, Say, SendClient
from brokers.history import Delivered, History
from brokers.planner import work_order
from brokers.sessions import Session
from brokers.sizing import Bounds, Client, Sized, Transfer, size
from ravnest_fed.capability import Capability
from ravnest_fed.facts import Manifest, WorkOrder, sign
from ravnest_fed.federation import Federation
from ravnest_fed.head import Head
from ravnest_fed.identity import Identity
from ravnest_fed.messages import OrderNotice


@dataclass
class _Given:
    """The order that a client has, since when (s), and whether it was fulfilled."""

    order: WorkOrder
    since: float
    done: bool = False


class WorkOrders:
    """What this broker orders, and what it learns of its clients. Times are in seconds."""

    def __init__(self, federation: Federation, identity: Identity) -> None:
        self._federation = federation
        self._identity = identity
        self._target = federation.rounds.target_seconds
        self._bounds = bounds_of(federation)
        self._capabilities: dict[str, Capability] = {}
        self._histories: dict[str, History] = {}
        self._given: dict[str, _Given] = {}
        self._told: dict[str, tuple[int, int, int]] = {}
        self._bytes_up = 0

    def hear(self, client: str, capability: Capability) -> None:
        """A client's own word; it rules its first order, until something was delivered."""
        if self._target:
            self._capabilities[client] = capability

    def give(self, session: Session, head: Head, now: float) -> list[Effect]:
        """The order on top of `head` for the client of a session; asked again, it is the same one."""
        client = session.node_id
        given = self._given.get(client)
        said: list[Effect] = []
        if given is None or given.order.base_hash != head.commit_hash or given.order.base_round != head.server_round:
            sized = self._sized(client) if self._target else None
            given = self._given[client] = _Given(work_order(self._federation, head, client, sized), now)
            said = self._say(given.order, sized) if sized else []
        return [*said, SendClient(session.session, OrderNotice(sign(self._identity, given.order)))]

    def delivered(self, manifest: Manifest, bytes_up: int, now: float) -> None:
        """The contribution of a client of this broker was admitted, after `bytes_up` of upload."""
        given = self._given.get(manifest.client)
        if not self._target or given is None or given.done or given.order.base_hash != manifest.base_hash:
            return
        given.done = True
        self._bytes_up = bytes_up
        self._learn(manifest, now - given.since)

    def closed(self, contributions: Contributions, present: Iterable[str], now: float) -> None:
        """A round ended with these contributions; the clients `present` here could have contributed.

        Who had an order here for the target time and brought nothing is slower than the order supposed.
        """
        if not self._target:
            return
        for client in contributions.clients():
            given, known = self._given.get(client), contributions.of_client(client)
            if known is not None and not (given and given.done):
                self._learn(known.manifest, None)
        for client in set(present) - contributions.clients():
            given = self._given.get(client)
            if given is not None and not given.done and now - given.since >= self._target:
                order = given.order
                self._history(client).missed(order.local_steps, order.max_examples, now - given.since)
        self._given.clear()

    def _learn(self, manifest: Manifest, elapsed: float | None) -> None:
        work = Delivered(manifest.local_steps, manifest.num_examples, manifest.training_seconds, elapsed)
        self._history(manifest.client).delivered(work)

    def _history(self, client: str) -> History:
        return self._histories.setdefault(client, History())

    def _sized(self, client: str) -> Sized:
        known = Client(self._capabilities.get(client), self._history(client))
        return size(known, self._target, self._bounds, Transfer(self._bytes_up))

    def _say(self, order: WorkOrder, sized: Sized) -> list[Effect]:
        client, numbers = order.client, (order.micro_batch, order.accumulation, order.local_steps)
        if self._told.get(client) == numbers:
            return []
        self._told[client] = numbers
        fields: dict[str, object] = {
            "client": self._federation.name_of(client),
            "micro_batch": order.micro_batch,
            "accumulation": order.accumulation,
            "local_steps": order.local_steps,
            "because": sized.reasons["local_steps"]
            if order.local_steps == sized.local_steps
            else f"no more than {order.max_examples} samples are dealt to it for this round",
        }
        return [Say("work sized", fields)]


def bounds_of(federation: Federation) -> Bounds:
    """What the federation file allows an order to ask for."""
    rounds = federation.rounds
    least = rounds.min_local_steps
    return Bounds(rounds.micro_batch, rounds.accumulation, rounds.local_steps, least, rounds.most_steps)
