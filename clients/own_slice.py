"""Which samples of shared data a client trains on next: a pure function of the head's deal and of what is under way."""

from ravnest_fed.facts import WorkOrder
from ravnest_fed.head import Head
from ravnest_fed.slices import Slice, first, size, without


def next_slice(order: WorkOrder, head: Head, under_way: Slice, max_staleness: int) -> Slice | None:
    """The lowest positions of the client's region that fill whole steps of `order`, () where data is not shared.

    Samples `under_way` in a contribution that a round may still count are left out, unless there are no others: one of
    the two contributions will then be refused. None where the region has too few samples for a step.
    """
    if head.deal is None:
        return ()
    step = order.micro_batch * order.accumulation
    usable = head.deal.usable(order.client, order.base_round, max_staleness)
    left = without(usable, under_way)
    if size(left) < step:
        left = usable
    steps = min(order.local_steps, size(left) // step)
    return first(left, steps * step) if steps else None
