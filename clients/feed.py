"""Batches out of whatever a recipe's `train_data` returns. Imports torch: only clients load this."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ravnest_fed.errors import NoDataError, RecipeError
from ravnest_fed.recipe import LoadedRecipe, Partition


class Feed(Protocol):
    """A source of batches."""

    def draw(self, position: int, size: int) -> tuple[Any, int, int]:
        """The batch of `size` examples at `position`: the batch, its number of examples, and the position after it."""
        ...


def feed_of(loaded: LoadedRecipe, partition: Partition, seed: int) -> Feed:
    """Batches of the client's data; the order of the samples changes each epoch and follows from `seed`.

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
        return _Batches(data, loaded, partition)
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

    def draw(self, position: int, size: int) -> tuple[Any, int, int]:
        size = min(size, self._length)
        rows: list[Any] = []
        while size:
            epoch, offset = divmod(position, self._length)
            piece = self._permutation(epoch)[offset : offset + size]
            rows.append(piece)
            size -= len(piece)
            position += len(piece)
        chosen = np.concatenate(rows)
        return self._take(chosen), len(chosen), position

    def _permutation(self, epoch: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([*self._key, epoch]).permutation(self._length)
        return self._order


class _Batches:
    """Batches that the user's iterable makes; it starts again when it ends. The position counts, but cannot seek."""

    def __init__(self, batches: Iterable[Any], loaded: LoadedRecipe, partition: Partition) -> None:
        self._source = batches
        self._loaded = loaded
        self._partition = partition
        self._iterator: Iterator[Any] = iter(())

    def draw(self, position: int, size: int) -> tuple[Any, int, int]:
        with self._loaded.calling("train_data"):
            for iterator in (self._iterator, None):
                self._iterator = iter(self._source) if iterator is None else iterator
                for batch in self._iterator:
                    count = _examples_in(batch)
                    if count:
                        return batch, count, position + count
        raise _no_data(self._loaded, self._partition)


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
