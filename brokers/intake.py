"""Uploads: from a client's offer to an admitted contribution, or to a refusal with its reason."""

from dataclasses import dataclass

from brokers.admission import check_manifest
from brokers.contributions import Contributions
from brokers.effects import Effect, Fetch, Inspect, SaveContribution, SaveEquivocation, Say, SendClient
from brokers.events import Inspected
from brokers.sequences import Sequences
from ravnest_fed.errors import AdmissionRefused
from ravnest_fed.facts import BlobRef, Manifest, Receipt, sign, signed_hash
from ravnest_fed.federation import Federation
from ravnest_fed.head import Head
from ravnest_fed.identity import Identity, Signed
from ravnest_fed.manifests import still_countable
from ravnest_fed.messages import Offer, Reason, ReceiptNotice, Refused

MAX_UPLOADS_OF_A_CLIENT = 2


@dataclass
class Upload:
    """An upload under way."""

    signed: Signed
    manifest: Manifest
    shards: tuple[BlobRef, ...]
    session: str
    missing: set[bytes]


class Intake:
    """All uploads to one broker. `admitted` collects contributions that became durable, for the round to take."""

    def __init__(self, federation: Federation, identity: Identity) -> None:
        self._federation = federation
        self._identity = identity
        self._uploads: dict[bytes, Upload] = {}
        self.refusals: dict[str, int] = {}
        self.admitted: list[Upload] = []

    def follow(self, federation: Federation) -> None:
        """Another roster is in force."""
        self._federation = federation

    def offer(self, session: str, offer: Offer, head: Head, known: Contributions, sequences: Sequences) -> list[Effect]:
        """A client offers a contribution."""
        manifest_hash = signed_hash(offer.manifest)
        same = known.get(manifest_hash)
        if same is not None and same.home == self._identity.node_id:
            return [SendClient(session, self._receipt(manifest_hash))]
        if manifest_hash in self._uploads:
            upload = self._uploads[manifest_hash]
            upload.session = session
            return [Fetch(ref, (session,), "spool") for ref in upload.shards if ref.hash in upload.missing]
        client, earlier = offer.manifest.node_id, None
        try:
            floor = 0 if known.of_client(client) else sequences.floor(client, manifest_hash)
            manifest = check_manifest(self._federation, head, offer.manifest, offer.shards, floor)
            # One that another broker announced is taken in full: that broker may be gone with the only copy.
            earlier = known.rival(manifest_hash, manifest)
            if earlier is not None or known.equivocated(client):
                raise AdmissionRefused(
                    Reason.EQUIVOCATION,
                    f"a second, different delta for round {head.server_round + 1}: neither is counted",
                    "send one delta a round",
                )
        except AdmissionRefused as error:
            effects = self._refuse(session, manifest_hash, error.reason, str(error), offer.manifest.node_id)
            if error.reason == Reason.EQUIVOCATION and earlier and not known.equivocated(earlier.manifest.client):
                known.mark_equivocator(earlier.manifest.client)
                first, second = earlier.signed, offer.manifest
                effects.append(SaveEquivocation(earlier.manifest.client, head.server_round, first, second))
            return effects
        mine = [key for key, upload in self._uploads.items() if upload.manifest.client == manifest.client]
        for key in mine[: len(mine) - MAX_UPLOADS_OF_A_CLIENT + 1]:
            del self._uploads[key]
        missing = {ref.hash for ref in offer.shards}
        self._uploads[manifest_hash] = Upload(offer.manifest, manifest, offer.shards, session, missing)
        return [Fetch(ref, (session,), "spool") for ref in offer.shards]

    def on_fetched(self, blob: bytes) -> list[Effect]:
        """A shard arrived; with the last one the contribution is inspected."""
        effects: list[Effect] = []
        for manifest_hash, upload in self._uploads.items():
            if blob in upload.missing:
                upload.missing.discard(blob)
                if not upload.missing:
                    shards = tuple(ref.bare() for ref in upload.shards)
                    effects.append(Inspect(manifest_hash, upload.manifest, shards))
        return effects

    def on_missed(self, blob: bytes, lying: tuple[str, ...]) -> list[Effect]:
        """A shard did not come: the client went, or is among the sessions that sent bytes with another hash.

        A liar hurts its own contribution alone: others that hold the same shard are asked for it again.
        """
        effects: list[Effect] = []
        for manifest_hash in [key for key, upload in self._uploads.items() if blob in upload.missing]:
            upload = self._uploads[manifest_hash]
            if upload.session in lying:
                del self._uploads[manifest_hash]
                text = "the payload's bytes have another hash than the manifest signs"
                effects += self._refuse(upload.session, manifest_hash, Reason.WRONG_HASH, text, upload.manifest.client)
            elif lying:
                effects += [Fetch(ref, (upload.session,), "spool") for ref in upload.shards if ref.hash == blob][:1]
        return effects

    def on_inspected(self, event: Inspected, head: Head) -> list[Effect]:
        """The contribution was decoded and measured."""
        upload = self._uploads.pop(event.manifest_hash, None)
        if upload is None:
            return []
        reason, text = event.reason, event.text
        if not reason and not still_countable(self._federation, head, upload.manifest):
            reason, text = Reason.OUT_OF_DATE, "the round was closed while the contribution was on its way"
        if reason:
            return self._refuse(upload.session, event.manifest_hash, reason, text, upload.manifest.client)
        self.admitted.append(upload)
        return [
            SaveContribution(upload.signed, upload.manifest, tuple(ref.bare() for ref in upload.shards)),
            SendClient(upload.session, self._receipt(event.manifest_hash)),
        ]

    def blobs_on(self, head: Head) -> set[bytes]:
        """The shards of the uploads under way that a round on top of `head` may still count."""
        going = [one for one in self._uploads.values() if still_countable(self._federation, head, one.manifest)]
        return {ref.hash for one in going for ref in one.shards}

    def forget_before(self, head: Head) -> None:
        """The commit of `head` made uploads pointless that no round on top of it may count."""
        for key, one in list(self._uploads.items()):
            if one.missing and not still_countable(self._federation, head, one.manifest):
                del self._uploads[key]

    def _receipt(self, manifest_hash: bytes) -> ReceiptNotice:
        return ReceiptNotice(sign(self._identity, Receipt(self._federation.fingerprint, manifest_hash)))

    def _refuse(self, session: str, manifest_hash: bytes, reason: str, text: str, client: str) -> list[Effect]:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        who = self._federation.name_of(client)
        return [
            SendClient(session, Refused(reason, text, manifest_hash)),
            Say("contribution refused", {"client": who, "reason": reason, "text": text}, warning=True),
        ]
