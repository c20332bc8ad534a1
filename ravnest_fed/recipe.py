"""The recipe: the user's Python file with model, data, loss, optimiser and evaluation, the same on every client.

A recipe needs a `model`, `train_data` or `shared_data`, and a `loss`; the rest has defaults. `load_recipe` imports a file
or a folder and gives a `LoadedRecipe`, through which a client calls the user's methods: what they return is checked, and
what they raise becomes a RecipeError that names the method, the file and the line. torch is imported only when a model is
built.
"""

import math
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ravnest_fed.errors import RavnestError, RecipeError, RecipeMismatch
from ravnest_fed.hashing import digest
from ravnest_fed.partition import Partition
from ravnest_fed.recipe_import import import_source

if TYPE_CHECKING:
    import torch

__all__ = ["LoadedRecipe", "Partition", "Recipe", "load_recipe", "recipe_hash"]

ENTRY = "recipe.py"
MAX_FILE_BYTES = 64 * 2**20
"""Largest file that a recipe folder may hold: data and weights do not belong into it."""


class Recipe:
    """What a federation trains. Subclass it once in `recipe.py`; the class is made without arguments.

    The attributes are what `ravnest-fed init` proposes for the federation's settings: examples a micro-batch,
    micro-batches a step, steps a round, and the seed; and how a client trains: whether the local optimiser's state
    outlives the round, and the L2 norm that a step's gradient is clipped to (None: not clipped).
    """

    micro_batch: int = 32
    accumulation: int = 1
    local_steps: int = 10
    keep_optimizer: bool = False
    max_grad_norm: float | None = None
    seed: int = 0

    def model(self) -> "torch.nn.Module":
        """A new model on the CPU. Required. Called under the federation's seed, so frozen random layers agree."""
        raise NotImplementedError

    def warm_start(self, model: "torch.nn.Module") -> None:
        """Change a new `model` in place before a federation starts from it. By default it starts as `model` made it.

        Called once, where the federation is made, unless weights are given there; clients get the result.
        """

    def train_data(self, part: Partition) -> Any:
        """This client's training data: its own, or part `part` of a set, the same in every round. Required, unless the
        recipe has `shared_data`.

        One of: a map-style `torch.utils.data.Dataset` or a list of samples; a tensor, or a tuple or dict of tensors of
        equal length; an iterable of batches such as a DataLoader, which must start anew each time it is iterated.

        An iterable that takes its order from the global random state when it begins, as a DataLoader that shuffles does,
        gives the same batches after a restart; the client then draws the epoch's batches again up to where it was.
        """
        raise NotImplementedError

    def shared_data(self) -> Any:
        """The whole training data, the same samples in the same order on every client; in the place of `train_data`.

        Each round deals every client samples of its own, as many as it can train on, and every epoch covers each
        sample exactly once, whoever comes and goes. A map-style Dataset or list, or tensors, as for `train_data`.
        """
        raise NotImplementedError

    def loss(self, model: "torch.nn.Module", batch: Any) -> "torch.Tensor":
        """The scalar loss of `batch`, the mean over its examples, on the model's device. Required."""
        raise NotImplementedError

    def optimizer(self, parameters: "list[torch.nn.Parameter]") -> "torch.optim.Optimizer":
        """The local optimiser. The default is AdamW at learning rate 0.001."""
        import torch

        return torch.optim.AdamW(parameters, lr=1e-3)

    def schedule(self, optimizer: "torch.optim.Optimizer", committed_steps: int) -> None:
        """Set the optimiser's learning rate; called before every step. The default leaves it alone.

        `committed_steps` counts the steps that the global model has behind it, and this round's so far.
        """

    def evaluate(self, model: "torch.nn.Module") -> Mapping[str, float]:
        """Metrics of the model, which is in evaluation mode and without gradients. The default measures nothing."""
        return {}

    def evaluation_examples(self) -> int:
        """How many examples `evaluate` looks at: the weight of this client's metrics in the round's mean."""
        return 1

    def collate(self, samples: Sequence[Any]) -> Any:
        """A batch from samples of a Dataset or list. The default is torch's `default_collate`."""
        from torch.utils.data import default_collate

        return default_collate(list(samples))


class LoadedRecipe:
    """A recipe from `path` with its hash (hex) and a name for people. Every method may raise RecipeError."""

    def __init__(self, recipe: Recipe, hash: str, path: Path, name: str) -> None:
        self.recipe = recipe
        self.hash = hash
        self.path = path
        self.name = name

    def require_hash(self, expected: str, where: str) -> None:
        """Raise RecipeMismatch unless the recipe is the one with hash `expected`, which stands in `where`."""
        if self.hash != expected:
            raise RecipeMismatch(
                f"recipe {self.path} has the hash {self.hash[:16]}, but {where} asks for {expected[:16]}",
                "use the recipe that the federation was made with, unchanged, as the same file or whole folder",
            )

    def build_model(self, seed: int | None = None) -> "torch.nn.Module":
        """A new model, made under `seed` (None: the recipe's own)."""
        import torch

        with self.calling("model"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed if seed is None else seed)
            model = self.recipe.model()
        if not isinstance(model, torch.nn.Module):
            raise self._broken("model", f"returned {_kind(model)}", "return a torch.nn.Module")
        return model

    def warm_start(self, model: "torch.nn.Module") -> None:
        """Let the recipe prepare a new model that a federation will start from."""
        with self.calling("warm_start"):
            self.recipe.warm_start(model)

    def build_optimizer(self, parameters: "list[torch.nn.Parameter]") -> "torch.optim.Optimizer":
        """The local optimiser over `parameters`."""
        import torch

        with self.calling("optimizer"):
            optimizer = self.recipe.optimizer(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise self._broken("optimizer", f"returned {_kind(optimizer)}", "return a torch.optim.Optimizer")
        return optimizer

    @property
    def shares_data(self) -> bool:
        """Whether all clients train on one data set, from `shared_data`."""
        return type(self.recipe).shared_data is not Recipe.shared_data

    @property
    def data_method(self) -> str:
        """The method that the recipe's data comes from."""
        return "shared_data" if self.shares_data else "train_data"

    def train_data(self, part: Partition) -> Any:
        """What the recipe gives as this client's data, or as the data of all; never None."""
        with self.calling(self.data_method):
            data = self.recipe.shared_data() if self.shares_data else self.recipe.train_data(part)
        if data is None:
            raise self._broken(self.data_method, "returned None", "return a Dataset, tensors or a list of samples")
        return data

    def collate(self, samples: Sequence[Any]) -> Any:
        """A batch of `samples`."""
        with self.calling("collate"):
            return self.recipe.collate(samples)

    def loss(self, model: "torch.nn.Module", batch: Any) -> "torch.Tensor":
        """The loss of `batch`: a floating-point tensor of one value that gradients flow from."""
        import torch

        with self.calling("loss"):
            loss = self.recipe.loss(model, batch)
        if not isinstance(loss, torch.Tensor):
            raise self._broken("loss", f"returned {_kind(loss)}", "return a scalar tensor")
        if loss.numel() != 1 or not loss.is_floating_point():
            raise self._broken(
                "loss", f"returned a tensor of shape {list(loss.shape)} and {loss.dtype}", "return a scalar, the mean"
            )
        if not loss.requires_grad:
            raise self._broken("loss", "does not depend on a trainable parameter", "do not detach it")
        return loss.reshape(())

    def schedule(self, optimizer: "torch.optim.Optimizer", committed_steps: int) -> None:
        """Let the recipe set the learning rate of a step."""
        with self.calling("schedule"):
            self.recipe.schedule(optimizer, committed_steps)

    def evaluate(self, model: "torch.nn.Module") -> tuple[dict[str, float], int] | None:
        """Finite metrics and the number of examples behind them; None if the recipe measures nothing."""
        with self.calling("evaluate"):
            metrics = self.recipe.evaluate(model)
        if not isinstance(metrics, Mapping):
            raise self._broken("evaluate", f"returned {_kind(metrics)}", "return a dict of numbers by name")
        if not metrics:
            return None
        values: dict[str, float] = {}
        for name, value in metrics.items():
            try:
                values[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise self._broken("evaluate", f"gave {name!r} as {_kind(value)}", "return numbers") from None
            if not isinstance(name, str) or not name or not math.isfinite(values[name]):
                raise self._broken("evaluate", f"gave {name!r} = {values[name]}", "return finite numbers by name")
        with self.calling("evaluation_examples"):
            count = self.recipe.evaluation_examples()
        if not isinstance(count, int) or count < 1:
            raise self._broken("evaluation_examples", f"returned {count!r}", "return a whole number of at least 1")
        return values, count

    @contextmanager
    def calling(self, method: str) -> Iterator[None]:
        """Turn what the user's code raises inside the `with` into a RecipeError that names `method`."""
        try:
            yield
        except RavnestError:
            raise
        except NotImplementedError as error:
            if traceback.extract_tb(error.__traceback__)[-1].filename == __file__:
                raise self._broken(method, "is missing", f"define {method} in the recipe") from error
            raise _failure(error, f"{method}() failed", self.path) from error
        except (Exception, SystemExit) as error:
            raise _failure(error, f"{method}() failed", self.path) from error

    def _broken(self, method: str, what: str, remedy: str) -> RecipeError:
        return RecipeError(f"recipe {self.path}: {method}() {what}", remedy)


def load_recipe(path: Path) -> LoadedRecipe:
    """Import the recipe at `path`, a file or a folder with `recipe.py`, and make its one Recipe.

    In a folder, neighbouring modules can be imported by their plain names at the top of the files. A second Recipe
    class counts unless its name begins with an underscore. Raises RecipeError.
    """
    path = Path(os.path.abspath(path))
    source = path / ENTRY if path.is_dir() else path
    if not source.is_file():
        raise RecipeError(f"there is no recipe at {source}", f"name a Python file or a folder that holds {ENTRY}")
    identity = recipe_hash(path)
    # The place is part of the module's name: one process may load the same text from two places.
    module_name = f"ravnest_recipe_{digest('recipe module', str(source).encode()).hex()[:8]}_{identity[:16]}"
    try:
        module = import_source(source, module_name, neighbours=path.is_dir())
    except RavnestError:
        raise
    except (Exception, SystemExit) as error:
        raise _failure(error, "cannot be imported", path) from error
    found = {
        value.__name__: value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Recipe) and value.__module__ == module_name
    }
    classes = [kind for name, kind in found.items() if not name.startswith("_")]
    if len(classes) != 1:
        names = ", ".join(sorted(kind.__name__ for kind in classes)) or "none"
        raise RecipeError(
            f"recipe {source} must define one subclass of ravnest_fed.Recipe; found: {names}",
            "keep one, or begin the names of base classes with an underscore",
        )
    try:
        recipe = classes[0]()
    except (Exception, SystemExit) as error:
        raise _failure(error, f"{classes[0].__name__}() failed", path) from error
    _check_settings(recipe, source)
    name = path.stem if path.stem != "recipe" or path.is_dir() else path.parent.name
    return LoadedRecipe(recipe, identity, path, name)


def recipe_hash(path: Path) -> str:
    """BLAKE3 (hex) of a recipe. A file: its UTF-8 text with LF line ends; its name does not matter.

    A folder: the relative POSIX name and the content of every file, in the order of the names; text (UTF-8 without NUL)
    with LF line ends, anything else as it is. `__pycache__` and names that begin with a dot are left out. Raises
    RecipeError for a file over `MAX_FILE_BYTES`, a link to a folder, or what cannot be read.
    """
    try:
        if path.is_file():
            text = _normalised(path)
            if _is_binary(text):
                raise RecipeError(f"recipe {path} is not UTF-8 text", "save it as UTF-8")
            return digest("recipe file", text).hex()
        parts: list[bytes] = []
        for name, file in sorted(_files(path)):
            for piece in (name, _normalised(file)):
                parts += [len(piece).to_bytes(8, "little"), piece]
        return digest("recipe folder", *parts).hex()
    except (OSError, UnicodeEncodeError) as error:
        raise RecipeError(f"recipe {path} cannot be read ({error})", "check the path and its permissions") from None


def _files(folder: Path) -> Iterator[tuple[bytes, Path]]:
    for directory, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        for name in folders:
            if (Path(directory) / name).is_symlink():
                raise RecipeError(f"recipe folder {folder} holds a link to a folder, {name}", "copy it instead")
        for name in files:
            if not name.startswith("."):
                file = Path(directory) / name
                yield file.relative_to(folder).as_posix().encode(), file


def _normalised(file: Path) -> bytes:
    if file.stat().st_size > MAX_FILE_BYTES:
        raise RecipeError(
            f"{file} is larger than {MAX_FILE_BYTES // 2**20} MiB", "keep data and weights outside the recipe's folder"
        )
    content = file.read_bytes()
    return content if _is_binary(content) else content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _is_binary(content: bytes) -> bool:
    try:
        return "\0" in content.decode()
    except UnicodeDecodeError:
        return True


def _check_settings(recipe: Recipe, source: Path) -> None:
    def refuse(name: str, remedy: str) -> None:
        raise RecipeError(f"recipe {source}: {name} is {getattr(recipe, name)!r}", remedy)

    for name in ("micro_batch", "accumulation", "local_steps"):
        value = getattr(recipe, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            refuse(name, "use a whole number of at least 1")
    if not isinstance(recipe.seed, int) or not 0 <= recipe.seed < 2**63:
        refuse("seed", "use a whole number from 0")
    if not isinstance(recipe.keep_optimizer, bool):
        refuse("keep_optimizer", "use True or False")
    kind = type(recipe)
    if kind.shared_data is not Recipe.shared_data and kind.train_data is not Recipe.train_data:
        raise RecipeError(
            f"recipe {source} has both train_data and shared_data",
            "keep shared_data where all clients train on one data set, else train_data",
        )
    norm = recipe.max_grad_norm
    if norm is not None and not (isinstance(norm, int | float) and 0 < norm < math.inf):
        refuse("max_grad_norm", "use a number above 0, or None")


def _failure(error: BaseException, what: str, path: Path) -> RecipeError:
    file, line = str(path), 0
    if isinstance(error, SyntaxError) and error.filename:
        file, line = error.filename, error.lineno or 0
    else:
        for frame in traceback.extract_tb(error.__traceback__):
            if Path(frame.filename) == path or Path(frame.filename).is_relative_to(path):
                file, line = frame.filename, frame.lineno or 0
    reason = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {reason[0]}" if reason[0] else type(error).__name__
    remedy = "correct the recipe"
    if isinstance(error, ModuleNotFoundError) and path.is_file() and (path.parent / f"{error.name}.py").is_file():
        remedy = f"give the folder {path.parent} as the recipe, so that {error.name}.py is part of it"
    elif isinstance(error, ModuleNotFoundError):
        remedy = f"install {error.name}, or correct the recipe"
    where = f"{file}:{line}" if line else file
    return RecipeError(f"recipe {where}: {what}: {text}", remedy)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
