"""A thread that looks at the machine every other second, and what the trainer asks between its steps."""

import threading
import time
from collections.abc import Callable
from datetime import datetime

from clients.owner import Machine
from clients.politeness import Politeness, When

LOOK_SECONDS = 2.0


class Watch:
    """Knows at any moment why to pause. `changed` is told of each change, on the watch's own thread, before it shows."""

    def __init__(self, when: When, device: str, changed: Callable[[str], None]) -> None:
        self.because = ""
        self._when = when
        self._device = device
        self._changed = changed
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look from now on; who may always work is not watched."""
        if self._when.kind != "always":
            self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Look no more; waits for the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        machine, politeness = Machine(self._device), Politeness(self._when)
        try:
            while not self._stopped.is_set():
                self.take(politeness.observe(machine.sample(), datetime.now().time(), time.monotonic()))
                self._stopped.wait(LOOK_SECONDS)
        finally:
            machine.close()

    def take(self, because: str) -> None:
        """A verdict. It is told first: what training does because of it must not be heard of earlier."""
        if because != self.because:
            self._changed(because)
            self.because = because


class StepBoundary:
    """Asked between the steps of one round: rests after each as `factor` (times its length) says, then may end the round.

    `rest` sleeps for so many seconds, or until the round is abandoned.
    """

    def __init__(
        self,
        factor: float,
        because: Callable[[], str],
        rest: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._factor = factor
        self._because = because
        self._rest = rest
        self._clock = clock
        self._begun: float | None = None

    def __call__(self) -> bool:
        """Whether the next step shall be made."""
        if self._factor and self._begun is not None:
            self._rest(self._factor * (self._clock() - self._begun))
        self._begun = self._clock()
        return not self._because()
