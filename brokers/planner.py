"""Work orders: what each client is asked to do in a round."""

from brokers.sizing import Sized
from ravnest_fed.facts import WorkOrder
from ravnest_fed.federation import Federation
from ravnest_fed.head import Head


def work_order(federation: Federation, head: Head, client: str, sized: Sized | None = None) -> WorkOrder:
    """The order for `client` on top of `head`, with the client's part of a shared data set.

    The work is the federation's, or what was sized for the client. `committed_steps` counts the federation's
    `local_steps` a round in both cases, so that schedules are the same on every machine.
    """
    rounds = federation.rounds
    members = [member.node_id for member in federation.members]
    return WorkOrder(
        federation=federation.fingerprint,
        client=client,
        base_round=head.server_round,
        base_hash=head.commit_hash,
        micro_batch=sized.micro_batch if sized else rounds.micro_batch,
        accumulation=sized.accumulation if sized else rounds.accumulation,
        local_steps=sized.local_steps if sized else rounds.local_steps,
        partition_index=members.index(client),
        partition_count=len(members),
        codec=federation.codec_up(head.server_round + 1),
        deadline_seconds=rounds.deadline_seconds,
        committed_steps=head.server_round * rounds.local_steps,
    )
