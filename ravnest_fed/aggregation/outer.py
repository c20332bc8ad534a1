"""Outer optimisers: how an update moves the parameters.

An update is a mean delta (base minus local), a pseudo-gradient. Folding it is elementwise: each step is one float32
multiplication, addition, subtraction, division or square root, correctly rounded, and every result is flushed (see
`flush_tiny`), so that all replicas hold the same bits whatever their processor does with subnormals. A power such as
beta^t is a running product: libraries differ in their `pow`.
"""

from abc import ABC, abstractmethod
from typing import Final

import numpy as np

from ravnest_fed.codecs.base import slices
from ravnest_fed.codecs.float_bits import all_finite, flush_tiny
from ravnest_fed.errors import PayloadError, UsageError
from ravnest_fed.parameters import Float32, Int64

BETA2: Final = 0.99
EPSILON: Final = 1e-3
"""What Reddi et al. (2021) found to serve most tasks."""
CONTROL: Final = "control"
"""The state vector of SCAFFOLD: the mean of the members' controls."""
_ONE: Final = np.float32(1.0)
_GREATEST: Final = np.finfo(np.float32).max


class OuterOptimizer(ABC):
    """Moves parameters by updates. Holds settings alone; the state is the replica's."""

    def state_names(self) -> tuple[str, ...]:
        """Names of the state vectors: float32, as long as the parameters, zero at the beginning."""
        return ()

    def scalars(self, previous: tuple[np.float32, ...]) -> tuple[np.float32, ...]:
        """The scalars that the round after the one with `previous` steps with, such as running products of a rate.

        `previous` is empty before the first round. They are part of the replicated state; none by default.
        """
        return ()

    def taken(self, effective_steps: float, participation: float) -> tuple[np.float32, ...]:
        """Further scalars of one round's step, which follow from what it took in; none by default.

        `effective_steps` is what the mean of normalised deltas was multiplied by (1 where none are), `participation` the
        part of the members that was counted, at most 1. They come behind those of `scalars` and are not kept.
        """
        return ()

    def step(
        self,
        parameters: Float32,
        update: Float32,
        state: tuple[Float32, ...] = (),
        scalars: tuple[np.float32, ...] = (),
    ) -> None:
        """Fold `update` into `parameters` and `state`, in place; all are equally long slices, contiguous and float32.

        Elements do not depend on each other, so any cut into slices gives the same bits.
        """
        for start, stop in slices(parameters.size):
            parts = tuple(vector[start:stop] for vector in state)
            self._step(parameters[start:stop], update[start:stop], parts, scalars)

    @abstractmethod
    def _step(
        self, parameters: Float32, update: Float32, state: tuple[Float32, ...], scalars: tuple[np.float32, ...]
    ) -> None:
        """`step` on a slice that fits the cache."""


class FedAvg(OuterOptimizer):
    """parameters -= learning_rate * update. McMahan et al., "Communication-efficient learning" (2017)."""

    def __init__(self, learning_rate: float = 1.0) -> None:
        self._rate = np.float32(learning_rate)

    def _step(
        self, parameters: Float32, update: Float32, state: tuple[Float32, ...], scalars: tuple[np.float32, ...]
    ) -> None:
        _subtract(parameters, _times(self._rate, update))


class FedAvgM(OuterOptimizer):
    """velocity = momentum * velocity + update; parameters -= learning_rate * velocity.

    With `nesterov`, learning_rate * (momentum * velocity + update) is taken off instead. Hsu et al., "Measuring the
    effects of non-identical data distribution" (2019); with Nesterov's momentum Douillard et al., "DiLoCo" (2023).
    """

    def __init__(self, learning_rate: float = 1.0, momentum: float = 0.0, nesterov: bool = False) -> None:
        self._rate = np.float32(learning_rate)
        self._momentum = np.float32(momentum)
        self._nesterov = nesterov

    def state_names(self) -> tuple[str, ...]:
        return ("velocity",)

    def _step(
        self, parameters: Float32, update: Float32, state: tuple[Float32, ...], scalars: tuple[np.float32, ...]
    ) -> None:
        (velocity,) = state
        self._push(velocity, update, velocity)
        direction = velocity
        if self._nesterov:
            direction = np.empty_like(velocity)
            self._push(velocity, update, direction)
        _subtract(parameters, _times(self._rate, direction))

    def _push(self, velocity: Float32, update: Float32, out: Float32) -> None:
        np.add(_times(self._momentum, velocity), update, out=out)
        flush_tiny(out)


class Scaffold(OuterOptimizer):
    """FedAvg with control variates, which keep unlike clients from drifting apart within a round.

    Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning" (2020), with their second way
    of renewing a client's control. Controls are kept in units of a local step: a local step moves the parameters by
    `client control - control` on top of what its optimiser says, whatever optimiser that is. What a client then moved by
    a step is its control's successor plus `control - client control`; so the members' mean control follows from the mean
    of normalised deltas alone, which is update / effective_steps, and no control ever travels:

    parameters -= learning_rate * update; control += participation * (update / effective_steps - control).
    """

    def __init__(self, learning_rate: float = 1.0) -> None:
        self._rate = np.float32(learning_rate)

    def state_names(self) -> tuple[str, ...]:
        return (CONTROL,)

    def taken(self, effective_steps: float, participation: float) -> tuple[np.float32, ...]:
        return np.float32(effective_steps), np.float32(participation)

    def _step(
        self, parameters: Float32, update: Float32, state: tuple[Float32, ...], scalars: tuple[np.float32, ...]
    ) -> None:
        (control,), (steps, participation) = state, scalars
        mean = update / steps
        flush_tiny(mean)
        mean -= control
        flush_tiny(mean)
        control += _times(participation, mean)
        flush_tiny(control)
        _subtract(parameters, _times(self._rate, update))


class Adaptive(OuterOptimizer):
    """A rate of its own for each parameter. Reddi et al., "Adaptive federated optimization" (2021).

    first = momentum * first + (1 - momentum) * update; the second moment follows the update's square as a subclass
    says; parameters -= learning_rate * first' / (sqrt(second') + epsilon). A prime frees a moment that began at zero
    of its bias, divided by 1 - rate^t after t rounds, as Kingma and Ba, "Adam" (2015), do, so that the first rounds
    are no shorter than later ones. Squares past float32's reach count as its greatest number.

    The scalars are momentum^t and beta2^t.
    """

    def __init__(
        self, learning_rate: float, momentum: float = 0.0, beta2: float = BETA2, epsilon: float = EPSILON
    ) -> None:
        self._rate = np.float32(learning_rate)
        self._momentum, self._first_share = np.float32(momentum), _ONE - np.float32(momentum)
        self._beta2, self._second_share = np.float32(beta2), _ONE - np.float32(beta2)
        self._epsilon = np.float32(epsilon)

    def state_names(self) -> tuple[str, ...]:
        return ("first_moment", "second_moment")

    def scalars(self, previous: tuple[np.float32, ...]) -> tuple[np.float32, ...]:
        products = np.array(previous or (1.0, 1.0), np.float32)
        products *= np.array((self._momentum, self._beta2), np.float32)
        flush_tiny(products)
        return tuple(products)

    def _step(
        self, parameters: Float32, update: Float32, state: tuple[Float32, ...], scalars: tuple[np.float32, ...]
    ) -> None:
        (first, second), (first_product, second_product) = state, scalars
        np.add(_times(self._momentum, first), _times(self._first_share, update), out=first)
        flush_tiny(first)
        with np.errstate(over="ignore"):
            square = np.minimum(update * update, _GREATEST)
            flush_tiny(square)
            self._follow(second, square)
            np.minimum(second, _GREATEST, out=second)
            flush_tiny(second)
            root = self._unbiased(second, second_product)
        np.sqrt(root, out=root)
        root += self._epsilon
        step = _times(self._rate, first / (_ONE - first_product))
        step /= root
        flush_tiny(step)
        _subtract(parameters, step)

    @abstractmethod
    def _follow(self, second: Float32, square: Float32) -> None:
        """Move the second moment after the update's square, in place; neither is negative."""

    def _unbiased(self, second: Float32, product: np.float32) -> Float32:
        return second / (_ONE - product)


class FedAdam(Adaptive):
    """second = beta2 * second + (1 - beta2) * update^2. See `Adaptive`."""

    def _follow(self, second: Float32, square: Float32) -> None:
        np.add(_times(self._beta2, second), _times(self._second_share, square), out=second)


class FedYogi(Adaptive):
    """second -= (1 - beta2) * update^2 * sign(second - update^2). See `Adaptive`.

    So the second moment forgets large updates slowly. Zaheer et al., "Adaptive methods for nonconvex optimization"
    (2018).
    """

    def _follow(self, second: Float32, square: Float32) -> None:
        change = _times(self._second_share, square)
        # Compared, not subtracted: a difference of normal numbers may be subnormal, whose sign some processors lose.
        np.negative(change, out=change, where=second > square)
        np.copyto(change, np.float32(0.0), where=second == square)
        second += change


class FedAdagrad(Adaptive):
    """second += update^2, which has no bias to be freed of; there is no beta2. See `Adaptive`."""

    def _follow(self, second: Float32, square: Float32) -> None:
        second += square

    def _unbiased(self, second: Float32, product: np.float32) -> Float32:
        return second.copy()


ADAPTIVE: Final[dict[str, type[Adaptive]]] = {"fedadam": FedAdam, "fedyogi": FedYogi, "fedadagrad": FedAdagrad}


def get(
    name: str,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    beta2: float = BETA2,
    epsilon: float = EPSILON,
) -> OuterOptimizer:
    """The outer optimiser of the strategy `name`. Raises UsageError for one that is not there.

    `nesterov` matters to fedavgm alone, `beta2` and `epsilon` to the adaptive ones.
    """
    if name == "fedavg":
        return FedAvg(learning_rate)
    if name == "fedavgm":
        return FedAvgM(learning_rate, momentum, nesterov)
    if name == "scaffold":
        return Scaffold(learning_rate)
    if name in ADAPTIVE:
        return ADAPTIVE[name](learning_rate, momentum, beta2, epsilon)
    raise UsageError(f"there is no strategy {name!r}", f"use one of fedavg, fedavgm, scaffold, {', '.join(ADAPTIVE)}")


def fold_buffers(values: Float32, update: Float32, minimum: Float32) -> None:
    """values = max(values - update, minimum), in place: buffers follow the mean, within what they can be.

    `minimum` is as long as `values`, -inf where there is none. Raises PayloadError if a value becomes infinite.
    """
    for start, stop in slices(values.size):
        part = values[start:stop]
        with np.errstate(over="ignore"):
            part -= update[start:stop]
        np.maximum(part, minimum[start:stop], out=part)
        flush_tiny(part)
        if not all_finite(part):
            raise PayloadError("an update makes a buffer infinite")


def fold_counters(values: Int64, update: Int64) -> None:
    """values += update, in place. Raises PayloadError, and changes nothing, if a counter would pass 2^63 - 1."""
    if (values > np.iinfo(np.int64).max - update).any():
        raise PayloadError("an update makes a counter overflow")
    values += update


def _times(factor: np.float32, values: Float32) -> Float32:
    product = values * factor
    flush_tiny(product)
    return product


def _subtract(parameters: Float32, step: Float32) -> None:
    with np.errstate(over="ignore"):
        parameters -= step
    flush_tiny(parameters)
