"""A TCP proxy on loopback that can be slow, stall, be cut, and forget silent connections, as links and NATs do."""

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

PIECE = 8192
CLOSING_SECONDS = 2.0
RECEIVE_BUFFER = 32 * 1024
"""Small, so that little is under way in the proxy: what it took it has, nearly, also passed on."""


class _Connection:
    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near, self.far = near, far
        self.active = time.monotonic()
        self.forgotten = False

    def reset(self) -> None:
        """Close both ends as a crash would."""
        for end in (self.near, self.far):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def finish(self) -> None:
        """Let what was passed on arrive, and nothing more."""
        for end in (self.near, self.far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close both ends."""
        self.near.close()
        self.far.close()


class Proxy:
    """Passes connections on to `target` ("tcp://host:port"), from a thread of its own. Use as a context.

    `up` and `down` count the bytes that were passed on to and from the target, `opened` the connections, and `expired` those
    that ended because they were silent for `idle_seconds`: they are reset, or, with `silently`, forgotten, so that neither end
    hears of it and what it sends is lost.
    """

    def __init__(self, target: str, idle_seconds: float | None = None, silently: bool = False) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._idle_seconds = idle_seconds
        self._silently = silently
        self._rates: dict[bool, float | None] = {True: None, False: None}
        self._free_at = {True: 0.0, False: 0.0}
        self.up = self.down = self.opened = self.expired = 0
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        self._call(self._begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def address(self) -> str:
        """What to dial."""
        return f"tcp://127.0.0.1:{self._port}"

    # --- what may happen to a link -----------------------------------------------------------------------------------

    def throttle(self, up: float | None = None, down: float | None = None) -> None:
        """Let no more bytes a second than these through to and from the target, over all connections."""
        self._rates = {True: up, False: down}

    def stall(self) -> None:
        """Pass nothing on, and lose nothing."""
        self._call(self._do(self._flowing.clear))

    def flow(self) -> None:
        """Pass on again."""
        self._call(self._do(self._flowing.set))

    def cut(self) -> None:
        """End every connection, with nothing lost of what was counted as passed on, and accept no more."""
        self._call(self._cut())

    def restore(self) -> None:
        """Accept connections again, at the same address."""
        self._call(self._listen())

    # --- on the proxy's thread ---------------------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    async def _do(self, action: Callable[[], None]) -> None:
        action()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin(self) -> None:
        self._flowing = asyncio.Event()
        self._flowing.set()
        await self._listen()
        self._spawn(self._expire())

    async def _end(self) -> None:
        await self._cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self) -> None:
        assert self._listener is None
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        listener.bind(("127.0.0.1", self._port))
        listener.listen()
        listener.setblocking(False)
        self._port = listener.getsockname()[1]
        self._listener = listener
        self._accepting = self._loop.create_task(self._accept(listener))

    async def _cut(self) -> None:
        if self._listener is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            self._leave(connection)
            connection.finish()
            self._spawn(self._close_later(connection))

    def _leave(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        for end in (connection.near, connection.far):
            self._loop.remove_reader(end)
            self._loop.remove_writer(end)

    async def _close_later(self, connection: _Connection) -> None:
        try:
            await asyncio.sleep(CLOSING_SECONDS)
        finally:
            connection.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            near, _ = await self._loop.sock_accept(listener)
            near.setblocking(False)
            self._spawn(self._open(near))

    async def _open(self, near: socket.socket) -> None:
        far = socket.socket()
        far.setblocking(False)
        try:
            await self._loop.sock_connect(far, self._target)
        except OSError:
            near.close()
            far.close()
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(near, far)
        self._connections.add(connection)
        self.opened += 1
        self._spawn(self._pump(connection, up=True))
        self._spawn(self._pump(connection, up=False))

    async def _pump(self, connection: _Connection, up: bool) -> None:
        source, sink = (connection.near, connection.far) if up else (connection.far, connection.near)
        try:
            while connection in self._connections and (piece := await self._loop.sock_recv(source, PIECE)):
                await self._flowing.wait()
                if rate := self._rates[up]:
                    self._free_at[up] = max(self._free_at[up], time.monotonic()) + len(piece) / rate
                    await asyncio.sleep(self._free_at[up] - time.monotonic())
                    await self._flowing.wait()
                connection.active = time.monotonic()
                if connection.forgotten:
                    continue
                await self._loop.sock_sendall(sink, piece)
                if up:
                    self.up += len(piece)
                else:
                    self.down += len(piece)
        except OSError:
            pass
        if not connection.forgotten and connection in self._connections:
            self._leave(connection)
            connection.reset()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            for connection in list(self._connections) if self._idle_seconds is not None else []:
                silent = time.monotonic() - connection.active
                if silent > self._idle_seconds and not connection.forgotten:
                    self.expired += 1
                    connection.forgotten = self._silently
                    if not self._silently:
                        self._leave(connection)
                        connection.reset()
