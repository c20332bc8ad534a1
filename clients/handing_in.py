"""A client's own contribution, from its signature to the commit that settles it. Events and facts in, effects out.

It is kept and offered again, the same bytes, to whatever home there is, until a commit counts it or no later round may.
"""

from dataclasses import dataclass

import msgspec

from clients import effects as fx
from clients.events import Trained
from clients.manifest import manifest_for
from clients.residual import Standing
from ravnest_fed.facts import BlobRef, Manifest, Receipt, WorkOrder, decode, open_signed, sign, signed_hash
from ravnest_fed.federation import Federation
from ravnest_fed.head import Head
from ravnest_fed.identity import Identity, Signed
from ravnest_fed.messages import Offer, Reason, Refused
from ravnest_fed.slices import Slice

PASSING = ("", Reason.WRONG_BASE, Reason.COUNTED)
"""Refusals that say nothing against the contribution: the broker has not reached its base, or is past its commit."""
MAX_OFFER_INLINE = 256 * 1024
"""Most bytes of blobs that ride along in one offer."""


@dataclass
class _Pending:
    """The contribution that waits to be counted."""

    manifest: Manifest
    offer: Offer
    manifest_hash: bytes
    sequences: tuple[int, ...]
    receipted: bool = False
    refused: str = ""


class HandingIn:
    """What one client has to hand in. `home` is the name of the broker that was greeted, None without one."""

    def __init__(self, identity: Identity, kept: Standing | None) -> None:
        """`kept` is what an earlier life of this client left on disk."""
        self.counted = 0
        """How many contributions a commit counted."""
        self._identity = identity
        self._pending: _Pending | None = None
        if kept is not None and kept.offer is not None:
            signed = kept.offer.manifest
            self._pending = _Pending(decode(Manifest, signed.payload), kept.offer, signed_hash(signed), kept.sequences)
        self._sequence = self._pending.manifest.sequence if self._pending else 0
        self._leap = 1

    @property
    def waits(self) -> bool:
        """Whether there is something that no broker has answered for."""
        return self._pending is not None and not self._pending.receipted and not self._pending.refused

    @property
    def unsettled(self) -> bool:
        """Whether a round may still count what was handed in, or is to be handed in."""
        return self._pending is not None and self._pending.refused in PASSING

    @property
    def base_round(self) -> int:
        """What the contribution is based on; -1 without one."""
        return self._pending.manifest.base_round if self._pending else -1

    def at_another_home(self) -> None:
        """A broker that knows of nothing is home now."""
        if self._pending is not None:
            self._pending.receipted = False

    def go_on_above(self, sequence: int) -> None:
        """This sequence was used before."""
        self._sequence = max(self._sequence, sequence)

    @property
    def slice(self) -> Slice:
        """The samples of shared data that a round may still cover for this client."""
        return self._pending.manifest.slice if self._pending is not None and self.unsettled else ()

    def sign(self, order: WorkOrder, signed: Signed, slice: Slice, done: Trained, max_staleness: int) -> fx.Effect:
        """Sign what was done for `order` on `slice`, in the place of anything before."""
        self._sequence += 1
        manifest = manifest_for(order, signed, slice, done, self._sequence, max_staleness)
        return self._keep(manifest, done.shards, done.residual, done.control)

    def offer(self, home: str | None) -> list[fx.Effect]:
        """Offer it to the home broker."""
        if self._pending is None or home is None:
            return []
        offer = self._pending.offer
        if sum(len(ref.inline) for ref in offer.shards) > MAX_OFFER_INLINE:
            offer = Offer(offer.manifest, tuple(ref.bare() for ref in offer.shards))
        return [fx.Send(home, offer)]

    def offer_anew(self, base_round: int, home: str | None) -> list[fx.Effect] | None:
        """The home has reached `base_round`: what it refused for being behind is offered again.

        None where nothing based on that round is under way.
        """
        pending = self._pending
        if pending is None or pending.manifest.base_round != base_round or pending.receipted:
            return None
        if pending.refused not in PASSING:
            return []
        pending.refused = ""
        return self.offer(home)

    def receipt(self, signed: Signed, federation: Federation, home: str | None) -> list[fx.Effect]:
        """A broker says that it took the contribution."""
        if self._pending is None or signed.node_id not in federation.broker_by_id:
            return []
        receipt = open_signed(Receipt, signed, federation.public_key(signed.node_id))
        if receipt is None or receipt.manifest_hash != self._pending.manifest_hash or self._pending.receipted:
            return []
        self._pending.receipted = True
        return [fx.Tell("contribution taken", {"round": self._pending.manifest.base_round + 1, "broker": home})]

    def names(self, manifest_hash: bytes) -> bool:
        """Whether this is the contribution with that manifest."""
        return self._pending is not None and self._pending.manifest_hash == manifest_hash

    def refused(self, refused: Refused, home: str | None) -> list[fx.Effect]:
        """The home does not take it."""
        pending = self._pending
        if pending is None:
            return []
        pending.refused = refused.reason
        if refused.reason == Reason.COUNTED:
            return []
        told = fx.Tell("contribution refused", {"reason": refused.reason, "text": refused.text[:300]}, warning=True)
        if refused.reason != Reason.REPLAYED:
            return [told]
        # An earlier life of this client, whose memory is gone, used the sequence: go on above it.
        self._leap *= 2
        self._sequence += self._leap
        manifest = msgspec.structs.replace(pending.manifest, sequence=self._sequence)
        return [told, self._keep(manifest, pending.offer.shards, earlier=pending.sequences), *self.offer(home)]

    def moved_to(self, head: Head, home: str | None) -> list[fx.Effect]:
        """What became of the contribution stands in the commits up to `head`; what may still count is offered on."""
        pending, me = self._pending, self._identity.node_id
        counted = head.counted.get(me)
        if counted is not None:
            self.go_on_above(counted.highest)
        if pending is None or head.server_round <= pending.manifest.base_round:
            return []
        # One payload may have been signed twice: it is owed again only if no commit counted it under either sequence.
        if any(head.was_counted(me, one) for one in pending.sequences):
            self._pending = None
            self.counted += 1
            return [fx.Forget()]
        if head.server_round >= pending.manifest.last_round:
            self._pending = None
            told = fx.Tell("contribution not counted", {"round": head.server_round}, warning=True)
            return [told, fx.Forget(counted=False)]
        return [] if pending.receipted or pending.refused not in PASSING else self.offer(home)

    def _keep(
        self,
        manifest: Manifest,
        shards: tuple[BlobRef, ...],
        residual: tuple[BlobRef, ...] | None = None,
        control: tuple[BlobRef, ...] | None = None,
        earlier: tuple[int, ...] = (),
    ) -> fx.Effect:
        proof = sign(self._identity, manifest)
        sequences = (*earlier, manifest.sequence)
        self._pending = _Pending(manifest, Offer(proof, shards), signed_hash(proof), sequences)
        return fx.Keep(self._pending.offer, residual, control)
