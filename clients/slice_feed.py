"""Batches of shared data: the samples of a slice, in the order of its positions. Imports torch: only clients load this."""

from typing import Any

from clients.feed import Feed, Position, Rows, shared_rows
from ravnest_fed.errors import RecipeError
from ravnest_fed.recipe import LoadedRecipe
from ravnest_fed.slices import SampleOrder, Slice


class SharedData:
    """The data set that all clients of a federation share, of `samples` samples. `seed` is the federation's.

    Raises RecipeError where this machine's copy has another number of samples.
    """

    def __init__(self, loaded: LoadedRecipe, samples: int, seed: int) -> None:
        self._rows = shared_rows(loaded)
        if self._rows.length != samples:
            raise RecipeError(
                f"recipe {loaded.path}: shared_data() returned {self._rows.length} samples on this machine, but the "
                f"federation was made with {samples}",
                "put the same data, in the same order, on every machine",
            )
        self._order = SampleOrder(samples, seed)

    def feed(self, of: Slice) -> Feed:
        """Batches of these positions from the first on; a draw begins at `Position()`."""
        return _SliceFeed(self._rows, self._order.rows(of))


class _SliceFeed:
    def __init__(self, rows: Rows, chosen: Any) -> None:
        self._rows = rows
        self._chosen = chosen

    def draw(self, position: Position, size: int) -> tuple[Any, int, Position]:
        chosen = self._chosen[position.drawn : position.drawn + size]
        return self._rows.take(chosen), len(chosen), Position(0, position.drawn + len(chosen))
