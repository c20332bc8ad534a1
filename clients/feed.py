"""Batches out of whatever a recipe's `train_data` returns. Imports torch: only clients load this.

What is drawn at a position follows from the seed and the position, so a client that knows its position goes on in the
same order after a restart.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def feed_of(loaded: LoadedRecipe, partition: Partition, seed: int, seeding: Seeding) -> Feed:
    """Batches of the client's data; the order of the samples changes each epoch and follows from `seed`.

    An iterable of batches is begun anew each epoch, under a random state of its own by `seeding`.

    Raises NoDataError for no samples and RecipeError for data of another form than `Recipe.train_data` names.
    """
    data = loaded.train_data(partition)
    if isinstance(data, torch.utils.data.IterableDataset):
        raise RecipeError(
            f"recipe {loaded.path}: train_data() returned an IterableDataset, whose samples come one by one",
            "wrap it in a torch.utils.data.DataLoader, which makes batches of them",
        )
    columns = _columns(loaded, data)
    if columns is not None:
        length, take = columns
        return _Shuffled(length, take, loaded, partition, seed)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):

        def take(rows: Any) -> Any:
            with loaded.calling("train_data"):
                samples = [data[int(row)] for row in rows]
            return loaded.collate(samples)

        return _Shuffled(len(data), take, loaded, partition, seed)
    if isinstance(data, Iterable):
        return _Batches(data, loaded, partition, seeding)
    raise RecipeError(
        f"recipe {loaded.path}: train_data() returned a {type(data).__name__}",
        "return a Dataset, a sequence of samples, equally long tensors, or an iterable of batches",
    )


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

    def __init__(self, length: int, take: Any, loaded: LoadedRecipe, partition: Partition, seed: int) -> None:
        if length == 0:
            raise _no_data(loaded, partition)
        self._length = length
        self._take = take
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


def _columns(loaded: LoadedRecipe, data: Any) -> tuple[int, Any] | None:
    """How many rows `data` has and a function from row numbers to a batch, or None unless it is made of tensors."""
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
            raise RecipeError(f"recipe {loaded.path}: train_data() returned a dict", "make its values tensors")
        return None
    lengths = {len(one) for one in tensors}
    if len(lengths) > 1:
        raise RecipeError(
            f"recipe {loaded.path}: train_data() returned tensors of {sorted(lengths)} rows",
            "make them equally long",
        )

    def take(rows: Any) -> Any:
        index = torch.from_numpy(rows)
        if isinstance(data, torch.Tensor):
            return data[index]
        if isinstance(data, Mapping):
            return {name: one[index] for name, one in data.items()}
        return tuple(one[index] for one in data)

    return lengths.pop(), take


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
        f"recipe {loaded.path}: train_data() gave no samples for part {partition.index} of {partition.count}",
        "point the recipe at data",
    )
