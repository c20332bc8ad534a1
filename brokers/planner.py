"""Work orders: what each client is asked to do in a round."""

from ravnest_fed.facts import WorkOrder
from ravnest_fed.federation import Federation
from ravnest_fed.head import Head


def work_order(federation: Federation, head: Head, client: str) -> WorkOrder:
    """The order for `client` on top of `head`: the federation's fixed work, and the client's part of a shared data set."""
    rounds = federation.rounds
    members = [member.node_id for member in federation.members]
    return WorkOrder(
        federation=federation.fingerprint,
        client=client,
        base_round=head.server_round,
        base_hash=head.commit_hash,
        micro_batch=rounds.micro_batch,
        accumulation=rounds.accumulation,
        local_steps=rounds.local_steps,
        partition_index=members.index(client),
        partition_count=len(members),
        codec=federation.codec_up(head.server_round + 1),
        deadline_seconds=rounds.deadline_seconds,
        committed_steps=head.server_round * rounds.local_steps,
    )
