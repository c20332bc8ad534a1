"""How a client says that its machine is needed: why it pauses, and once for each round that it lets pass."""

from dataclasses import dataclass

from clients import effects as fx
from ravnest_fed.messages import Skip


@dataclass
class Yielding:
    """What the owner's needs mean for one client's session."""

    because: str = ""
    """Why no work is begun; empty: it may be."""
    _skipped: tuple[str, int] | None = None

    def change(self, because: str) -> list[fx.Effect]:
        """The machine is needed for this reason, or no more (empty)."""
        if because == self.because:
            return []
        self.because = because
        return [fx.Tell("pausing", {"because": because}) if because else fx.Tell("going on", {})]

    def skip(self, home: str | None, base_round: int) -> list[fx.Effect]:
        """Tell the home broker, if there is one, that nothing comes for the round on top of `base_round`."""
        if home is None or self._skipped == (home, base_round):
            return []
        self._skipped = (home, base_round)
        return [fx.Send(home, Skip(base_round, f"paused: {self.because or 'its machine was needed'}"[:200]))]
