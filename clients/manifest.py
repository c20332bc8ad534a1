"""What a client signs about one local round."""

from clients.events import Trained
from ravnest_fed.facts import Manifest, WorkOrder
from ravnest_fed.hashing import merkle_root
from ravnest_fed.identity import Signed
from ravnest_fed.slices import Slice, first


def manifest_for(
    order: WorkOrder, signed: Signed, slice: Slice, done: Trained, sequence: int, max_staleness: int
) -> Manifest:
    """The manifest of what was done for `order`, which came as `signed`: the counts are those of the work done.

    The first samples of `slice` are those that it was done on.

    A round may count it until the model is `max_staleness` rounds past the one it was made on.
    """
    return Manifest(
        federation=order.federation,
        client=order.client,
        sequence=sequence,
        base_round=order.base_round,
        base_hash=order.base_hash,
        last_round=order.base_round + 1 + max_staleness,
        codec=order.codec,
        payload_root=merkle_root("payload", [ref.hash for ref in done.shards]),
        shard_count=len(done.shards),
        num_examples=done.num_examples,
        local_steps=done.local_steps,
        norm=done.norm,
        max_abs=done.max_abs,
        metrics=done.metrics,
        training_seconds=done.seconds,
        order=signed,
        slice=first(slice, done.num_examples),
    )
