"""How a client leaves: it may finish its round first, then says goodbye and waits for the answer for a moment."""

from dataclasses import dataclass

from clients import events as ev
from ravnest_fed.messages import Goodbye

GOODBYE_SECONDS = 3.0
"""How long the answer to a goodbye is waited for. It shows that what was said before has arrived."""


@dataclass
class Leaving:
    """One client's leaving. Times are in seconds."""

    finishing: bool = False
    """The owner wants to stop once the round is done: no other one is begun."""
    reason: str = ""
    """Why the client said goodbye; empty before."""
    _since: float = 0.0

    def begin(self, reason: str, now: float) -> None:
        """Goodbye was said."""
        self.reason, self._since = reason, now

    def over(self, event: ev.Event, home: str | None, now: float) -> bool:
        """Whether nothing more is to be waited for."""
        match event:
            case ev.FromBroker(broker, Goodbye()) | ev.Line(broker):
                return broker == home
            case ev.Leave():
                return True
            case ev.Tick():
                return now - self._since > GOODBYE_SECONDS
        return False
