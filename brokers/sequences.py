"""Which sequences clients have used, as far as one broker has seen."""

from collections.abc import Mapping

from ravnest_fed.head import Head


class Sequences:
    """The highest sequence of each client, and what was signed under the last few."""

    def __init__(self, highest: Mapping[str, int], remembered: int) -> None:
        """`highest` is what the ledger knows; of each client, `remembered` sequences are known with what they stand for."""
        self._highest = dict(highest)
        self._remembered = remembered
        self._signed: dict[str, dict[int, bytes]] = {}

    def saw(self, client: str, sequence: int, manifest_hash: bytes) -> None:
        """A manifest of the client was admitted, here or by another broker."""
        self._highest[client] = max(self._highest.get(client, 0), sequence)
        signed = self._signed.setdefault(client, {})
        signed[sequence] = manifest_hash
        while len(signed) > self._remembered:
            del signed[min(signed)]

    def highest(self, client: str, head: Head) -> int:
        """The highest sequence that the client is known to have used."""
        counted = head.counted.get(client)
        return max(self._highest.get(client, 0), counted.highest if counted else 0)

    def floor(self, client: str, manifest_hash: bytes) -> int:
        """The sequence above which this manifest must be, to be new; 0 where it is one that was seen before."""
        if manifest_hash in self._signed.get(client, {}).values():
            return 0
        return self._highest.get(client, 0)
