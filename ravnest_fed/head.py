"""The small part of the replicated state: everything that decisions need, without the model's vectors.

`Head` is what a round starts from. `Head.after(body)` is a pure function, so every replica derives the same head from
the same commit. Brokers decide with heads alone; the vectors live in `ravnest_fed.replica`.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ravnest_fed.facts import Body, RosterChange, body_hash, decode, encode
from ravnest_fed.federation import BrokerEntry, Federation
from ravnest_fed.hashing import digest
from ravnest_fed.identity import Signed
from ravnest_fed.parameters import Schema
from ravnest_fed.slices import Deal, first_deal

SEQUENCE_WINDOW = 64
"""How many sequence numbers below a client's highest counted one are remembered."""


class CountedSequences(msgspec.Struct, frozen=True, array_like=True):
    """Which sequences of a client were counted: the highest, and a bit for each of the 64 below it (bit 0: highest-1)."""

    highest: int
    below: int = 0

    def holds(self, sequence: int) -> bool:
        """Whether `sequence` was counted, or is too old to tell and so must not be counted."""
        distance = self.highest - sequence
        if distance <= 0:
            return distance == 0
        return distance > SEQUENCE_WINDOW or bool(self.below >> (distance - 1) & 1)

    def with_sequence(self, sequence: int) -> "CountedSequences":
        """The table's entry after `sequence` was counted too."""
        if self.holds(sequence):
            return self
        mask = (1 << SEQUENCE_WINDOW) - 1
        if sequence > self.highest:
            distance = sequence - self.highest
            # A leap must not cost memory: the shift is only taken where a bit of it stays in the window.
            if distance > SEQUENCE_WINDOW:
                return CountedSequences(sequence)
            return CountedSequences(sequence, (self.below << distance | 1 << (distance - 1)) & mask)
        return CountedSequences(self.highest, (self.below | 1 << (self.highest - sequence - 1)) & mask)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replica stands after `server_round`. `commit_hash` of round 0 is the federation's fingerprint.

    `scale_bits` is None before anything was recorded: the first round's scale stands in its plan. `norms` and `maxima` are
    those of the last contributions counted. `brokers` is the roster in force from the next round on, `changes` how it came
    about: the round that each change stands in, and what the operator signed. `scalars` are those that the outer
    optimiser stepped with last, each a float32. `ancestors` are the hashes of the commits before the head's, newest first, as
    many as a contribution may be stale. `deal` says who trains on which samples where the clients share their data.
    """

    server_round: int
    commit_hash: bytes
    model_hash: bytes
    owners: tuple[int, ...]
    scale_bits: int | None
    clip_bound: float
    stop: str
    counted: Mapping[str, CountedSequences]
    norms: tuple[float, ...]
    maxima: tuple[float, ...]
    last_clients: tuple[str, ...]
    brokers: tuple[BrokerEntry, ...] = ()
    changes: tuple[tuple[int, Signed], ...] = ()
    scalars: tuple[float, ...] = ()
    ancestors: tuple[bytes, ...] = ()
    deal: Deal | None = None

    def base_hash(self, server_round: int) -> bytes | None:
        """The hash of the commit of `server_round`, where a contribution may still be based on it."""
        chain = (self.commit_hash, *self.ancestors)
        behind = self.server_round - server_round
        return chain[behind] if 0 <= behind < len(chain) else None

    def after(self, body: Body, raw: bytes, federation: Federation) -> "Head":
        """The head after `body`, whose bytes are `raw`, was folded in `federation`."""
        history = federation.strategy.norm_history
        table = dict(self.counted)
        for counted in body.counted:
            known = table.get(counted.client)
            table[counted.client] = (
                known.with_sequence(counted.sequence) if known else CountedSequences(counted.sequence)
            )
        brokers, changes, deal = self.brokers, self.changes, self.deal
        if body.change is not None:
            # Who voted for the body, or checks its votes, has seen that the operator signed it.
            brokers = roster_after(brokers, decode(RosterChange, body.change.payload))
            changes = (*changes, (body.server_round, body.change))
        if deal is not None:
            covered = {counted.client: counted.covered for counted in body.counted}
            deal = deal.after(body.server_round, covered, federation.member_by_id, federation.deal_terms)
        return Head(
            server_round=body.server_round,
            commit_hash=body_hash(raw),
            model_hash=body.model_hash,
            owners=body.owners,
            scale_bits=body.next_scale_bits,
            clip_bound=body.next_clip_bound,
            stop=body.stop,
            counted=table,
            norms=(*self.norms, *(counted.norm for counted in body.counted))[-history:],
            maxima=(*self.maxima, *(counted.max_abs for counted in body.counted))[-history:],
            last_clients=tuple(counted.client for counted in body.counted),
            brokers=brokers,
            changes=changes,
            scalars=tuple(float(one) for one in self.next_scalars(federation)),
            ancestors=(self.commit_hash, *self.ancestors)[: federation.rounds.max_staleness],
            deal=deal,
        )

    def next_scalars(self, federation: Federation) -> tuple[np.float32, ...]:
        """The scalars that the outer optimiser steps with in the round on top of this head."""
        return federation.outer.scalars(tuple(np.float32(one) for one in self.scalars))

    def was_counted(self, client: str, sequence: int) -> bool:
        """Whether a commit counted this sequence of `client`, or must never count it."""
        known = self.counted.get(client)
        return known is not None and known.holds(sequence)

    def digest(self, federation: Federation) -> bytes:
        """Hash of the replicated state outside the vectors, with the roster and the members."""
        facts = (
            self.server_round,
            self.owners,
            self.scale_bits,
            self.clip_bound,
            self.stop,
            sorted((client, entry.highest, entry.below) for client, entry in self.counted.items()),
            self.norms,
            self.maxima,
            self.brokers,
            self.changes,
            self.scalars,
            self.ancestors,
            self.deal,
            sorted(federation.member_by_id),
        )
        return digest("head", encode(facts))


def entry_of(change: RosterChange) -> BrokerEntry:
    """The broker that a change is about, as it will stand in the roster."""
    return msgspec.convert({name: getattr(change, name) for name in BrokerEntry.__struct_fields__}, BrokerEntry)


def roster_after(brokers: Sequence[BrokerEntry], change: RosterChange) -> tuple[BrokerEntry, ...]:
    """The roster after `change`, which was found to hold."""
    entry = entry_of(change)
    if change.action == "remove":
        return tuple(one for one in brokers if one.name != entry.name)
    if change.action == "readdress":
        return tuple(entry if one.name == entry.name else one for one in brokers)
    return (*brokers, entry)


def initial_head(federation: Federation, model_hash: bytes) -> Head:
    """The head of round 0."""
    return Head(
        server_round=0,
        commit_hash=federation.fingerprint,
        model_hash=model_hash,
        owners=balanced_owners(federation.schema, federation.roster, federation.roster, 1),
        scale_bits=None,
        clip_bound=float("inf"),
        stop="",
        counted={},
        norms=(),
        maxima=(),
        last_clients=(),
        brokers=federation.founding.brokers,
        deal=first_deal(federation.member_by_id, federation.deal_terms) if federation.data.samples else None,
    )


def balanced_owners(
    schema: Schema, roster: tuple[str, ...], live: tuple[str, ...], server_round: int
) -> tuple[int, ...]:
    """Owners (roster indices) of each shard among the `live` brokers, no broker with more than its even share.

    Rendezvous hashing with a bound on load: Thaler and Ravishankar, "Using name-based mappings to increase hit rates"
    (1998); Mirrokni et al., "Consistent hashing with bounded loads" (2018).
    """
    shards = schema.shards
    candidates = [index for index, node in enumerate(roster) if node in live]
    bound = -(-len(shards) // len(candidates))
    load = dict.fromkeys(candidates, 0)
    owners = []
    for shard in shards:
        key = shard.index.to_bytes(4, "little") + server_round.to_bytes(8, "little")
        free = [index for index in candidates if load[index] < bound]
        owner = max(free, key=lambda index: digest("owner", key, bytes.fromhex(roster[index])))
        load[owner] += 1
        owners.append(owner)
    return tuple(owners)
