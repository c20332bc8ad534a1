"""One client's place among the members, and ways to cut a shared data set so that every sample falls to one client.

Each client computes the same cut by itself. NumPy's legacy generator is used because its streams are frozen for all
later versions; another stream on one machine would give a sample to two clients and another to none.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Partition:
    """Part `index` of `count`; `seed` is the federation's, the same for every client."""

    index: int
    count: int
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"part {self.index} of {self.count} does not exist")

    def slice(self, n: int) -> Indices:
        """This client's share of samples 0 to n-1: shuffled, sizes differ by one at most. Sorted int64 indices."""
        return np.sort(np.array_split(self._generator().permutation(n), self.count)[self.index]).astype(np.int64)

    def dirichlet(self, labels: npt.ArrayLike, alpha: float) -> Indices:
        """This client's share of the samples with these `labels` (one dimension), skewed by label.

        Each label's samples are dealt out in shares drawn from a symmetric Dirichlet(alpha) over the parts: a small
        alpha gives each client few labels, a large one gives all the same mixture. Parts differ in size; none is empty
        while there are at least `count` samples. Returns sorted int64 indices. Source: Hsu, Qi, Brown, "Measuring the
        effects of non-identical data distribution" (2019), in the form that draws over clients for each label
        (Yurochkin et al., "Bayesian nonparametric federated learning", 2019).
        """
        values = np.asarray(labels)
        if values.ndim != 1:
            raise ValueError(f"labels have {values.ndim} dimensions, not one")
        if not alpha > 0:
            raise ValueError(f"alpha is {alpha}; it must be above 0")
        generator = self._generator()
        part_of = np.empty(len(values), np.int64)
        for label in np.unique(values):
            members = generator.permutation(np.flatnonzero(values == label))
            shares = generator.dirichlet(np.full(self.count, float(alpha)))
            # A tiny alpha can underflow every gamma draw; the whole label then goes to one part.
            if not np.isfinite(shares).all():
                shares = np.eye(self.count)[generator.randint(self.count)]
            bounds = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
            for part, chosen in enumerate(np.split(members, bounds)):
                part_of[chosen] = part
        self._fill_empty(part_of)
        return np.flatnonzero(part_of == self.index).astype(np.int64)

    def _fill_empty(self, part_of: Indices) -> None:
        if len(part_of) < self.count:
            return
        sizes = np.bincount(part_of, minlength=self.count)
        for empty in np.flatnonzero(sizes == 0):
            largest = int(np.argmax(sizes))
            part_of[np.flatnonzero(part_of == largest)[0]] = empty
            sizes[largest] -= 1
            sizes[empty] += 1

    def _generator(self) -> np.random.RandomState:
        return np.random.RandomState([self.seed & 0xFFFFFFFF, (self.seed >> 32) & 0xFFFFFFFF])
