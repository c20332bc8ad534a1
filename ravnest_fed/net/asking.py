"""Asking brokers how they are, with the operator's key."""

import asyncio
import contextlib
import time
from collections.abc import Mapping

from ravnest_fed.errors import RemoteProtocolError
from ravnest_fed.facts import encode
from ravnest_fed.federation import Federation
from ravnest_fed.identity import Identity
from ravnest_fed.messages import (
    PROTOCOL_VERSION,
    ChangeNotice,
    Hello,
    Refused,
    Status,
    StatusRequest,
    Welcome,
    decode_to_client,
)
from ravnest_fed.net.sockets import Line, make_context

REFUSALS = {
    "refused": "does not admit the operator's key",
    "mismatch": "does not prove its key",
    "down": "does not answer",
}


class Asker:
    """Keeps a line to every broker and asks for its status. Use as an async context."""

    def __init__(self, federation: Federation, operator: Identity) -> None:
        self._federation = federation
        self._operator = operator
        self._lines: dict[str, Line] = {}
        self._status: dict[str, tuple[float, Status]] = {}
        self._trouble: dict[str, str] = {}
        self._welcomed: set[str] = set()
        self._stirred = asyncio.Event()

    async def __aenter__(self) -> "Asker":
        self._context = make_context()
        for broker in self._federation.brokers:
            self._lines[broker.name] = Line(
                self._context,
                broker.client_address,
                broker.curve_key,
                self._operator,
                False,
                lambda raw, name=broker.name: self._received(name, raw),  # type: ignore[misc]
                lambda state, name=broker.name: self._changed(name, state),  # type: ignore[misc]
            )
        return self

    async def __aexit__(self, *exception: object) -> None:
        for line in self._lines.values():
            line.close()
        self._context.term()

    async def ask(self, after: Mapping[str, int], timeout: float) -> dict[str, Status | str]:
        """The status of each broker by name, with rows after the rounds in `after`; or why there is none.

        Waits `timeout` seconds at the most, and returns as soon as all have answered.
        """
        began = time.monotonic()
        names = list(self._lines)
        asked: set[str] = set()
        while True:
            for name in self._welcomed - asked:
                self._lines[name].send(encode(StatusRequest(after.get(name, 0))))
                asked.add(name)
            fresh = {name: status for name, (at, status) in self._status.items() if at >= began}
            left = began + timeout - time.monotonic()
            if len(fresh) == len(names) or left <= 0:
                return {name: fresh.get(name) or self._trouble.get(name, "does not answer") for name in names}
            self._stirred.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), left)

    def tell(self, message: ChangeNotice) -> None:
        """Say something to every broker that answers."""
        for name in self._welcomed:
            self._lines[name].send(encode(message))

    def _changed(self, name: str, state: str) -> None:
        if state == "up":
            self._trouble.pop(name, None)
            hello = Hello(PROTOCOL_VERSION, self._federation.fingerprint, self._operator.node_id, "", -1)
            self._lines[name].send(encode(hello))
        else:
            self._trouble[name] = REFUSALS[state]
            self._welcomed.discard(name)

    def _received(self, name: str, raw: bytes) -> None:
        try:
            message = decode_to_client(raw)
        except RemoteProtocolError as error:
            self._trouble[name] = str(error)
            return
        match message:
            case Welcome():
                self._welcomed.add(name)
            case Refused(text=text):
                self._trouble[name] = text
            case Status():
                self._status[name] = (time.monotonic(), message)
        self._stirred.set()
