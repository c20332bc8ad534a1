"""Safeguards taken out one by one, so that the simulator can be seen to notice each."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

from brokers import effects as fx
from brokers.agreement import Agreement, Free
from brokers.contributions import Contribution, Contributions
from brokers.events import Examined
from brokers.workbench import Workbench
from ravnest_fed import decree, manifests
from ravnest_fed.head import Head
from tests.simulation.brokers import Disk, SimulatedBroker
from tests.simulation.running import Run

Mutation = Callable[[], AbstractContextManager[Any]]


def no_promise() -> AbstractContextManager[Any]:
    """A broker votes below its promise, and forgets that it gave one."""

    def examined(self: Agreement, view: int, body: bytes) -> list[Any]:
        return [] if view <= self._voted_view else [self._cast(view, body), *self._say_vote(view, body)]

    def on_propose(self: Agreement, node_id: str, view: int, ref: Any) -> list[Any]:
        self._promised = min(self._promised, view)
        return original(self, node_id, view, ref)

    original = Agreement.on_propose
    stack = ExitStack()
    stack.enter_context(mock.patch.object(Agreement, "examined", examined))
    stack.enter_context(mock.patch.object(Agreement, "on_propose", on_propose))
    return stack


def no_adoption() -> AbstractContextManager[Any]:
    """A proposer ignores the votes that promises tell of."""
    original = Agreement.on_promise

    def on_promise(self: Agreement, node_id: str, promise: Any) -> list[Any]:
        return [Free(self.view) if type(one).__name__ == "Bound" else one for one in original(self, node_id, promise)]

    return mock.patch.object(Agreement, "on_promise", on_promise)


def vote_before_fsync() -> AbstractContextManager[Any]:
    """Votes and promises are said first and written later."""

    def drain(self: SimulatedBroker) -> None:
        while self._queue and not self._writing and self.alive:
            effect = self._queue[0]
            if isinstance(effect, fx.SaveVote | fx.SavePromise):
                self._queue.popleft()
                self._later(0.05, lambda effect=effect: self.disk.write(effect))
            else:
                original(self)
                return

    original = SimulatedBroker._drain
    return mock.patch.object(SimulatedBroker, "_drain", drain)


def no_majority() -> AbstractContextManager[Any]:
    """Half of the brokers, or fewer, are enough."""
    original = Agreement.__init__

    def start(self: Agreement, *arguments: Any) -> None:
        original(self, *arguments)
        self._majority = max(1, len(self._roster) // 2)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(Agreement, "__init__", start))
    return stack


def no_deduplication() -> AbstractContextManager[Any]:
    """What a round counted may be counted again by a later one."""
    return mock.patch.object(Head, "was_counted", lambda self, client, sequence: False)


def many_a_client() -> AbstractContextManager[Any]:
    """Several deltas of one client may be counted in one round."""

    def countable(self: Contributions, live: frozenset[str]) -> list[Contribution]:
        self._suppose(live)
        found = [self._by_hash[key] for key in self._complete]
        found.sort(key=lambda one: (one.manifest.client, one.manifest_hash))
        return found[: self._federation.limits.max_contributions]

    stack = ExitStack()
    stack.enter_context(mock.patch.object(Contributions, "countable", countable))
    stack.enter_context(mock.patch.object(decree, "one_a_client", lambda clients: True))
    return stack


def no_hash_check() -> AbstractContextManager[Any]:
    """A broker votes without folding the update."""

    def examine(self: Workbench, task: fx.Examine) -> Examined:
        return Examined(task.raw, "")

    return mock.patch.object(Workbench, "examine", examine)


def no_base_check() -> AbstractContextManager[Any]:
    """Contributions on other bases than the head are counted."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(manifests, "_require_base", lambda federation, head, manifest: None))
    for module in (decree, manifests):
        stack.enter_context(mock.patch.object(module, "order_of", _any_order))
    stack.enter_context(mock.patch.object(decree, "has_base", lambda head, manifest: True))
    return stack


def no_slice_check() -> AbstractContextManager[Any]:
    """Contributions on samples that others were dealt are counted."""
    return mock.patch.object(manifests, "_require_slice", lambda head, manifest: None)


def votes_after_loss() -> AbstractContextManager[Any]:
    """A broker whose disk was lost votes again under its key."""

    @contextmanager
    def patched() -> Iterator[None]:
        original = Run._strike

        def strike(self: Run, fault: Any) -> None:
            original(self, fault)
            if fault.kind == "crash":
                # What "lose-disk" does, but at every crash, and with the broker back in service.
                self.brokers[fault.node].disk.votes.clear()
                self.brokers[fault.node].disk.promises.clear()

        with mock.patch.object(Run, "_strike", strike):
            yield

    return patched()


def _any_order(federation: Any, manifest: Any) -> Any:
    from ravnest_fed.facts import WorkOrder, decode

    return decode(WorkOrder, manifest.order.payload)


MUTATIONS: dict[str, Mutation] = {
    "promise": no_promise,
    "adopt the highest vote": no_adoption,
    "fsync before vote": vote_before_fsync,
    "majority": no_majority,
    "deduplication": no_deduplication,
    "one a client": many_a_client,
    "hash check before vote": no_hash_check,
    "base check": no_base_check,
    "slice check": no_slice_check,
    "refusing to vote on a lost vote store": votes_after_loss,
}

__all__ = ["MUTATIONS", "Disk"]
