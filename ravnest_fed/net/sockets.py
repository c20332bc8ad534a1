"""ROUTER and DEALER sockets on the asyncio loop, always with CURVE, never blocking.

Sockets are read by draining them without blocking whenever their descriptor stirs; nothing is awaited, so no cancelled
receive can lose a message. Sends never wait either: a peer that does not take its messages loses its session. Windows
needs the selector event loop for this.
"""

import asyncio
import os
import random
from collections.abc import Callable
from contextlib import suppress

import zmq
import zmq.auth.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from ravnest_fed.errors import AddressInUse
from ravnest_fed.identity import Identity
from ravnest_fed.messages import MAX_MESSAGE_BYTES

CLIENT_HEARTBEAT = (15_000, 45_000)
"""After how long a silent connection is probed, and after how long more without an answer it is given up; milliseconds.
Few NATs and proxies forget a connection that was silent for less."""
PEER_HEARTBEAT = (2_000, 6_000)
CLIENT_HIGH_WATER = 64
PEER_HIGH_WATER = 8192
DRAIN_AT_ONCE = 64
MAX_SOCKETS = 65_536
GOODBYE_LINGER_MS = 500


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A ZeroMQ context for one process. Never fork after making it."""
    context = zmq.Context()
    with suppress(zmq.ZMQError):
        context.set(zmq.MAX_SOCKETS, min(MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT)))
    return context


class AllowList:
    """The CURVE keys that may connect; enforced by ZAP before any frame of theirs is read. Keys are hex."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._allowed: dict[str, set[str]] = {}
        self._authenticator = zmq.auth.asyncio.AsyncioAuthenticator(context)

    def start(self) -> None:
        """Begin to answer for this context's sockets. Call from the running loop, before any bind."""
        self._authenticator.start()

    def allow(self, domain: str, keys: set[str]) -> None:
        """Let exactly `keys` connect to the sockets of `domain`."""
        self._allowed[domain] = keys
        self._authenticator.configure_curve_callback(domain, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator for each handshake; `key` is Z85."""
        return z85.decode(key).hex() in self._allowed.get(domain, ())

    def stop(self) -> None:
        """Stop answering."""
        self._authenticator.stop()


class _Loop:
    """A socket whose messages are drained on the asyncio loop."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._scheduled = False
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._stir)
        self._stir()

    def _stir(self) -> None:
        # The descriptor is edge-triggered: every send or receive may swallow its signal, so look again after each.
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        for _ in range(DRAIN_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._received(frames)
            except BaseException:
                self._stir()  # what one message did must not leave the others unread
                raise
            if self._closed:
                return
        self._stir()

    def _received(self, frames: list[zmq.Frame]) -> None:
        raise NotImplementedError

    def _send(self, *frames: bytes) -> bool:
        if self._closed:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        finally:
            self._stir()
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket, letting what was sent leave for `linger_ms`."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger_ms)


class _Monitor(_Loop):
    def __init__(self, watched: zmq.Socket[bytes], report: Callable[[int, int], None]) -> None:
        self._watched = watched
        self._report = report
        super().__init__(watched.get_monitor_socket())

    def _received(self, frames: list[zmq.Frame]) -> None:
        event = parse_monitor_message([bytes(frame.buffer) for frame in frames])
        self._report(event["event"], event["value"])

    def close(self, linger_ms: int = 0) -> None:
        if not self._closed:
            with suppress(zmq.ZMQError):
                self._watched.disable_monitor()
            super().close(linger_ms)


class Port(_Loop):
    """A bound ROUTER. `on_message(session, curve_key, bytes)` gets each message; sessions and keys are hex.

    `on_gone(session)` is called once for a session whose connection was lost. Raises AddressInUse if it cannot bind.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        identity: Identity,
        domain: str,
        peers: bool,
        on_message: Callable[[str, str, bytes], None],
        on_gone: Callable[[str], None],
    ) -> None:
        socket = context.socket(zmq.ROUTER)
        _common(socket, peers)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        socket.curve_server = True
        socket.curve_secretkey = z85.encode(identity.curve_secret)
        socket.curve_publickey = z85.encode(identity.curve_public)
        socket.zap_domain = domain.encode()
        self._on_message = on_message
        self._on_gone = on_gone
        self._descriptors: dict[str, int] = {}
        self._sessions: dict[int, str] = {}
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise AddressInUse(
                f"cannot bind {address}: {os.strerror(error.errno or 0)}",
                "stop what uses the port, or bind another one",
            ) from None
        super().__init__(socket)
        self._monitor = _Monitor(socket, self._monitored)

    def send(self, session: str, message: bytes) -> bool:
        """Send to a session; False if it is gone or does not take its messages, which ends it."""
        return self._send(bytes.fromhex(session), message)

    def close(self, linger_ms: int = 0) -> None:
        self._monitor.close()
        super().close(linger_ms)

    def _received(self, frames: list[zmq.Frame]) -> None:
        if len(frames) != 2:
            return
        session = bytes(frames[0].buffer).hex()
        body = frames[1]
        if session not in self._descriptors:
            descriptor = int(body.get(zmq.SRCFD))
            self._descriptors[session] = descriptor
            self._sessions[descriptor] = session
        key = z85.decode(str(body.get("User-Id")).encode()).hex()
        self._on_message(session, key, bytes(body.buffer))

    def _monitored(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            try:
                self._drain()  # what arrived before the end counts, such as the chunks of an upload
            finally:
                self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        session = self._sessions.pop(descriptor, None)
        if session is not None and self._descriptors.get(session) == descriptor:
            del self._descriptors[session]
            self._on_gone(session)


class Line(_Loop):
    """A DEALER to one broker, which must prove `server_key` (hex).

    `on_state(text)` is called with "up" after a handshake, "down" when the connection is lost, "refused" when the broker's
    allow-list does not hold our key, and "mismatch" when the handshake fails otherwise, as with a wrong server key.
    `heartbeat` is in milliseconds, as the constants above, and rules both ends of this connection.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        server_key: str,
        identity: Identity,
        peer: bool,
        on_message: Callable[[bytes], None],
        on_state: Callable[[str], None],
        heartbeat: tuple[int, int] | None = None,
    ) -> None:
        socket = context.socket(zmq.DEALER)
        _common(socket, peer, heartbeat)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        low, high = (200, 600) if peer else (1000, 3000)
        # A maximum would switch the jitter off, and all clients of a dead broker would come back at once.
        socket.setsockopt(zmq.RECONNECT_IVL, random.randint(low, high))
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 8000)
        socket.curve_serverkey = z85.encode(bytes.fromhex(server_key))
        socket.curve_secretkey = z85.encode(identity.curve_secret)
        socket.curve_publickey = z85.encode(identity.curve_public)
        self._on_message = on_message
        self._on_state = on_state
        self._connected = False
        self._monitor = _Monitor(socket, self._monitored)
        socket.connect(address)
        super().__init__(socket)

    def send(self, message: bytes) -> bool:
        """Send to the broker; False if it is not connected or does not take its messages."""
        return self._send(message)

    def close(self, linger_ms: int = 0) -> None:
        self._monitor.close()
        super().close(linger_ms)

    def _received(self, frames: list[zmq.Frame]) -> None:
        if len(frames) == 1:
            self._on_message(bytes(frames[0].buffer))

    def _monitored(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected = True
            self._on_state("up")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._on_state("refused")
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
            self._on_state("mismatch")
        elif event == zmq.EVENT_DISCONNECTED:
            try:
                self._drain()
            finally:
                state = "down" if self._connected else "mismatch"
                self._connected = False
                self._on_state(state)


def _common(socket: zmq.Socket[bytes], peers: bool, heartbeat: tuple[int, int] | None = None) -> None:
    interval, timeout = heartbeat or (PEER_HEARTBEAT if peers else CLIENT_HEARTBEAT)
    high_water = PEER_HIGH_WATER if peers else CLIENT_HIGH_WATER
    for option, value in (
        (zmq.HEARTBEAT_IVL, interval),
        (zmq.HEARTBEAT_TIMEOUT, timeout),
        (zmq.HEARTBEAT_TTL, timeout),
        (zmq.IPV6, 1),
        (zmq.SNDHWM, high_water),
        (zmq.RCVHWM, high_water),
        (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
        (zmq.HANDSHAKE_IVL, 8000),
        (zmq.LINGER, 0),
    ):
        socket.setsockopt(option, value)
