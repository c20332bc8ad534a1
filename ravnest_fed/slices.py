"""Slices of a data set that all clients share: who trains on which samples, so that an epoch covers each exactly once.

Positions count on without end: of `n` samples, position `p` is place `p % n` in the order of epoch `p // n`. The head
after every commit deals each member a region of positions that no other member has. A client trains on the first
positions of its region; a commit that counts its contribution covers them for good, and what no commit covered in time
is dealt again, lowest first. Everything follows from commits alone, so every replica deals alike.

NumPy's legacy generator orders an epoch because its streams are frozen for all later versions.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

Interval = tuple[int, int]
"""Positions from the first up to, but not including, the second."""
Slice = tuple[Interval, ...]

MAX_PIECES: Final = 16
"""Most pieces that a region is dealt: facts about a slice stay small."""
GROWTH: Final = 4
"""A region holds so many times what its client last covered, and at first so many times the federation's round."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Positions `start` to `stop` - 1 of a region, dealt by the head of round `since`."""

    start: int
    stop: int
    since: int

    @property
    def interval(self) -> Interval:
        """The positions."""
        return self.start, self.stop


class Region(msgspec.Struct, frozen=True, array_like=True):
    """What one client was dealt, ascending, and how many samples its last counted contribution covered."""

    client: str
    pieces: tuple[Piece, ...]
    lately: int = 0


class Terms(msgspec.Struct, frozen=True):
    """What a deal goes by: the samples of one round (`round_samples`), the most that any order asks for, whether orders
    are sized to clients, and how many rounds old a contribution's base may be."""

    round_samples: int
    most_samples: int
    sized: bool
    max_staleness: int

    def wish(self, lately: int) -> int:
        """How many positions a client's region should hold."""
        if not self.sized:
            # While one contribution waits to be counted, the next is trained.
            return self.round_samples * (2 if self.max_staleness else 1)
        return max(self.round_samples, min(self.most_samples, GROWTH * (lately or self.round_samples)))


class Deal(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """Who was dealt which positions. `free` lies below `tail`, ascending; from `tail` on every position is free.

    What is neither free nor in a region is covered: a commit counts a contribution that was trained on it.
    """

    free: Slice = ()
    tail: int = 0
    regions: tuple[Region, ...] = ()

    @property
    def covered(self) -> int:
        """How many positions were covered."""
        dealt = sum(piece.stop - piece.start for region in self.regions for piece in region.pieces)
        return self.tail - size(self.free) - dealt

    @property
    def whole(self) -> int:
        """How many positions from the very first on are covered without a gap."""
        starts = [start for start, _ in self.free]
        starts += [piece.start for region in self.regions for piece in region.pieces]
        return min(starts, default=self.tail)

    def usable(self, client: str, base_round: int, max_staleness: int) -> Slice:
        """The positions that `client` may train on from the model of `base_round`, ascending."""
        region = self._by_client.get(client)
        if region is None:
            return ()
        return tuple(piece.interval for piece in region.pieces if base_round - piece.since <= max_staleness)

    def holds(self, client: str, wanted: Slice) -> bool:
        """Whether every position of `wanted` is in the region of `client`."""
        region = self._by_client.get(client)
        if region is None:
            return not wanted
        return not without(wanted, [piece.interval for piece in region.pieces])

    def after(self, server_round: int, covered: Mapping[str, Slice], members: Iterable[str], terms: Terms) -> "Deal":
        """The deal of the head of `server_round`, whose commit covered these slices of regions, by client.

        A piece can be trained on while the base is at most `max_staleness` rounds past its deal, and such work counted
        for as long again; then it is dealt anew.
        """
        kept: dict[str, list[Piece]] = {}
        lately: dict[str, int] = {}
        returned: list[Interval] = []
        for region in self.regions:
            lately[region.client] = region.lately
            done = covered.get(region.client, ())
            for piece in region.pieces:
                left = without((piece.interval,), done)
                if server_round > piece.since + 2 * terms.max_staleness:
                    returned += left
                else:
                    kept.setdefault(region.client, []).extend(Piece(start, stop, piece.since) for start, stop in left)
        lately.update((client, size(done)) for client, done in covered.items())
        stock = _Stock(joined([*self.free, *returned]), self.tail)
        order = sorted(set(members), key=lambda client: (client not in covered, client))
        regions = []
        for client in order:
            pieces = kept.get(client, [])
            usable = sum(
                piece.stop - piece.start for piece in pieces if server_round - piece.since <= terms.max_staleness
            )
            short = terms.wish(lately.get(client, 0)) - usable
            dealt = stock.take(short, max(1, MAX_PIECES - len(pieces)))
            pieces = sorted(
                [*pieces, *(Piece(start, stop, server_round) for start, stop in dealt)], key=lambda one: one.start
            )
            regions.append(Region(client, tuple(pieces), lately.get(client, 0)))
        return Deal(tuple(stock.free), stock.tail, tuple(sorted(regions, key=lambda one: one.client)))

    @cached_property
    def _by_client(self) -> dict[str, Region]:
        return {region.client: region for region in self.regions}


class _Stock:
    """Free positions while they are dealt out, lowest first."""

    def __init__(self, free: list[Interval], tail: int) -> None:
        # What borders on the open end is part of it.
        if free and free[-1][1] == tail:
            tail = free.pop()[0]
        self.free = free
        self.tail = tail

    def take(self, count: int, pieces: int) -> list[Interval]:
        """The lowest `count` free positions in at most `pieces` pieces, the last of them from the open end if need be."""
        taken: list[Interval] = []
        while count > 0 and self.free and len(taken) < pieces - 1:
            start, stop = self.free.pop(0)
            end = min(stop, start + count)
            taken.append((start, end))
            count -= end - start
            if end < stop:
                self.free.insert(0, (end, stop))
        if count > 0:
            taken.append((self.tail, self.tail + count))
            self.tail += count
        return taken


def first_deal(members: Iterable[str], terms: Terms) -> Deal:
    """The deal of a federation that has not begun."""
    return Deal().after(0, {}, members, terms)


def size(of: Slice | Sequence[Interval]) -> int:
    """How many positions a slice has."""
    return sum(stop - start for start, stop in of)


def is_slice(value: Slice) -> bool:
    """Whether these are ascending pieces, none empty, and not too many: a stranger's word is checked with this."""
    if len(value) > 4 * MAX_PIECES:
        return False
    ends = [end for interval in value for end in interval]
    return (
        all(0 <= end < 2**62 for end in ends)
        and all(start < stop for start, stop in value)
        and all(before[1] <= after[0] for before, after in pairwise(value))
    )


def first(of: Slice, count: int) -> Slice:
    """The first `count` positions of a slice, or all if it has fewer."""
    found = []
    for start, stop in of:
        if count <= 0:
            break
        found.append((start, min(stop, start + count)))
        count -= stop - start
    return tuple(found)


def without(of: Iterable[Interval], taken: Iterable[Interval]) -> Slice:
    """The positions of ascending `of` that are in none of the ascending `taken`."""
    removed, found = list(taken), []
    for start, stop in of:
        for low, high in removed:
            if high <= start or low >= stop:
                continue
            if low > start:
                found.append((start, low))
            start = high
            if start >= stop:
                break
        if start < stop:
            found.append((start, stop))
    return tuple(found)


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in ascending order, with neighbours made one."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


class SampleOrder:
    """Which sample stands at a position, for `samples` samples under the federation's `seed`."""

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._seed = seed
        self._epochs: dict[int, npt.NDArray[np.int64]] = {}

    def rows(self, of: Slice) -> npt.NDArray[np.int64]:
        """The samples (int64, from 0) at the positions of a slice."""
        parts = [np.empty(0, np.int64)]
        for start, stop in of:
            while start < stop:
                epoch, place = divmod(start, self._samples)
                end = min(stop - start, self._samples - place)
                parts.append(self._order(epoch)[place : place + end])
                start += end
        return np.concatenate(parts)

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._epochs:
            # A slice seldom reaches over more than one end of an epoch; an order takes 8 bytes a sample.
            while len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            words = [self._seed & 0xFFFFFFFF, self._seed >> 32 & 0xFFFFFFFF, epoch & 0xFFFFFFFF, epoch >> 32]
            generator = np.random.RandomState(words)
            self._epochs[epoch] = generator.permutation(self._samples).astype(np.int64)
        return self._epochs[epoch]
