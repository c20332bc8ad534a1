"""Batches out of whatever a recipe's `train_data` or `shared_data` returns. Imports torch: only clients load this.

What is drawn at a position follows from the seed and the position, so a client that knows its position goes on in the
same order after a restart.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from clients.seeding import Seeding
from ravnest_fed.errors import NoDataError, RecipeError
from ravnest_fed.recipe import LoadedRecipe, Partition


class Position(NamedTuple):
    """How far into its data a client is: whole epochs, and what of this one was drawn, in samples or in batches."""

    epoch: int = 0
    drawn: int = 0


class Feed(Protocol):
    """A source of batches."""

    def draw(self, position: Position, size: int) -> tuple[Any, int, Position]:
        """The batch of `size` examples at `position`: the batch, its number of examples, and the position after it."""
        ...


class Rows(NamedTuple):
    """Samples by number: how many there are, and what makes a batch of some (int64, one dimension)."""

    length: int
    take: Callable[[Any], Any]


def feed_of(loaded: LoadedRecipe, partition: Partition, seed: int, seeding: Seeding) -> Feed:
    """Batches of the client's data; the order of the samples changes each epoch and follows from `seed`.

    An iterable of batches is begun anew each epoch, under a random state of its own by `seeding`. Shared data is drawn
    whole, in an order of this client's own.

    Raises NoDataError for no samples and RecipeError for data of another form than the recipe's method names.
    """
    data = loaded.train_data(partition)
    rows = _rows(loaded, data)
    if rows is not None:
        if not rows.length:
            raise _no_data(loaded, partition)
        return _Shuffled(rows, partition, seed)
    if isinstance(data, Iterable) and not loaded.shares_data:
        return _Batches(data, loaded, partition, seeding)
    raise _unusable(loaded, data)


def shared_rows(loaded: LoadedRecipe) -> Rows:
    """The samples of a recipe with `shared_data`. Raises RecipeError and NoDataError as `feed_of` does."""
    data = loaded.train_data(Partition(0, 1, 0))
    rows = _rows(loaded, data)
    if rows is None:
        raise _unusable(loaded, data)
    if not rows.length:
        raise NoDataError(f"recipe {loaded.path}: shared_data() gave no samples", "point the recipe at data")
    return rows


def moved(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in its tuples, lists and dicts on `device`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(one, device) for one in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(moved(one, device) for one in batch)
    if isinstance(batch, Mapping):
        return {name: moved(one, device) for name, one in batch.items()}
    return batch


class _Shuffled:
    """Samples by index. Each epoch is a permutation of its own; a batch may reach over into the next epoch."""

    def __init__(self, rows: Rows, partition: Partition, seed: int) -> None:
        self._length, self._take = rows
        self._key = (seed, partition.index)
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def draw(self, position: Position, size: int) -> tuple[Any, int, Position]:
        size = min(size, self._length)
        epoch, drawn = position
        rows: list[Any] = []
        while size:
            piece = self._permutation(epoch)[drawn : drawn + size]
            rows.append(piece)
            size -= len(piece)
            drawn += len(piece)
            if drawn >= self._length:
                epoch, drawn = epoch + 1, 0
        chosen = np.concatenate(rows)
        return self._take(chosen), len(chosen), Position(epoch, drawn)

    def _permutation(self, epoch: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([*self._key, epoch]).permutation(self._length)
        return self._order


class _Batches:
    """Batches that the user's iterable makes; it is begun again when it ends.

    Another position than the one reached is sought by drawing up to it. Each epoch begins, as far as its first batch,
    under a random state that follows from its number: there a DataLoader that shuffles draws its order.
    """

    def __init__(self, batches: Iterable[Any], loaded: LoadedRecipe, partition: Partition, seeding: Seeding) -> None:
        self._source = batches
        self._loaded = loaded
        self._partition = partition
        self._seeding = seeding
        self._iterator: Iterator[Any] = iter(())
        self._at: Position | None = None

    def draw(self, position: Position, size: int) -> tuple[Any, int, Position]:
        if position != self._at:
            self._seek(position)
        # What fails or ends half-way leaves the iterator at an unknown place.
        self._at = None
        epoch, drawn = position
        batch = self._next() if drawn else self._begin(epoch)
        if batch is _END and drawn:
            epoch, drawn = epoch + 1, 0
            batch = self._begin(epoch)
        if batch is _END:
            raise _no_data(self._loaded, self._partition)
        self._at = Position(epoch, drawn + 1)
        return batch, _examples_in(batch), self._at

    def _seek(self, position: Position) -> None:
        if not position.drawn:
            return
        with self._seeding.seeded("seek", position.epoch):
            self._begin(position.epoch)
            for _ in range(position.drawn - 1):
                self._next()

    def _begin(self, epoch: int) -> Any:
        """The first batch of an epoch."""
        with self._seeding.seeded("epoch", epoch), self._loaded.calling("train_data"):
            self._iterator = iter(self._source)
            return self._next()

    def _next(self) -> Any:
        """The next batch that is not empty, or `_END`."""
        with self._loaded.calling("train_data"):
            return next((batch for batch in self._iterator if _examples_in(batch)), _END)


_END = object()


def _rows(loaded: LoadedRecipe, data: Any) -> Rows | None:
    """The samples of `data` by number, or None where they cannot be had so."""
    if isinstance(data, torch.utils.data.IterableDataset):
        raise RecipeError(
            f"recipe {loaded.path}: {loaded.data_method}() returned an IterableDataset, whose samples come one by one",
            "return a map-style Dataset"
            if loaded.shares_data
            else "wrap it in a torch.utils.data.DataLoader, which makes batches of them",
        )
    columns = _columns(loaded, data)
    if columns is not None:
        return columns
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return None

    def take(rows: Any) -> Any:
        with loaded.calling(loaded.data_method):
            samples = [data[int(row)] for row in rows]
        return loaded.collate(samples)

    return Rows(len(data), take)


def _unusable(loaded: LoadedRecipe, data: Any) -> RecipeError:
    batches = "" if loaded.shares_data else ", or an iterable of batches"
    return RecipeError(
        f"recipe {loaded.path}: {loaded.data_method}() returned a {type(data).__name__}",
        f"return a Dataset, a sequence of samples or equally long tensors{batches}",
    )


def _columns(loaded: LoadedRecipe, data: Any) -> Rows | None:
    """The rows of `data`, or None unless it is made of tensors."""
    if isinstance(data, np.ndarray):
        data = torch.from_numpy(data)
    elif isinstance(data, tuple) and data and all(isinstance(one, np.ndarray) for one in data):
        data = tuple(torch.from_numpy(one) for one in data)
    elif isinstance(data, Mapping) and data and all(isinstance(one, np.ndarray) for one in data.values()):
        data = {name: torch.from_numpy(one) for name, one in data.items()}
    if isinstance(data, torch.Tensor):
        tensors: list[Any] = [data]
    elif isinstance(data, tuple | Mapping) and data:
        tensors = list(data.values()) if isinstance(data, Mapping) else list(data)
    else:
        return None
    if not all(isinstance(one, torch.Tensor) and one.ndim for one in tensors):
        if isinstance(data, Mapping):
            raise RecipeError(
                f"recipe {loaded.path}: {loaded.data_method}() returned a dict", "make its values tensors"
            )
        return None
    lengths = {len(one) for one in tensors}
    if len(lengths) > 1:
        raise RecipeError(
            f"recipe {loaded.path}: {loaded.data_method}() returned tensors of {sorted(lengths)} rows",
            "make them equally long",
        )

    def take(rows: Any) -> Any:
        index = torch.from_numpy(rows)
        if isinstance(data, torch.Tensor):
            return data[index]
        if isinstance(data, Mapping):
            return {name: one[index] for name, one in data.items()}
        return tuple(one[index] for one in data)

    return Rows(lengths.pop(), take)


def _examples_in(batch: Any) -> int:
    """Rows of the first tensor in `batch`."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes) and batch:
        return _examples_in(batch[0])
    return 1


def _no_data(loaded: LoadedRecipe, partition: Partition) -> NoDataError:
    return NoDataError(
        f"recipe {loaded.path}: {loaded.data_method}() gave no samples for part {partition.index} of {partition.count}",
        "point the recipe at data",
    )
