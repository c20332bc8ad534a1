"""Outer optimisers: how an update moves the parameters.

An update is a mean delta (base minus local), a pseudo-gradient. Folding it is elementwise: each step is one float32
multiplication, addition or subtraction, correctly rounded, and every result is flushed (see `flush_tiny`), so that all
replicas hold the same bits whatever their processor does with subnormals.
"""

from abc import ABC, abstractmethod

import numpy as np

from ravnest_fed.codecs.base import slices
from ravnest_fed.codecs.float_bits import all_finite, flush_tiny
from ravnest_fed.errors import PayloadError, UsageError
from ravnest_fed.parameters import Float32, Int64


class OuterOptimizer(ABC):
    """Moves parameters by updates. Holds settings alone; the state is the replica's."""

    def state_names(self) -> tuple[str, ...]:
        """Names of the state vectors: float32, as long as the parameters, zero at the beginning."""
        return ()

    def scalars(self, previous: tuple[np.float32, ...]) -> tuple[np.float32, ...]:
        """The scalars of the round after `previous` (empty before the first), such as running products of a rate."""
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


def get(name: str, learning_rate: float, momentum: float = 0.0, nesterov: bool = False) -> OuterOptimizer:
    """The outer optimiser of the strategy `name`: "fedavg" or "fedavgm". Raises UsageError for another."""
    if name == "fedavg":
        return FedAvg(learning_rate)
    if name == "fedavgm":
        return FedAvgM(learning_rate, momentum, nesterov)
    raise UsageError(f"there is no strategy {name!r}", "use fedavg or fedavgm")


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
