"""What a manifest must say to be counted on top of a head. Admission, voters and verifiers ask the same."""

import math

from ravnest_fed.aggregation.fixed_point import value_bits
from ravnest_fed.errors import AdmissionRefused
from ravnest_fed.facts import Manifest, WorkOrder, open_signed
from ravnest_fed.federation import Federation
from ravnest_fed.head import Head
from ravnest_fed.messages import Reason
from ravnest_fed.slices import is_slice, size

MAX_SEQUENCE = 2**48
MAX_ABS = 2.0**64
"""No delta of a training that goes well holds a greater value; the first round has no other bound."""


def require_countable(federation: Federation, head: Head, manifest: Manifest) -> None:
    """Raise AdmissionRefused, with its reason, unless a round on top of `head` may count `manifest`."""
    _require_base(federation, head, manifest)
    order = order_of(federation, manifest)
    if order is None:
        raise AdmissionRefused(Reason.WRONG_ORDER, "no broker signed the work order of this contribution")
    _require_work(federation, manifest, order)
    _require_slice(head, manifest)
    _require_values(federation, head, manifest)


def has_base(head: Head, manifest: Manifest) -> bool:
    """Whether a manifest's delta was taken from the head's model, or from one that is not too old to count."""
    return manifest.base_hash == head.base_hash(manifest.base_round)


def still_countable(federation: Federation, head: Head, manifest: Manifest) -> bool:
    """Whether a round on top of `head` may count `manifest`."""
    try:
        require_countable(federation, head, manifest)
    except AdmissionRefused:
        return False
    return True


def _require_base(federation: Federation, head: Head, manifest: Manifest) -> None:
    most = federation.rounds.max_staleness
    if manifest.base_round < head.server_round - most or manifest.last_round < head.server_round + 1:
        raise AdmissionRefused(
            Reason.OUT_OF_DATE,
            f"the contribution is based on round {manifest.base_round}, the head is {head.server_round}",
        )
    if not has_base(head, manifest):
        raise AdmissionRefused(
            Reason.WRONG_BASE, "the contribution's base is no commit known here", "fetch the commits first"
        )
    if manifest.last_round != manifest.base_round + 1 + most:
        raise AdmissionRefused(Reason.WRONG_BASE, f"the contribution's last round is not its base and {1 + most}")
    if not 1 <= manifest.sequence <= MAX_SEQUENCE:
        raise AdmissionRefused(Reason.REPLAYED, f"the sequence {manifest.sequence} is out of bounds")
    if head.was_counted(manifest.client, manifest.sequence):
        raise AdmissionRefused(Reason.COUNTED, f"the sequence {manifest.sequence} was counted before")


def _require_work(federation: Federation, manifest: Manifest, order: WorkOrder) -> None:
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


def _require_slice(head: Head, manifest: Manifest) -> None:
    if head.deal is None:
        if manifest.slice:
            raise AdmissionRefused(Reason.WRONG_SLICE, "the contribution names a slice, but clients share no data here")
        return
    if not is_slice(manifest.slice) or size(manifest.slice) != manifest.num_examples:
        raise AdmissionRefused(
            Reason.WRONG_SLICE, f"the slice is not one of the {manifest.num_examples} samples that were trained on"
        )
    if not head.deal.holds(manifest.client, manifest.slice):
        raise AdmissionRefused(
            Reason.WRONG_SLICE,
            "samples of the slice were never dealt to this client, or are dealt anew or covered by now",
        )


def _require_values(federation: Federation, head: Head, manifest: Manifest) -> None:
    codec = federation.codec_up(manifest.base_round + 1)
    if manifest.codec != codec:
        raise AdmissionRefused(Reason.WRONG_CODEC, f"the codec is {manifest.codec[:16]!r}, not {codec}")
    if codec != federation.codec_up(head.server_round + 1):
        raise AdmissionRefused(Reason.OUT_OF_DATE, f"the codec {codec} of its round is not the open round's any more")
    if manifest.shard_count != len(federation.schema.shards):
        raise AdmissionRefused(
            Reason.WRONG_SHAPE,
            f"the contribution has {manifest.shard_count} shards, the schema {len(federation.schema.shards)}",
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


def order_of(federation: Federation, manifest: Manifest) -> WorkOrder | None:
    """The work order that a manifest fulfils, or None if no broker of the roster signed it for this client and base."""
    signed = manifest.order
    if signed.node_id not in federation.broker_by_id:
        return None
    order = open_signed(WorkOrder, signed, federation.public_key(signed.node_id))
    if (
        order is None
        or order.federation != federation.fingerprint
        or order.client != manifest.client
        or order.base_round != manifest.base_round
        or order.base_hash != manifest.base_hash
        or order.max_examples > federation.max_examples
    ):
        return None
    return order
