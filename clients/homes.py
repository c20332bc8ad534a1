"""Which broker can be home: the states of the lines to all of them, and the order in which this client prefers them.

The order is rendezvous hashing over the client's key, so that clients spread over the brokers by themselves.
"""

from collections.abc import Sequence

from clients.events import LineState
from ravnest_fed.errors import BrokerUnreachable, KeyRefused, RavnestError, RecipeMismatch, WrongFederation
from ravnest_fed.hashing import digest
from ravnest_fed.links import Link, LinkBroker
from ravnest_fed.messages import Reason, Refused

JOIN_SECONDS = 6.0
PREFERENCE_SECONDS = 0.5
"""How long the preferred broker may take before another one that answers becomes home."""


class Homes:
    """The brokers of a link, by name. Times are in seconds."""

    def __init__(self, link: Link, public_key: bytes, now: float) -> None:
        self._public_key = public_key
        self.follow(link.brokers)
        self._states: dict[str, LineState] = {}
        self._avoid: dict[str, float] = {}
        self._started = now
        self._first_up: float | None = None

    def follow(self, brokers: Sequence[LinkBroker]) -> None:
        """These are the brokers there are."""
        self._brokers = tuple(brokers)
        names = (broker.name for broker in brokers)
        self._names = sorted(names, key=lambda name: digest("home", self._public_key, name.encode()))

    def changed(self, broker: str, state: LineState, now: float) -> None:
        """The line to a broker changed its state."""
        self._states[broker] = state
        if state == "up" and self._first_up is None:
            self._first_up = now

    def up(self) -> list[str]:
        """The brokers whose lines stand, in this client's order."""
        return [name for name in self._names if self._states.get(name) == "up"]

    def avoid(self, broker: str, until: float) -> None:
        """Do not choose this broker before `until`."""
        self._avoid[broker] = until

    def choose(self, any_will_do: bool, now: float) -> str | None:
        """The most preferred broker that answers; at first the very first one is given a moment."""
        usable = [name for name in self._names if self._states.get(name) == "up" and self._avoid.get(name, 0.0) <= now]
        if not usable or self._first_up is None:
            return None
        if usable[0] != self._names[0] and not any_will_do and now - self._first_up < PREFERENCE_SECONDS:
            return None
        return usable[0]

    def hopeless(self, now: float) -> RavnestError | None:
        """Why no broker can be had, once that is clear; None while there is hope."""
        states = [self._states.get(name, "no answer") for name in self._names]
        if now - self._started < JOIN_SECONDS and not all(state == "refused" for state in states):
            return None
        if any(state == "up" for state in states):
            return None
        words = {
            "no answer": "does not answer",
            "down": "does not answer",
            "refused": "does not admit this key",
            "mismatch": "does not prove the key that the link names",
        }
        addresses = {broker.name: broker.address for broker in self._brokers}
        texts = [f"{name} at {addresses[name]} {words[state]}" for name, state in zip(self._names, states, strict=True)]
        what = "no broker to join: " + ", ".join(texts)
        if any(state in ("refused", "mismatch") for state in states):
            return KeyRefused(what, "ask the operator for a new link")
        return BrokerUnreachable(what, "check the network, or ask the operator whether the brokers run")


def turned_away(broker: str, refused: Refused) -> RavnestError:
    """The error for a client that `broker` does not let in."""
    kinds: dict[str, type[RavnestError]] = {
        Reason.WRONG_RECIPE: RecipeMismatch,
        Reason.WRONG_FEDERATION: WrongFederation,
        Reason.UNKNOWN_CLIENT: KeyRefused,
    }
    error = kinds.get(refused.reason, RavnestError)
    return error(f"{broker} turned this client away ({refused.reason})", refused.text[:300])
