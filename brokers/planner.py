"""Work orders: what each client is asked to do in a round."""

from brokers.sizing import Sized
from ravnest_fed.facts import WorkOrder
from ravnest_fed.federation import Federation
from ravnest_fed.head import Head
from ravnest_fed.slices import size


def work_order(federation: Federation, head: Head, client: str, sized: Sized | None = None) -> WorkOrder:
    """The order for `client` on top of `head`, with the client's part of a shared data set.

    The work is the federation's, or what was sized for the client, and of shared data no more than was dealt to it.
    `committed_steps` counts the federation's `local_steps` a round in all cases, so that schedules are the same on every
    machine.
    """
    rounds = federation.rounds
    micro_batch = sized.micro_batch if sized else rounds.micro_batch
    accumulation = sized.accumulation if sized else rounds.accumulation
    steps = sized.local_steps if sized else rounds.local_steps
    if head.deal is not None:
        dealt = size(head.deal.usable(client, head.server_round, rounds.max_staleness))
        steps = max(1, min(steps, dealt // (micro_batch * accumulation)))
    members = [member.node_id for member in federation.members]
    return WorkOrder(
        federation=federation.fingerprint,
        client=client,
        base_round=head.server_round,
        base_hash=head.commit_hash,
        micro_batch=micro_batch,
        accumulation=accumulation,
        local_steps=steps,
        partition_index=members.index(client),
        partition_count=len(members),
        codec=federation.codec_up(head.server_round + 1),
        deadline_seconds=rounds.deadline_seconds,
        committed_steps=head.server_round * rounds.local_steps,
    )
