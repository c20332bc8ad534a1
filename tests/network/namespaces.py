"""Network namespaces on this machine: hosts with interfaces and addresses of their own, made with iproute2."""

import os
import shutil
import subprocess
from types import TracebackType

COMMAND_SECONDS = 10.0


class NotPossible(Exception):
    """This machine, or this user, cannot make what a test needs."""


class Namespaces:
    """Hosts, cables between them, and switches. As a context it takes everything away again, and nothing else.

    Nothing here reaches the machine's own network: no cable ends outside these namespaces.
    """

    def __init__(self) -> None:
        self._prefix = f"fed{os.getpid()}"
        self._hosts: list[str] = []

    def __enter__(self) -> "Namespaces":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._hosts:
            subprocess.run(["ip", "netns", "delete", self._name(host)], capture_output=True, check=False)

    def within(self, host: str) -> tuple[str, ...]:
        """What a command is appended to, to run on `host`."""
        return ("ip", "netns", "exec", self._name(host))

    def run(self, host: str, *command: str) -> str:
        """Run a command on `host`; its output. Raises NotPossible where it fails."""
        return _run(*self.within(host), *command)

    def add(self, host: str) -> None:
        """A host with nothing but loopback. Raises NotPossible."""
        _run("ip", "netns", "add", self._name(host))
        self._hosts.append(host)
        self.run(host, "ip", "link", "set", "lo", "up")

    def add_switch(self, host: str) -> None:
        """A host that joins all cables that end at it. Raises NotPossible."""
        self.add(host)
        self.run(host, "ip", "link", "add", "switch", "type", "bridge")
        self.run(host, "ip", "link", "set", "switch", "up")

    def plug(self, host: str, interface: str, address: str, into: str, other_end: str, other_address: str = "") -> None:
        """A cable between two hosts; an end without an address goes into the switch there. Raises NotPossible."""
        peer = ("peer", "name", other_end, "netns", self._name(into))
        self.run(host, "ip", "link", "add", interface, "type", "veth", *peer)
        self.run(host, "ip", "address", "add", address, "dev", interface)
        self.run(host, "ip", "link", "set", interface, "up")
        if other_address:
            self.run(into, "ip", "address", "add", other_address, "dev", other_end)
        else:
            self.run(into, "ip", "link", "set", other_end, "master", "switch")
        self.run(into, "ip", "link", "set", other_end, "up")

    def masquerade(self, router: str, outside: str) -> None:
        """Let `router` forward, and hide what leaves by the interface `outside` behind its own address there."""
        self.run(router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        if shutil.which("nft"):
            chain = "{ type nat hook postrouting priority 100 ; }"
            self.run(router, "nft", "add", "table", "ip", "nat")
            self.run(router, "nft", "add", "chain", "ip", "nat", "postrouting", chain)
            self.run(router, "nft", "add", "rule", "ip", "nat", "postrouting", "oifname", outside, "masquerade")
        else:
            self.run(router, "iptables", "-t", "nat", "-A", "POSTROUTING", "-o", outside, "-j", "MASQUERADE")

    def shape(self, host: str, interface: str, rate: str) -> None:
        """Let no more than `rate` (in words of tc) leave `host` by an interface."""
        limits = ("rate", rate, "burst", "16kb", "latency", "300ms")
        self.run(host, "tc", "qdisc", "add", "dev", interface, "root", "tbf", *limits)

    def _name(self, host: str) -> str:
        return f"{self._prefix}-{host}"


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotPossible(f"{' '.join(command)}: {error}") from None
    if done.returncode:
        raise NotPossible(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
