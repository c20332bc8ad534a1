"""When a broker folds its log into a checkpoint, and what it offers to somebody who is behind. Pure counting."""

from collections.abc import Mapping, Sequence

from brokers.effects import Effect, Say, SendCheckpoint, SendCommits, WriteCheckpoint
from ravnest_fed.facts import BlobRef, Body
from ravnest_fed.federation import Checkpoints
from ravnest_fed.identity import Signed
from ravnest_fed.messages import PeerHello


def update_bytes(body: Body) -> int:
    """How many bytes somebody fetches to fold this commit."""
    return sum(ref.length for ref in body.updates)


class Consolidation:
    """The checkpoints and commits that one broker's ledger holds, by round and bytes."""

    def __init__(
        self, settings: Checkpoints, checkpoints: Sequence[tuple[int, BlobRef]], sizes: Mapping[int, int]
    ) -> None:
        """`checkpoints` are the ledger's, oldest first; `sizes` the bytes of each commit's update, by round."""
        self._settings = settings
        self._checkpoints = list(checkpoints)
        self._sizes = dict(sizes)
        self._differing: set[tuple[str, int]] = set()

    @property
    def newest(self) -> tuple[int, BlobRef | None]:
        """The newest checkpoint's round and blob; 0 and None before the first."""
        return self._checkpoints[-1] if self._checkpoints else (0, None)

    def committed(self, body: Body) -> list[Effect]:
        """A round was committed and folded: whether its model is written as a checkpoint."""
        self._sizes[body.server_round] = update_bytes(body)
        every = self._settings.checkpoint_every
        due = every > 0 and body.server_round % every == 0
        return [WriteCheckpoint(body.server_round)] if due else []

    def written(self, server_round: int, ref: BlobRef) -> None:
        """A checkpoint is in the ledger, and what is older than the last `keep` has gone."""
        if server_round <= self.newest[0]:
            return
        self._checkpoints.append((server_round, ref))
        del self._checkpoints[: -self._settings.keep]
        self._forget_before(self._checkpoints[0][0])

    def adopted(self, server_round: int, ref: BlobRef) -> None:
        """Another broker's checkpoint took the place of everything."""
        self._checkpoints = [(server_round, ref)]
        self._forget_before(server_round)

    def offer(self, to: str, peer: bool, after: int, changes: tuple[tuple[int, Signed], ...] = ()) -> Effect:
        """What somebody at round `after` is sent: the commits, or a checkpoint where these are gone or the larger part.

        `changes` are those of the roster so far.
        """
        newest, ref = self.newest
        if ref is not None and newest > after:
            missing = range(after + 1, newest + 1)
            gone = any(server_round not in self._sizes for server_round in missing)
            if gone or sum(self._sizes[server_round] for server_round in missing) > ref.length:
                return SendCheckpoint(to, peer, newest, ref, changes)
        return SendCommits(to, peer, after)

    def compare(self, node_id: str, hello: PeerHello) -> list[Effect]:
        """Whether another broker's checkpoint of the same round is the same file."""
        newest, ref = self.newest
        if ref is None or hello.checkpoint_round != newest or hello.checkpoint == ref.hash:
            return []
        if (node_id, newest) in self._differing:
            return []
        self._differing = {(node_id, newest)}
        text = "both hold the committed state, but write it differently: run the same version on all brokers"
        return [Say("checkpoint differs", {"broker": node_id[:8], "round": newest, "finding": text}, warning=True)]

    def _forget_before(self, server_round: int) -> None:
        # The commit of the oldest checkpoint stays, but its update cannot be folded on anything that is kept.
        self._sizes = {number: size for number, size in self._sizes.items() if number > server_round}
