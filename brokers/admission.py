"""Whether a contribution may come in: checks of its manifest, before any byte of its payload is taken."""

from ravnest_fed import codecs
from ravnest_fed.codecs.counters import counters_size
from ravnest_fed.errors import AdmissionRefused
from ravnest_fed.facts import BlobRef, Manifest, open_signed, within_bounds
from ravnest_fed.federation import Federation
from ravnest_fed.hashing import merkle_root
from ravnest_fed.head import Head
from ravnest_fed.identity import Signed
from ravnest_fed.manifests import require_countable
from ravnest_fed.messages import Reason
from ravnest_fed.parameters import Kind


def check_manifest(
    federation: Federation, head: Head, signed: Signed, shards: tuple[BlobRef, ...], highest_sequence: int
) -> Manifest:
    """The manifest in `signed`, if a contribution with these `shards` may be uploaded on top of `head`.

    `highest_sequence` is the highest that this broker admitted of the client. Raises AdmissionRefused with its reason.
    """
    if signed.node_id not in federation.member_by_id:
        raise AdmissionRefused(Reason.UNKNOWN_CLIENT, f"{signed.node_id[:8]} is not a member", "ask the operator")
    if not within_bounds(signed):
        raise AdmissionRefused(
            Reason.BAD_METRICS, f"the manifest has {len(signed.payload)} bytes", "send fewer metrics"
        )
    manifest = open_signed(Manifest, signed, federation.public_key(signed.node_id))
    if manifest is None or manifest.client != signed.node_id:
        raise AdmissionRefused(Reason.WRONG_SIGNATURE, "the manifest is not signed by its client")
    if head.stop:
        raise AdmissionRefused(Reason.STOPPED, f"training has ended: {head.stop}")
    if manifest.federation != federation.fingerprint:
        raise AdmissionRefused(Reason.WRONG_FEDERATION, "the contribution belongs to another federation")
    require_countable(federation, head, manifest)
    if manifest.sequence <= highest_sequence:
        raise AdmissionRefused(
            Reason.REPLAYED, f"the sequence {manifest.sequence} was used before", "use a higher one for new work"
        )
    _check_shards(federation, manifest, shards)
    return manifest


def _check_shards(federation: Federation, manifest: Manifest, shards: tuple[BlobRef, ...]) -> None:
    schema = federation.schema
    if len(shards) != len(schema.shards):
        raise AdmissionRefused(
            Reason.WRONG_SHAPE, f"the contribution has {len(shards)} shards, the schema {len(schema.shards)}"
        )
    if merkle_root("payload", [ref.hash for ref in shards]) != manifest.payload_root:
        raise AdmissionRefused(Reason.WRONG_HASH, "the shards' hashes are not those that the manifest signs")
    for shard, ref in zip(schema.shards, shards, strict=True):
        if not 0 < ref.length <= max_payload(manifest.codec, shard.kind, shard.count):
            raise AdmissionRefused(
                Reason.WRONG_LENGTH,
                f"shard {shard.index} has {ref.length} bytes, which its {shard.count} values cannot",
            )


def max_payload(codec: str, kind: Kind, count: int) -> int:
    """Most bytes that a contribution's shard of `count` values may have."""
    if kind == "counters":
        return counters_size(count)
    return codecs.get("fp32" if kind == "buffers" else codec).encoded_size(count)
