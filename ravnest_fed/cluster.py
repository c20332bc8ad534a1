"""A federation on this machine: brokers and clients as processes on loopback, for the demo and for tests."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from ravnest_fed.errors import ClusterError
from ravnest_fed.founding import Address, Founded

BROKER_MODULE = "brokers.command"
CLIENT_MODULE = "clients.command"
STOP_SECONDS = 5.0


@dataclass
class Node:
    """One process of the cluster and where its output goes."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def last_words(self) -> str:
        """The last line that it printed."""
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return lines[-1] if lines else "it printed nothing"


@dataclass
class Cluster:
    """The processes of a federation that was founded in `founded`. As a context it leaves no process behind.

    `within` names, by node, the command that its own is appended to, such as `ip netns exec NAME`.
    """

    founded: Founded
    recipe: Path
    threads: int = 1
    brokers: dict[str, Node] = field(default_factory=dict)
    clients: dict[str, Node] = field(default_factory=dict)
    within: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start_broker(self, name: str) -> Node:
        """Start a broker, or start it again."""
        folder = self.founded.folder / "brokers" / name
        node = self.start_module(name, [BROKER_MODULE, "run", str(folder), "--until-input-closes"])
        self.brokers[name] = node
        return node

    def start_client(self, name: str) -> Node:
        """Start a client, or start it again."""
        link = self.founded.folder / "members" / f"{name}.link"
        arguments = [
            CLIENT_MODULE,
            "join",
            str(link),
            "--until-input-closes",
            "--recipe",
            str(self.recipe),
            "--device",
            "cpu",
            # A node of the federation would take the others on this machine for its owner's work.
            "--when",
            "always",
        ]
        state = self.founded.folder / "state" / name
        node = self.start_module(name, [*arguments, "--threads", str(self.threads), "--state", str(state)])
        self.clients[name] = node
        return node

    def start(self) -> None:
        """Start every broker and every client."""
        for broker in self.founded.federation.brokers:
            self.start_broker(broker.name)
        for member in self.founded.federation.members:
            self.start_client(member.name)

    def check_brokers(self) -> None:
        """Raise ClusterError if no majority of the brokers runs."""
        dead = [node for node in self.brokers.values() if not node.alive]
        if len(self.brokers) - len(dead) < self.founded.federation.majority:
            node = dead[0]
            raise ClusterError(f"broker {node.name} died: {node.last_words()}", f"see {node.log}")

    def kill(self, name: str) -> None:
        """Kill a node as a power cut would."""
        node = self.brokers.get(name) or self.clients[name]
        node.process.kill()
        node.process.wait()

    def stop(self) -> None:
        """End every process: first asked, then killed; all at once if that is interrupted."""
        try:
            self._stop_in_order()
        except BaseException:
            left = [node for node in (*self.clients.values(), *self.brokers.values()) if node.alive]
            for node in left:
                node.process.kill()
            for node in left:
                node.process.wait()
            raise

    def _stop_in_order(self) -> None:
        for group in (self.clients, self.brokers):
            nodes = [node for node in group.values() if node.alive]
            for node in nodes:
                with contextlib.suppress(OSError):
                    node.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_SECONDS
            for node in nodes:
                try:
                    node.process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    node.process.kill()
                    node.process.wait()

    def start_module(self, name: str, arguments: list[str]) -> Node:
        """Start a module with its arguments as a process; its output goes to the log of `name`."""
        logs = self.founded.folder / "logs"
        logs.mkdir(exist_ok=True)
        log = logs / f"{name}.log"
        environment = dict(os.environ)
        # A few processes share this machine: each stays within its own thread.
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            environment.setdefault(variable, str(self.threads))
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*self.within.get(name, ()), sys.executable, "-m", *arguments],
                # Nodes end when this pipe closes: also where this process is killed and can end nobody.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                # Its own session: Ctrl-C reaches this process alone, which then ends the others in order.
                start_new_session=True,
            )
        return Node(name, process, log)


def free_addresses(count: int) -> list[Address]:
    """Loopback addresses with two free ports each."""
    sockets = []
    try:
        for _ in range(2 * count):
            one = socket.socket()
            one.bind(("127.0.0.1", 0))
            sockets.append(one)
        ports = [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
    return [Address("127.0.0.1", ports[2 * index], ports[2 * index + 1]) for index in range(count)]
