"""Whether a contribution may come in: checks of its manifest, before any byte of its payload is taken."""

import math

from ravnest_fed import codecs
from ravnest_fed.aggregation.fixed_point import value_bits
from ravnest_fed.codecs.counters import counters_size
from ravnest_fed.decree import order_of
from ravnest_fed.errors import AdmissionRefused
from ravnest_fed.federation import Federation
from ravnest_fed.hashing import merkle_root
from ravnest_fed.head import Head
from ravnest_fed.identity import Signed
from ravnest_fed.messages import BlobRef, Manifest, Reason, open_signed

MAX_ABS = 2.0**64
"""No delta of a training that goes well holds a greater value; the first round has no other bound."""


def check_manifest(
    federation: Federation, head: Head, signed: Signed, shards: tuple[BlobRef, ...], highest_sequence: int
) -> Manifest:
    """The manifest in `signed`, if a contribution with these `shards` may be uploaded on top of `head`.

    `highest_sequence` is the highest that this broker admitted of the client. Raises AdmissionRefused with its reason.
    """
    if signed.node_id not in federation.member_by_id:
        raise AdmissionRefused(Reason.UNKNOWN_CLIENT, f"{signed.node_id[:8]} is not a member", "ask the operator")
    manifest = open_signed(Manifest, signed, federation.public_key(signed.node_id))
    if manifest is None or manifest.client != signed.node_id:
        raise AdmissionRefused(Reason.WRONG_SIGNATURE, "the manifest is not signed by its client")
    if head.stop:
        raise AdmissionRefused(Reason.STOPPED, f"training has ended: {head.stop}")
    if manifest.federation != federation.fingerprint:
        raise AdmissionRefused(Reason.WRONG_FEDERATION, "the contribution belongs to another federation")
    _check_base(federation, head, manifest, highest_sequence)
    _check_work(federation, manifest)
    _check_payload(federation, head, manifest, shards)
    return manifest


def _check_base(federation: Federation, head: Head, manifest: Manifest, highest_sequence: int) -> None:
    if manifest.base_round < head.server_round or manifest.last_round < head.server_round + 1:
        raise AdmissionRefused(
            Reason.OUT_OF_DATE,
            f"the contribution is based on round {manifest.base_round}, the head is {head.server_round}",
        )
    if manifest.base_round != head.server_round or manifest.base_hash != head.commit_hash:
        raise AdmissionRefused(Reason.WRONG_BASE, "the contribution's base is not the head", "fetch the commits first")
    if manifest.last_round != manifest.base_round + 1:
        raise AdmissionRefused(Reason.WRONG_BASE, "the contribution's last round is not the one after its base")
    if manifest.sequence < 1 or manifest.sequence > 2**48:
        raise AdmissionRefused(Reason.REPLAYED, f"the sequence {manifest.sequence} is out of bounds")
    if manifest.sequence <= highest_sequence or head.was_counted(manifest.client, manifest.sequence):
        raise AdmissionRefused(
            Reason.REPLAYED, f"the sequence {manifest.sequence} was used before", "use a higher one for new work"
        )
    if order_of(federation, manifest) is None:
        raise AdmissionRefused(Reason.WRONG_ORDER, "no broker signed the work order of this contribution")


def _check_work(federation: Federation, manifest: Manifest) -> None:
    order = order_of(federation, manifest)
    assert order is not None
    if not 1 <= manifest.local_steps <= order.local_steps:
        raise AdmissionRefused(
            Reason.BAD_COUNT, f"local_steps is {manifest.local_steps}, the work order asks for {order.local_steps}"
        )
    most = order.micro_batch * order.accumulation * manifest.local_steps
    if not 1 <= manifest.num_examples <= most:
        raise AdmissionRefused(
            Reason.BAD_COUNT, f"num_examples is {manifest.num_examples}, the work done allows 1 to {most}"
        )
    if not (math.isfinite(manifest.training_seconds) and manifest.training_seconds >= 0):
        raise AdmissionRefused(Reason.BAD_COUNT, "training_seconds is not a duration")
    if len(manifest.metrics) > federation.limits.max_metrics or not all(
        math.isfinite(value) and 0 < len(name) <= 64 for name, value in manifest.metrics.items()
    ):
        raise AdmissionRefused(Reason.BAD_METRICS, "the metrics are too many or not finite numbers")


def _check_payload(federation: Federation, head: Head, manifest: Manifest, shards: tuple[BlobRef, ...]) -> None:
    schema = federation.schema
    if manifest.codec != federation.codecs.up:
        raise AdmissionRefused(Reason.WRONG_CODEC, f"the codec is {manifest.codec[:16]!r}, not {federation.codecs.up}")
    if manifest.shard_count != len(schema.shards) or len(shards) != len(schema.shards):
        raise AdmissionRefused(
            Reason.WRONG_SHAPE, f"the contribution has {len(shards)} shards, the schema {len(schema.shards)}"
        )
    if merkle_root("payload", [ref.hash for ref in shards]) != manifest.payload_root:
        raise AdmissionRefused(Reason.WRONG_HASH, "the shards' hashes are not those that the manifest signs")
    for shard, ref in zip(schema.shards, shards, strict=True):
        if not 0 < ref.length <= max_payload(federation, shard.kind, shard.count):
            raise AdmissionRefused(
                Reason.WRONG_LENGTH,
                f"shard {shard.index} has {ref.length} bytes, which its {shard.count} values cannot",
            )
    if not (math.isfinite(manifest.norm) and math.isfinite(manifest.max_abs)):
        raise AdmissionRefused(Reason.NOT_FINITE, "the delta's norm is not finite")
    if manifest.norm < 0 or manifest.max_abs < 0:
        raise AdmissionRefused(Reason.WRONG_NORM, "the delta's norm is negative")
    limit = MAX_ABS
    if head.scale_bits is not None:
        limit = min(limit, 2.0 ** (value_bits(federation.limits.max_contributions) - head.scale_bits))
    if manifest.max_abs >= limit:
        raise AdmissionRefused(
            Reason.OUT_OF_RANGE,
            f"a value of the delta is {manifest.max_abs:.3g}, this round's fixed point reaches {limit:.3g}",
            "lower the learning rate",
        )


def max_payload(federation: Federation, kind: str, count: int) -> int:
    """Most bytes that a contribution's shard of `count` values may have."""
    if kind == "counters":
        return counters_size(count)
    return codecs.get("fp32" if kind == "buffers" else federation.codecs.up).encoded_size(count)
