"""Whether the ledger's disk has room for the rounds to come. Pure counting; bytes."""

from brokers.effects import Effect, Say

LEAST_RESERVE = 2**25
"""Bytes that stay free on the disk of even the smallest model's broker."""


class Room:
    """One broker's room on disk. It takes twice the reserve to begin again, or it would stop after the next round."""

    def __init__(self, parameters: int) -> None:
        """`parameters` is the length of the model's float32 vector."""
        # A checkpoint, a few rounds' updates and what was admitted, beside what the database needs.
        self.reserve = LEAST_RESERVE + 8 * 4 * parameters
        self.left = True

    def look(self, free: int | None) -> list[Effect]:
        """So many bytes are free; None: nobody knows."""
        if free is None:
            return []
        left = free >= (self.reserve if self.left else 2 * self.reserve)
        if left == self.left:
            return []
        self.left = left
        if left:
            return [Say("disk has room again", {"free": free})]
        return [Say("disk is full: no contributions are taken", {"free": free, "wanted": self.reserve}, warning=True)]
