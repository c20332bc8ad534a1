"""The recipe's contract, its identity, and the splits of a partition."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravnest_fed.errors import RecipeError, RecipeMismatch
from ravnest_fed.recipe import LoadedRecipe, Partition, load_recipe, recipe_hash

torch.set_num_threads(1)

GOOD = """
import torch
import ravnest_fed as rf

class Line(rf.Recipe):
    def model(self):
        return torch.nn.Linear(2, 1)
    def train_data(self, part):
        return torch.zeros(4, 2), torch.zeros(4, 1)
    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""


def load(folder: Path, text: str, name: str = "recipe.py") -> LoadedRecipe:
    (folder / name).write_text(text)
    return load_recipe(folder / name)


def with_method(text: str) -> str:
    return GOOD + "".join(f"    {line}\n" for line in text.splitlines())


def test_a_recipe_of_model_data_and_loss_is_enough(tmp_path: Path) -> None:
    loaded = load(tmp_path, GOOD)
    model = loaded.build_model()
    optimizer = loaded.build_optimizer(list(model.parameters()))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert loaded.loss(model, loaded.train_data(Partition(0, 1, 0))).shape == ()
    assert loaded.evaluate(model) is None
    assert loaded.recipe.evaluation_examples() == 1
    assert (loaded.recipe.micro_batch, loaded.recipe.local_steps, loaded.recipe.accumulation) == (32, 10, 1)


def test_the_same_seed_gives_the_same_initial_model_and_leaves_the_random_state_alone(tmp_path: Path) -> None:
    loaded = load(tmp_path, GOOD)
    before = torch.random.get_rng_state()
    first, second, other = loaded.build_model(3), loaded.build_model(3), loaded.build_model(4)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_importing_the_recipe_module_does_not_import_torch() -> None:
    code = "import sys, ravnest_fed.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=False).returncode == 0


@pytest.mark.parametrize(
    ("method", "call", "named"),
    [
        ("def loss(self, model, batch): return 1.0", "loss", "loss"),
        ("def loss(self, model, batch): return model(batch[0])", "loss", r"\[4, 1\]"),
        ("def loss(self, model, batch): return torch.zeros(())", "loss", "trainable"),
        ("def loss(self, model, batch): return (model(batch[0]) > 0).sum()", "loss", "int64"),
        ("def model(self): return None", "model", "model"),
        ("def optimizer(self, parameters): return 3", "optimizer", "optimizer"),
        ("def train_data(self, part): return None", "data", "train_data"),
        ("def evaluate(self, model): return 0.5", "evaluate", "evaluate"),
        ("def evaluate(self, model): return {'loss': float('nan')}", "evaluate", "nan"),
        ("def evaluate(self, model): return {'loss': 'low'}", "evaluate", "loss"),
        ("def evaluate(self, model): return {3: 1.0}", "evaluate", "3"),
    ],
)
def test_what_breaks_the_contract_is_named(tmp_path: Path, method: str, call: str, named: str) -> None:
    loaded = load(tmp_path, with_method(method))
    model = torch.nn.Linear(2, 1)
    calls = {
        "model": loaded.build_model,
        "optimizer": lambda: loaded.build_optimizer(list(model.parameters())),
        "data": lambda: loaded.train_data(Partition(0, 1, 0)),
        "loss": lambda: loaded.loss(model, (torch.ones(4, 2), torch.ones(4, 1))),
        "evaluate": lambda: loaded.evaluate(model),
    }
    with pytest.raises(RecipeError, match=named) as caught:
        calls[call]()
    assert str(tmp_path / "recipe.py") in str(caught.value)


@pytest.mark.parametrize("setting", ["micro_batch = 0", "local_steps = 1.5", "seed = -1", "max_grad_norm = 0"])
def test_impossible_settings_are_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(RecipeError, match=setting.split()[0]):
        load(tmp_path, with_method(setting))


def test_an_exception_of_the_users_code_is_named_with_file_and_line(tmp_path: Path) -> None:
    loaded = load(tmp_path, with_method("def evaluate(self, model):\n    return {'loss': 1 / 0}"))
    line = next(n for n, text in enumerate((tmp_path / "recipe.py").read_text().splitlines(), 1) if "1 / 0" in text)
    with pytest.raises(RecipeError, match=rf"recipe\.py:{line}.*evaluate.*ZeroDivisionError") as caught:
        loaded.evaluate(torch.nn.Linear(2, 1))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "\n" not in str(caught.value)


def test_an_exception_at_import_is_named_with_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"recipe\.py:2: .*KeyError") as caught:
        load(tmp_path, "\n{}['x']\n")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RecipeError, match=r"recipe\.py:3: .*SyntaxError"):
        load(tmp_path, "\n\nclass\n")


def test_exactly_one_recipe_must_be_defined(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="none"):
        load(tmp_path, "import ravnest_fed as rf\nRecipe = rf.Recipe\n")
    with pytest.raises(RecipeError, match="Line, Other"):
        load(tmp_path, GOOD + "class Other(Line): pass\n")
    with pytest.raises(RecipeError, match="nowhere"):
        load_recipe(tmp_path / "nowhere.py")
    with pytest.raises(RecipeError, match=r"recipe\.py"):
        (tmp_path / "empty").mkdir()
        load_recipe(tmp_path / "empty")


def test_a_rewritten_recipe_runs_as_rewritten(tmp_path: Path) -> None:
    first = load(tmp_path, GOOD + "# a\n")
    second = load(tmp_path, GOOD.replace("Linear(2, 1)", "Linear(2, 3)") + "# b\n")
    assert first.build_model().weight.shape == (1, 2)
    assert second.build_model().weight.shape == (3, 2)


def test_folders_import_their_own_neighbours(tmp_path: Path) -> None:
    for name, width in (("one", 1), ("two", 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "recipe.py").write_text("import blocks\n" + GOOD.replace("Linear(2, 1)", "Linear(2, blocks.WIDTH)"))
        (folder / "blocks.py").write_text(f"WIDTH = {width}\n")
    one, two = load_recipe(tmp_path / "one"), load_recipe(tmp_path / "two")
    assert one.build_model().weight.shape == (1, 2)
    assert two.build_model().weight.shape == (2, 2)
    assert "blocks" not in sys.modules
    assert str(tmp_path / "one") not in sys.path


def test_the_hash_ignores_line_ends_and_nothing_else(tmp_path: Path) -> None:
    unix, windows, other = tmp_path / "a.py", tmp_path / "b.py", tmp_path / "c.py"
    unix.write_bytes(b"x = 1\ny = 2\n")
    windows.write_bytes(b"x = 1\r\ny = 2\r\n")
    other.write_bytes(b"x = 1\ny = 3\n")
    assert recipe_hash(unix) == recipe_hash(windows) != recipe_hash(other)
    assert len(bytes.fromhex(recipe_hash(unix))) == 32
    other.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="UTF-8"):
        recipe_hash(other)


def test_a_folders_hash_covers_every_file_and_its_name(tmp_path: Path) -> None:
    def hash_of(files: dict[str, bytes]) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return recipe_hash(folder)

    base = {"recipe.py": b"x\n", "a/b.bin": b"\0\r\n"}
    assert hash_of(base) == hash_of(dict(reversed(base.items())))
    assert hash_of(base) == hash_of({**base, "__pycache__/x.pyc": b"1", ".git/config": b"2", "recipe.py": b"x\r\n"})
    different = [
        {**base, "a/b.bin": b"\0\n"},
        {"recipe.py": b"x\n", "a/c.bin": b"\0\r\n"},
        {**base, "extra": b""},
        {"recipe.py": b"x\n"},
    ]
    assert len({hash_of(files) for files in [base, *different]}) == 5


def test_another_recipe_is_a_mismatch(tmp_path: Path) -> None:
    loaded = load(tmp_path, GOOD)
    loaded.require_hash(recipe_hash(tmp_path / "recipe.py"), "federation.toml")
    with pytest.raises(RecipeMismatch, match=r"federation\.toml"):
        loaded.require_hash("0" * 64, "federation.toml")


@given(
    labels=st.lists(st.integers(0, 5), max_size=120),
    count=st.integers(1, 9),
    alpha=st.sampled_from([1e-9, 0.1, 1.0, 100.0]),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_dirichlet_split_gives_every_sample_to_one_client(
    labels: list[int], count: int, alpha: float, seed: int
) -> None:
    parts = [Partition(index, count, seed).dirichlet(np.array(labels, np.int64), alpha) for index in range(count)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    if len(labels) >= count:
        assert all(len(part) for part in parts)


@given(n=st.integers(0, 100), count=st.integers(1, 9), seed=st.integers(0, 2**40))
def test_slices_are_disjoint_complete_and_even(n: int, count: int, seed: int) -> None:
    parts = [Partition(index, count, seed).slice(n) for index in range(count)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_alpha_sets_the_skew_and_the_seed_the_draw() -> None:
    labels = np.arange(4000) % 10

    def largest_share(alpha: float) -> float:
        counts = np.bincount(labels[Partition(0, 4, 1).dirichlet(labels, alpha)], minlength=10)
        return float(counts.max() / counts.sum())

    assert largest_share(0.05) > 0.25 > 0.12 > largest_share(1e5)
    mine = Partition(0, 4, 1).dirichlet(labels, 1.0)
    assert np.array_equal(mine, Partition(0, 4, 1).dirichlet(labels, 1.0))
    assert not np.array_equal(mine, Partition(0, 4, 2).dirichlet(labels, 1.0))
    assert mine.dtype == np.int64
