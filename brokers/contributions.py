"""The contributions that a broker knows of for the open round, and which broker holds which of their shards."""

from dataclasses import dataclass

from ravnest_fed.decree import count
from ravnest_fed.facts import BlobRef, Counted, Holding, Manifest, encode, signed_hash
from ravnest_fed.federation import Federation
from ravnest_fed.hashing import digest
from ravnest_fed.head import Head, balanced_owners
from ravnest_fed.identity import Signed
from ravnest_fed.manifests import still_countable

MAX_INLINE_TOTAL = 2**18
"""Most bytes of blobs that ride along in one announcement."""


@dataclass(frozen=True)
class Contribution:
    """One admitted contribution, here or at another broker (`home`)."""

    manifest_hash: bytes
    manifest: Manifest
    signed: Signed
    shards: tuple[BlobRef, ...]
    home: str
    counted: Counted


class Contributions:
    """All contributions of one round, from one broker's side."""

    def __init__(self, federation: Federation, head: Head) -> None:
        self._federation = federation
        self._head = head
        self._by_hash: dict[bytes, Contribution] = {}
        self._by_client: dict[str, list[Contribution]] = {}
        self._holders: dict[bytes, dict[str, set[int]]] = {}
        self._equivocators: set[str] = set()
        self._live: frozenset[str] = frozenset()
        self._owners: tuple[int, ...] = head.owners
        self._complete: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._by_hash)

    def get(self, manifest_hash: bytes) -> Contribution | None:
        """The contribution with this manifest, if known."""
        return self._by_hash.get(manifest_hash)

    def of_client(self, client: str) -> Contribution | None:
        """The client's contribution on the newest base, if one is known."""
        return max(self._by_client.get(client, ()), key=lambda one: one.manifest.base_round, default=None)

    def rival(self, manifest_hash: bytes, manifest: Manifest) -> Contribution | None:
        """A contribution that the same client signed under the same sequence, or for the same base, in its place."""
        for one in self._by_client.get(manifest.client, ()):
            same = one.manifest.sequence == manifest.sequence or one.manifest.base_round == manifest.base_round
            if same and one.manifest_hash != manifest_hash:
                return one
        return None

    def longest_training(self) -> float:
        """The longest training among them, as the clients declare it, in seconds."""
        return max((one.manifest.training_seconds for one in self._by_hash.values()), default=0.0)

    def clients(self) -> frozenset[str]:
        """Who contributed."""
        return frozenset(self._by_client)

    def equivocated(self, client: str) -> bool:
        """Whether the client signed two different deltas for this round."""
        return client in self._equivocators

    def mark_equivocator(self, client: str) -> None:
        """This broker plans with nothing of this client in this round.

        What it sent stays known: another broker that has seen one delta only may count that one.
        """
        self._equivocators.add(client)

    def add(self, signed: Signed, manifest: Manifest, shards: tuple[BlobRef, ...], home: str) -> Contribution:
        """A contribution was admitted by `home`, which holds every shard."""
        manifest_hash = signed_hash(signed)
        counted = count(self._federation, self._head, manifest, manifest_hash)
        bare = tuple(ref.bare() for ref in shards)
        contribution = Contribution(manifest_hash, manifest, signed, bare, home, counted)
        if manifest_hash not in self._by_hash:
            self._by_client.setdefault(manifest.client, []).append(contribution)
        self._by_hash[manifest_hash] = contribution
        self.hold(home, Holding(manifest_hash, tuple(range(len(shards)))))
        return contribution

    def hold(self, node_id: str, holding: Holding) -> None:
        """`node_id` holds these shards of a contribution, known here already or not yet."""
        shards = {shard for shard in holding.shards if 0 <= shard < len(self._head.owners)}
        limit = 4 * self._federation.limits.max_contributions
        if holding.manifest_hash in self._holders or len(self._holders) < limit:
            self._holders.setdefault(holding.manifest_hash, {}).setdefault(node_id, set()).update(shards)
            if holding.manifest_hash in self._by_hash and self._is_complete(holding.manifest_hash):
                self._complete.add(holding.manifest_hash)

    def forget_holder(self, node_id: str) -> None:
        """A broker is gone; if it comes back, it says anew what it still holds."""
        for by_node in self._holders.values():
            by_node.pop(node_id, None)
        self._complete = {key for key in self._complete if self._is_complete(key)}

    def holdings_of(self, node_id: str) -> tuple[Holding, ...]:
        """Everything that `node_id` holds."""
        return tuple(
            Holding(manifest_hash, tuple(sorted(by_node[node_id])))
            for manifest_hash, by_node in self._holders.items()
            if by_node.get(node_id)
        )

    def digest(self) -> bytes:
        """A digest of which contributions are known and who holds what of them; equal for equal knowledge."""
        parts = sorted(self._by_hash)
        for manifest_hash, by_node in sorted(self._holders.items()):
            parts += [manifest_hash, encode(sorted((node, sorted(shards)) for node, shards in by_node.items()))]
        return digest("known contributions", *parts)[:16]

    def holders(self, manifest_hash: bytes, shard: int) -> tuple[str, ...]:
        """The brokers that hold a shard of a contribution."""
        by_node = self._holders.get(manifest_hash, {})
        return tuple(node for node, shards in by_node.items() if shard in shards)

    def uncounted(self, head: Head) -> tuple[Contribution, ...]:
        """Those that the commit of `head` did not count, and that a round on top of it may."""
        return tuple(one for one in self._by_hash.values() if still_countable(self._federation, head, one.manifest))

    def at_home(self, node_id: str) -> tuple[Contribution, ...]:
        """The contributions whose home is `node_id`."""
        return tuple(one for one in self._by_hash.values() if one.home == node_id)

    def only_held_by(self, node_id: str, live: frozenset[str]) -> bool:
        """Whether a shard of one of its contributions would be gone with `node_id`, until its client offers it again."""
        others = live - {node_id}
        return any(
            not others.intersection(self.holders(one.manifest_hash, shard))
            for one in self.at_home(node_id)
            for shard in range(len(one.shards))
        )

    def countable(self, live: frozenset[str]) -> list[Contribution]:
        """Contributions, by client, that may be planned with while the brokers `live` are here.

        Every shard of theirs is held by its owner, or by a live broker if the owner is new.
        """
        self._suppose(live)
        found = [self._by_hash[key] for key in self._complete]
        found = [one for one in found if one.manifest.client not in self._equivocators]
        # One of a client, the oldest first: what is newer may still count in later rounds.
        found.sort(key=lambda one: one.manifest.base_round, reverse=True)
        chosen = {one.manifest.client: one for one in found}
        return [chosen[client] for client in sorted(chosen)][: self._federation.limits.max_contributions]

    def arrived(self, live: frozenset[str]) -> int:
        """How many contributions `countable` has, at less cost."""
        self._suppose(live)
        if self._equivocators or len(self._by_client) < len(self._by_hash):
            return len(self.countable(live))
        return min(len(self._complete), self._federation.limits.max_contributions)

    def owners(self, live: frozenset[str]) -> tuple[int, ...]:
        """This round's owners: those that the head names, others in the place of those that are gone."""
        self._suppose(live)
        return self._owners

    def _suppose(self, live: frozenset[str]) -> None:
        if live == self._live:
            return
        self._live = live
        roster = self._federation.roster
        present = tuple(node for node in roster if node in live)
        spare = balanced_owners(self._federation.schema, roster, present, self._head.server_round + 1)
        self._owners = tuple(
            owner if roster[owner] in live else spare[shard] for shard, owner in enumerate(self._head.owners)
        )
        self._complete = {key for key in self._by_hash if self._is_complete(key)}

    def _is_complete(self, manifest_hash: bytes) -> bool:
        roster = self._federation.roster
        by_node = self._holders.get(manifest_hash, {})
        for shard, owner in enumerate(self._owners):
            if shard in by_node.get(roster[owner], ()):
                continue
            renamed = owner != self._head.owners[shard]
            if not renamed or not any(shard in held and node in self._live for node, held in by_node.items()):
                return False
        return True


def lightened(shards: tuple[BlobRef, ...]) -> tuple[BlobRef, ...]:
    """The references without the blobs inside, where these are too many to ride along in one message."""
    if sum(len(ref.inline) for ref in shards) <= MAX_INLINE_TOTAL:
        return shards
    return tuple(ref.bare() for ref in shards)
