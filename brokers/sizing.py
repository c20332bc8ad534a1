"""How much work each client is given, so that all finish a round together: pure functions from measurements to orders.

A client's round is download, training and upload; its steps are those that fill the target time. The batch of one
optimiser step stays the federation's on every machine: memory decides only into how many micro-batches it is cut. As
FedCompass does (Li et al., "FedCompass: efficient cross-silo federated learning on heterogeneous client devices using a
computing power aware scheduler", 2024), steps are time left over seconds a step; here for synchronous rounds, with
communication taken off first.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_low

from brokers.history import History
from ravnest_fed.capability import Capability

COMMUNICATION_SHARE = 0.1
"""The most of an automatic target that communication may take."""
FIRST_FACTOR = 4
"""A first order asks for at most so many times the federation's `local_steps`: a claim is not yet a delivery."""


@dataclass(frozen=True)
class Bounds:
    """What the federation allows: the batch of a step as micro-batches, and steps a round."""

    micro_batch: int
    accumulation: int
    local_steps: int
    min_steps: int
    max_steps: int

    @property
    def batch(self) -> int:
        """Examples of one optimiser step."""
        return self.micro_batch * self.accumulation


@dataclass(frozen=True)
class Transfer:
    """Bytes of a round that a client sends and fetches."""

    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True)
class Client:
    """What a broker knows of a client."""

    capability: Capability | None = None
    history: History = field(default_factory=History)


@dataclass(frozen=True)
class Sized:
    """One client's work, the seconds that it should take (None: nothing is known), and why, by number."""

    micro_batch: int
    accumulation: int
    local_steps: int
    seconds: float | None
    reasons: dict[str, str]

    @property
    def max_examples(self) -> int:
        """Most examples that the work covers."""
        return self.micro_batch * self.accumulation * self.local_steps


def plan(
    clients: Mapping[str, Client], target_seconds: float | None, bounds: Bounds, transfer: Transfer
) -> dict[str, Sized]:
    """The work of every client for rounds of `target_seconds`; None finds the target as `auto_target` does."""
    if target_seconds is None:
        found = auto_target(clients.values(), bounds, transfer)
        target_seconds = found[0] if found else None
    return {name: size(client, target_seconds, bounds, transfer) for name, client in clients.items()}


def size(client: Client, target_seconds: float | None, bounds: Bounds, transfer: Transfer) -> Sized:
    """One client's work for a round of `target_seconds`; without a target, or any speed, the federation's steps."""
    micro_batch, accumulation, reasons = cut(client.capability, bounds)
    step_seconds, speed_reason = _step_seconds(client, micro_batch, micro_batch * accumulation)
    communication, communication_reason = _communication(client, transfer)
    if step_seconds is None or target_seconds is None:
        why = speed_reason if step_seconds is None else "no target time is known yet"
        reasons["local_steps"] = f"the federation's: {why}"
        seconds = None if step_seconds is None else communication + bounds.local_steps * step_seconds
        return Sized(micro_batch, accumulation, bounds.local_steps, seconds, reasons)
    left = target_seconds - communication
    # No client makes more steps than that, and a claim of endless speed must not reach the division.
    steps = round(min(max(left, 0.0) / step_seconds, 2.0 * bounds.max_steps))
    reason = (
        f"{left:.3g} s of {target_seconds:.3g} s are left after {communication:.3g} s of communication "
        f"({communication_reason}), at {step_seconds:.3g} s a step ({speed_reason})"
    )
    if left <= 0:
        reason = f"communication alone takes {communication:.3g} s of {target_seconds:.3g} s ({communication_reason})"
    proven = client.history.most_steps(target_seconds)
    first = FIRST_FACTOR * bounds.local_steps
    if proven is None and steps > first:
        steps, reason = first, f"a first order: at most {FIRST_FACTOR} times the federation's {bounds.local_steps}"
    elif proven is not None and steps > proven:
        steps, reason = proven, f"the most that its last delivery justifies for {target_seconds:.3g} s"
    if steps > bounds.max_steps:
        steps, reason = bounds.max_steps, "the most that the federation allows"
    elif steps < bounds.min_steps:
        steps, reason = bounds.min_steps, f"the least that the federation allows: {reason}"
    reasons["local_steps"] = reason
    return Sized(micro_batch, accumulation, steps, communication + steps * step_seconds, reasons)


def cut(capability: Capability | None, bounds: Bounds) -> tuple[int, int, dict[str, str]]:
    """The federation's batch as (micro-batch, accumulation) for a machine, with the reasons.

    Where the batch does not divide, it is up to accumulation - 1 examples smaller, never greater.
    """
    batch = bounds.batch
    if capability is None or not capability.speeds:
        same = "the federation's: this machine was not measured"
        return bounds.micro_batch, bounds.accumulation, {"micro_batch": same, "accumulation": same}
    most = capability.max_micro_batch
    if most is not None and most <= max(bounds.micro_batch, capability.micro_batch) and most < batch:
        wanted, why = most, f"memory takes {most} at once"
    elif capability.micro_batch > bounds.micro_batch:
        wanted, why = (
            min(capability.micro_batch, batch),
            f"this machine is fastest from {capability.micro_batch} at once",
        )
    else:
        # A slower micro-batch of the recipe's choice is kept: a busy machine measures badly.
        wanted, why = bounds.micro_batch, "the federation's: it fits"
    accumulation = -(-batch // wanted)
    micro_batch = batch // accumulation
    made = f"{accumulation} x {micro_batch} make the {batch} examples of a step"
    if micro_batch * accumulation < batch:
        made = f"{accumulation} x {micro_batch} come nearest to the {batch} examples of a step"
    return micro_batch, accumulation, {"micro_batch": why, "accumulation": made}


def auto_target(clients: Iterable[Client], bounds: Bounds, transfer: Transfer) -> tuple[float, str] | None:
    """A round's length in seconds, and why; None while no client's speed is known.

    Long enough for the federation's `local_steps` on the median machine and for communication to stay under a tenth on
    every one; short enough that the median machine makes no more than `max_steps`, for the sake of the loss.
    """
    steps, communications = [], []
    for client in clients:
        micro_batch, accumulation, _ = cut(client.capability, bounds)
        step_seconds, _ = _step_seconds(client, micro_batch, micro_batch * accumulation)
        if step_seconds is not None:
            steps.append(step_seconds)
            communications.append(_communication(client, transfer)[0])
    if not steps:
        return None
    slowest, step = max(communications), median_low(steps)
    between = median_low(communications)
    usual = between + bounds.local_steps * step
    longest = between + bounds.max_steps * step
    wanted = slowest / COMMUNICATION_SHARE
    if wanted >= longest:
        return longest, f"{bounds.max_steps} steps of the median machine, the most for the sake of the loss"
    if wanted > usual:
        return wanted, f"{slowest:.3g} s of communication are a tenth of it"
    return usual, f"{bounds.local_steps} steps of the median machine"


def _step_seconds(client: Client, micro_batch: int, batch: int) -> tuple[float | None, str]:
    """Seconds of one optimiser step, by what rounds took or else by what was measured; and which of them."""
    speed = client.history.speed.value
    if speed is not None:
        return batch / speed, f"by {client.history.rounds} rounds"
    claimed = client.capability.speed_at(micro_batch) if client.capability is not None else None
    if claimed is not None:
        return batch / claimed, "as measured by the client"
    return None, "no speed is known yet"


def _communication(client: Client, transfer: Transfer) -> tuple[float, str]:
    """Seconds of a round that are not training, and where the number comes from."""
    seen = client.history.overhead
    if seen is not None:
        return seen, f"by {client.history.rounds} rounds"
    capability = client.capability
    up = capability.bandwidth_up if capability is not None else None
    down = capability.bandwidth_down if capability is not None else None
    seconds = (transfer.bytes_up / up if up else 0.0) + (transfer.bytes_down / down if down else 0.0)
    return seconds, "by measured bandwidth" if up and down else "bandwidth is not measured yet"
