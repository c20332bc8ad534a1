"""Local training: exact steps, determinism, data of every form, and the ways in which a round fails."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from clients.trainer import LocalResult, LocalWork, RoundAbandoned, Trainer, TrainingDiverged
from ravnest_fed.errors import NoDataError, RecipeError, SchemaMismatch
from ravnest_fed.model_state import initial_state_dict, read_state, schema_of
from ravnest_fed.parameters import BLOCK, ModelState, Schema
from ravnest_fed.recipe import LoadedRecipe, Partition, load_recipe

torch.set_num_threads(1)

RECIPE = """
import torch
import ravnest_fed as rf

class Small(rf.Recipe):
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    def train_data(self, part):
        inputs = torch.arange(30.).reshape(10, 3) / 30 + part.index
        return inputs, inputs.sum(1, keepdim=True)
    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05)
"""


def work(server_round: int = 1, micro_batch: int = 4, accumulation: int = 1, local_steps: int = 3) -> LocalWork:
    return LocalWork(server_round, micro_batch, accumulation, local_steps, committed_steps=0)


class Bench:
    """A recipe made of RECIPE and further methods, its schema and its initial state."""

    def __init__(self, folder: Path, methods: str = "") -> None:
        text = RECIPE + "".join(f"    {line}\n" for line in methods.splitlines())
        (folder / "recipe.py").write_text(text)
        self.loaded: LoadedRecipe = load_recipe(folder / "recipe.py")
        model = self.loaded.build_model(0)
        self.schema: Schema = schema_of(model, BLOCK)
        self.base: ModelState = read_state(model, self.schema)

    def trainer(self, index: int = 0, seed: int = 0) -> Trainer:
        return Trainer(self.loaded, self.schema, Partition(index, 2, seed), "cpu", seed)

    def after(self, base: ModelState, result: LocalResult) -> ModelState:
        return ModelState(base.vector - result.delta.vector, base.counters + result.delta.counters)


Make = Callable[..., Bench]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda methods="": Bench(tmp_path, methods)


def test_a_proximal_term_holds_training_to_the_base(make: Make) -> None:
    bench, pull = make(), 0.5
    asked = LocalWork(1, 10, 1, 5, committed_steps=0, proximal=pull)
    result = bench.trainer().local_round(asked, bench.base)
    model, start = bench.loaded.build_model(0), bench.loaded.build_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch = bench.loaded.train_data(Partition(0, 2, 0))
    for _ in range(5):
        optimizer.zero_grad()
        distance = sum(
            (one - base.detach()).square().sum()
            for one, base in zip(model.parameters(), start.parameters(), strict=True)
        )
        (bench.loaded.loss(model, batch) + pull / 2 * distance).backward()
        optimizer.step()
    expected = bench.base.vector - read_state(model, bench.schema).vector
    assert np.allclose(result.delta.vector, expected, rtol=1e-4, atol=1e-7)
    plain = bench.trainer().local_round(work(micro_batch=10, local_steps=5), bench.base)
    assert np.linalg.norm(result.delta.vector) < 0.99 * np.linalg.norm(plain.delta.vector)


def test_the_proximal_term_is_clipped_with_the_gradient_it_belongs_to(make: Make) -> None:
    bench = make("max_grad_norm = 0.01")
    result = bench.trainer().local_round(LocalWork(1, 4, 1, 4, committed_steps=0, proximal=1000.0), bench.base)
    assert np.linalg.norm(result.delta.vector) <= 4 * 0.05 * 0.01 * 1.001


def test_a_round_is_plain_local_training(make: Make) -> None:
    bench = make()
    result = bench.trainer().local_round(work(micro_batch=10, local_steps=5), bench.base)
    model = bench.loaded.build_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch = bench.loaded.train_data(Partition(0, 2, 0))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = bench.loaded.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expected = bench.base.vector - read_state(model, bench.schema).vector
    assert np.allclose(result.delta.vector, expected, rtol=1e-4, atol=1e-7)
    assert result.delta.vector.dtype == np.float32
    assert (result.num_examples, result.local_steps) == (50, 5)
    assert result.metrics == {"loss": pytest.approx(np.mean(losses), rel=1e-5)}
    assert result.seconds > 0


def test_accumulation_is_one_large_batch(make: Make) -> None:
    bench = make()
    whole = bench.trainer().local_round(work(micro_batch=8), bench.base)
    parts = bench.trainer().local_round(work(micro_batch=2, accumulation=4), bench.base)
    assert np.allclose(whole.delta.vector, parts.delta.vector, rtol=1e-4, atol=1e-7)
    assert whole.num_examples == parts.num_examples == 24
    assert whole.metrics["loss"] == pytest.approx(parts.metrics["loss"], rel=1e-5)


def test_accumulation_weighs_batches_by_their_examples(make: Make) -> None:
    bench = make(
        "def train_data(self, part):\n"
        "    x = torch.arange(15.).reshape(5, 3) / 9\n"
        "    y = x.sum(1, keepdim=True)\n"
        "    return {0: (x[:4], y[:4]), 1: (x[4:], y[4:])}.values()"
    )
    result = bench.trainer().local_round(work(micro_batch=4, accumulation=2, local_steps=1), bench.base)
    model = bench.loaded.build_model(0)
    x = torch.arange(15.0).reshape(5, 3) / 9
    bench.loaded.loss(model, (x, x.sum(1, keepdim=True))).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad
    expected = bench.base.vector - read_state(model, bench.schema).vector
    assert np.allclose(result.delta.vector, expected, rtol=1e-4, atol=1e-7)
    assert result.num_examples == 5


def test_the_same_seed_round_and_client_give_the_same_bits(make: Make) -> None:
    noisy = "def loss(self, model, batch):\n    return (model(batch[0] + torch.rand(()))).square().mean()"
    bench = make(noisy)

    def run(index: int = 0, seed: int = 0, server_round: int = 1) -> bytes:
        return bench.trainer(index, seed).local_round(work(server_round), bench.base).delta.vector.tobytes()

    torch.manual_seed(1)
    first = run()
    torch.manual_seed(2)
    assert run() == first
    assert len({first, run(index=1), run(seed=1), run(server_round=2)}) == 4


def test_random_state_outside_is_left_alone(make: Make) -> None:
    bench = make()
    before, legacy = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    bench.trainer().local_round(work(), bench.base)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], legacy)


SEEN = """
def train_data(self, part):
    return torch.arange(10)
def loss(self, model, batch):
    self.seen = getattr(self, "seen", []) + [batch.tolist()]
    return model(torch.ones(1, 3)).sum()
"""


def test_every_epoch_visits_every_sample_once_in_an_order_of_its_own(make: Make) -> None:
    bench = make(SEEN)
    trainer = bench.trainer()
    for server_round in range(1, 6):
        trainer.local_round(work(server_round, micro_batch=4, local_steps=1), bench.base)
    drawn = [row for batch in bench.loaded.recipe.seen for row in batch]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]
    assert trainer.progress.position == (2, 0)


def test_resumed_progress_carries_on_with_the_same_data(make: Make) -> None:
    bench = make(SEEN)
    trainer, resumed = bench.trainer(), bench.trainer()
    trainer.local_round(work(1), bench.base)
    resumed.progress = trainer.progress
    bench.loaded.recipe.seen = []
    trainer.local_round(work(2), bench.base)
    resumed.local_round(work(2), bench.base)
    seen = bench.loaded.recipe.seen
    assert seen[:3] == seen[3:]


def test_data_smaller_than_a_micro_batch_is_used_as_it_is(make: Make) -> None:
    bench = make(SEEN)
    result = bench.trainer().local_round(work(micro_batch=64, local_steps=2), bench.base)
    assert [sorted(batch) for batch in bench.loaded.recipe.seen] == [list(range(10))] * 2
    assert result.num_examples == 20


@pytest.mark.parametrize(
    "data",
    [
        "[(inputs[i], targets[i]) for i in range(10)]",
        "torch.utils.data.TensorDataset(inputs, targets)",
        "torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=4)",
        "(inputs, targets)",
    ],
)
def test_data_comes_in_every_form(make: Make, data: str) -> None:
    bench = make(
        "def train_data(self, part):\n    inputs = torch.ones(10, 3)\n    targets = torch.ones(10, 1)\n"
        f"    return {data}"
    )
    result = bench.trainer().local_round(work(local_steps=5), bench.base)
    assert result.delta.vector.any()
    assert 18 <= result.num_examples <= 20


def test_dicts_keep_their_names_and_collate_is_the_recipes(make: Make) -> None:
    bench = make(
        "def train_data(self, part): return {'x': torch.ones(6, 3), 'y': torch.zeros(6, 1)}\n"
        "def loss(self, model, batch): return torch.nn.functional.mse_loss(model(batch['x']), batch['y'])"
    )
    assert bench.trainer().local_round(work(), bench.base).num_examples == 12
    bench = make(
        "def train_data(self, part): return ['a', 'bb', 'ccc', 'dddd']\n"
        "def collate(self, samples): return torch.tensor([[len(s), 0., 0.] for s in samples])\n"
        "def loss(self, model, batch): return model(batch).mean()"
    )
    assert bench.trainer().local_round(work(), bench.base).num_examples == 12


@pytest.mark.parametrize("data", ["[]", "(torch.ones(0, 3), torch.ones(0, 1))", "iter(())"])
def test_no_data_is_said(make: Make, data: str) -> None:
    bench = make(f"def train_data(self, part): return {data}")
    with pytest.raises(NoDataError, match="part 0 of 2"):
        bench.trainer().local_round(work(), bench.base)


def test_data_of_no_known_form_is_refused(make: Make) -> None:
    with pytest.raises(RecipeError, match="int"):
        make("def train_data(self, part): return 3").trainer().load_data()
    with pytest.raises(RecipeError, match=r"\[2, 3\]"):
        make("def train_data(self, part): return torch.ones(3), torch.ones(2)").trainer().load_data()


def test_a_cancelled_round_leaves_no_trace(make: Make) -> None:
    bench = make("keep_optimizer = True\ndef optimizer(self, p): return torch.optim.SGD(p, lr=0.05, momentum=0.9)")
    disturbed, calm = bench.trainer(), bench.trainer()
    for trainer in (disturbed, calm):
        trainer.local_round(work(1), bench.base)
    asked = iter([False, False, True])
    with pytest.raises(RoundAbandoned, match="step 3"):
        disturbed.local_round(work(2), bench.base, lambda: next(asked))
    again, once = (trainer.local_round(work(2), bench.base) for trainer in (disturbed, calm))
    assert again.delta.vector.tobytes() == once.delta.vector.tobytes()


def test_a_loss_that_is_not_finite_names_the_step(make: Make) -> None:
    bench = make(
        "def loss(self, model, batch):\n    self.calls = getattr(self, 'calls', 0) + 1\n"
        "    return model(batch[0]).mean() * (float('nan') if self.calls == 2 else 1.0)"
    )
    trainer = bench.trainer()
    with pytest.raises(TrainingDiverged, match="loss is not finite after step 2 of 3 of round 7"):
        trainer.local_round(work(7), bench.base)
    assert np.isfinite(trainer.local_round(work(8), bench.base).delta.vector).all()


def test_parameters_that_are_not_finite_are_never_sent(make: Make) -> None:
    bench = make("def optimizer(self, p): return torch.optim.SGD(p, lr=float('inf'))")
    with pytest.raises(TrainingDiverged, match="parameters"):
        bench.trainer().local_round(work(local_steps=1), bench.base)


@pytest.mark.parametrize("keep", [False, True])
def test_the_optimisers_state_outlives_the_round_only_if_asked(make: Make, keep: bool) -> None:
    bench = make(
        f"keep_optimizer = {keep}\ndef optimizer(self, p): return torch.optim.SGD(p, lr=0.05, momentum=0.9)\n"
        "def train_data(self, part): return torch.ones(4, 3), torch.ones(4, 1)"
    )
    trainer = bench.trainer()
    first, second = (trainer.local_round(work(1), bench.base).delta.vector for _ in range(2))
    assert np.array_equal(first, second) is not keep


def test_schedules_follow_committed_steps(make: Make) -> None:
    bench = make(
        "def schedule(self, optimizer, committed_steps):\n"
        "    self.at = getattr(self, 'at', []) + [committed_steps]\n"
        "    optimizer.param_groups[0]['lr'] = 0.0"
    )
    result = bench.trainer().local_round(LocalWork(9, 4, 1, 3, committed_steps=80), bench.base)
    assert bench.loaded.recipe.at == [80, 81, 82]
    assert not result.delta.vector.any()


def test_gradients_are_clipped(make: Make) -> None:
    bench = make("max_grad_norm = 0.01")
    delta = bench.trainer().local_round(work(local_steps=1), bench.base).delta.vector
    assert np.linalg.norm(delta) == pytest.approx(0.05 * 0.01, rel=1e-3)


def test_batch_norm_counts_and_moves_its_statistics(make: Make) -> None:
    bench = make(
        "def model(self): return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))\n"
        "def loss(self, model, batch): return model(batch[0]).square().mean() + model[0].weight.sum()"
    )
    result = bench.trainer().local_round(work(accumulation=2), bench.base)
    assert result.delta.counters.tolist() == [6]
    changed = result.delta
    assert changed.view(bench.schema, "1.running_mean").any()
    assert changed.view(bench.schema, "1.running_var").any()


def test_evaluation_measures_the_given_state(make: Make) -> None:
    bench = make(
        "def evaluate(self, model):\n    assert not model.training and not torch.is_grad_enabled()\n"
        "    return {'bias': model[2].bias.sum()}\ndef evaluation_examples(self): return 7"
    )
    trainer = bench.trainer()
    state = ModelState(bench.base.vector.copy(), bench.base.counters)
    state.view(bench.schema, "2.bias")[...] = 2.5
    trainer.local_round(work(), bench.base)
    assert trainer.evaluate(state) == ({"bias": 2.5}, 7)
    with pytest.raises(RecipeError, match="bias"):
        state.view(bench.schema, "2.bias")[...] = np.inf
        trainer.evaluate(state)


def test_without_evaluate_there_are_no_metrics(make: Make) -> None:
    bench = make()
    assert bench.trainer().evaluate(bench.base) is None


def test_evaluation_between_rounds_changes_nothing(make: Make) -> None:
    bench = make("def evaluate(self, model): return {'x': torch.rand(()).item()}")
    one, other = bench.trainer(), bench.trainer()
    other.evaluate(bench.base)
    first, second = (trainer.local_round(work(), bench.base).delta.vector for trainer in (one, other))
    assert np.array_equal(first, second)


def test_rounds_follow_the_base(make: Make) -> None:
    bench = make()
    trainer = bench.trainer()
    state, losses = bench.base, []
    for server_round in range(1, 16):
        result = trainer.local_round(work(server_round, micro_batch=10, local_steps=10), state)
        state = bench.after(state, result)
        losses.append(result.metrics["loss"])
    assert losses[-1] < 0.1 * losses[0]


def test_a_model_off_the_schema_is_refused(make: Make, tmp_path: Path) -> None:
    bench = make()
    (tmp_path / "other.py").write_text(RECIPE.replace("Linear(4, 1)", "Linear(4, 2)"))
    with pytest.raises(SchemaMismatch, match=r"other\.py"):
        Trainer(load_recipe(tmp_path / "other.py"), bench.schema, Partition(0, 1, 0), "cpu")


def test_frozen_weights_come_from_the_initial_model(make: Make, tmp_path: Path) -> None:
    bench = make(
        "def model(self):\n    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))\n"
        "    model[0].requires_grad_(False)\n    return model"
    )
    model = bench.loaded.build_model(0)
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    schema = schema_of(model, BLOCK)
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(initial_state_dict(model), file)
    with pytest.raises(SchemaMismatch, match="frozen"):
        Trainer(bench.loaded, schema, Partition(0, 1, 0), "cpu")
    trainer = Trainer(bench.loaded, schema, Partition(0, 1, 0), "cpu", initial=file)
    assert trainer.local_round(work(), bench.base).delta.vector.any()


def test_another_part_means_other_data(make: Make) -> None:
    bench = make()
    trainer, moved = bench.trainer(0), bench.trainer(0)
    moved.repartition(Partition(1, 2, 0))
    other = bench.trainer(1).local_round(work(), bench.base)
    assert np.array_equal(moved.local_round(work(), bench.base).delta.vector, other.delta.vector)
    assert not np.array_equal(trainer.local_round(work(), bench.base).delta.vector, other.delta.vector)
