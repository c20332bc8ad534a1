"""The example recipes: found as installed, learning, and evaluated on data that nobody trains on."""

import importlib.resources
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from clients.trainer import LocalWork, Trainer
from ravnest_fed.model_state import read_state, schema_of
from ravnest_fed.parameters import BLOCK, ModelState
from ravnest_fed.recipe import LoadedRecipe, Partition, load_recipe

torch.set_num_threads(1)


def example(name: str) -> LoadedRecipe:
    with importlib.resources.as_file(importlib.resources.files("examples") / name / "recipe.py") as path:
        return load_recipe(path)


def federated_average(loaded: LoadedRecipe, seed: int, clients: int, rounds: int) -> tuple[Trainer, ModelState]:
    """Plain averaging of `clients` deltas for `rounds` rounds."""
    model = loaded.build_model(seed)
    schema = schema_of(model, BLOCK)
    state = read_state(model, schema)
    recipe = loaded.recipe
    trainers = [Trainer(loaded, schema, Partition(index, clients, seed), "cpu", seed) for index in range(clients)]
    for server_round in range(1, rounds + 1):
        work = LocalWork(
            server_round,
            recipe.micro_batch,
            recipe.accumulation,
            recipe.local_steps,
            recipe.local_steps * (server_round - 1),
        )
        deltas = [trainer.local_round(work, state).delta.vector for trainer in trainers]
        state = ModelState(state.vector - np.mean(deltas, axis=0, dtype=np.float32), state.counters)
    return trainers[0], state


def test_digits_are_learnt_in_twenty_rounds() -> None:
    loaded = example("digits")
    trainer, state = federated_average(loaded, seed=3, clients=4, rounds=20)
    measured = trainer.evaluate(state)
    assert measured is not None
    metrics, examples = measured
    assert metrics["accuracy"] >= 0.95
    assert 0 < metrics["loss"] < 0.3
    assert examples == 359


def test_digits_are_split_by_label_and_apart_from_the_held_out_ones() -> None:
    loaded = example("digits")
    parts = [loaded.train_data(Partition(index, 4, 0)) for index in range(4)]
    assert sum(len(labels) for _, labels in parts) == 1797 - 359
    shares = [torch.bincount(labels, minlength=10) / len(labels) for _, labels in parts]
    assert max(float((one - other).abs().max()) for one in shares for other in shares) > 0.1
    recipe = loaded.recipe
    assert not set(recipe.train) & set(recipe.test)  # type: ignore[attr-defined]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "text"
    (folder / "deep").mkdir(parents=True)
    for number in range(60):
        place = folder / "deep" if number % 2 else folder
        (place / f"{number}.txt").write_text(f"line {number} of the poem, and on it goes\n" * 6)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\xff" * 300)
    monkeypatch.setenv("RAVNEST_TEXT", str(folder))
    return folder


def test_text_is_split_by_file_and_held_out_files_are_never_trained_on(corpus: Path) -> None:
    loaded = example("char_lm")
    parts = [bytes(loaded.train_data(Partition(index, 3, 0))[:, :-1].flatten().tolist()) for index in range(3)]
    held_out = bytes(loaded.recipe.evaluation_windows()[:, :-1].flatten().tolist())  # type: ignore[attr-defined]
    where = {
        number: [place for place, text in enumerate([*parts, held_out]) if f"line {number} of".encode() in text]
        for number in range(60)
    }
    assert not {number: places for number, places in where.items() if len(places) != 1}
    assert {places[0] for places in where.values()} == {0, 1, 2, 3}
    assert loaded.recipe.evaluation_examples() % 64 == 0


def test_the_language_model_learns_and_does_not_look_ahead(corpus: Path) -> None:
    loaded = example("char_lm")
    loaded.recipe.local_steps = 8
    model = loaded.build_model(0).eval()
    text = torch.randint(256, (1, 64), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[0, 40:] = 0
    with torch.no_grad():
        before, after = model(text), model(changed)
    assert torch.allclose(before[0, :40], after[0, :40], atol=1e-5)
    assert not torch.allclose(before[0, 40:], after[0, 40:], atol=1e-5)
    assert sum(one.numel() for one in model.parameters()) == 436_736
    trainer, state = federated_average(loaded, seed=0, clients=2, rounds=2)
    schema = schema_of(model, BLOCK)
    first, last = trainer.evaluate(read_state(model, schema)), trainer.evaluate(state)
    assert first is not None
    assert last is not None
    assert 5 < first[0]["loss"] < 6
    assert last[0]["loss"] < first[0]["loss"] - 1


def test_the_standard_library_is_there_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAVNEST_TEXT", raising=False)
    loaded = example("char_lm")
    assert len(loaded.train_data(Partition(0, 4, 0))) > 10_000
    assert loaded.recipe.evaluation_windows().shape == (256, 65)  # type: ignore[attr-defined]


def test_the_warm_start_is_trained_once_and_kept(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def run(name: str, steps: int) -> Path:
        monkeypatch.setattr(sys, "argv", ["warm_start.py", "--out", str(tmp_path / name), "--steps", str(steps)])
        with importlib.resources.as_file(importlib.resources.files("examples") / "char_lm" / "warm_start.py") as path:
            runpy.run_path(str(path), run_name="__main__")
        return tmp_path / name

    first = run("one.safetensors", 2)
    assert "training the warm start" in capsys.readouterr().out
    again = run("two.safetensors", 2)
    assert "training the warm start" not in capsys.readouterr().out
    assert first.read_bytes() == again.read_bytes()
    assert run("three.safetensors", 3).read_bytes() != first.read_bytes()
    example("char_lm").build_model().load_state_dict(safetensors.torch.load_file(first))
