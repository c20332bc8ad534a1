"""The flat state of real torch models: what is federated, exact casts, and files that the plain model loads."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from ravnest_fed.errors import RecipeError, SchemaMismatch
from ravnest_fed.model_files import read_model
from ravnest_fed.model_state import (
    TrainedDelta,
    export_state_dict,
    initial_state_dict,
    load_frozen,
    read_state,
    schema_of,
    write_state,
)
from ravnest_fed.parameters import BLOCK, ModelState, Schema

torch.set_num_threads(1)


class Mixed(nn.Module):
    """BatchNorm, tied and frozen weights, bfloat16 and float16, buffers of every sort."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.narrow = nn.Linear(4, 4).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.randn(3).to(torch.float16))
        self.single = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        torch.manual_seed(99)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int32))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(text))
        x = self.narrow(x.to(torch.bfloat16)).float() * self.scale.float().sum() * self.single.float()
        self.seen += 1
        return self.head(self.frozen(x))


def trained(model: Mixed, steps: int = 3) -> None:
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        text = (torch.arange(6) + step) % 7
        nn.functional.cross_entropy(model(text), text).backward()
        optimizer.step()


def assert_equal(one: Mixed, other: Mixed) -> None:
    """Equal in every tensor of the state dict; a double as far as float32 carries it."""
    theirs = other.state_dict()
    for name, tensor in one.state_dict().items():
        narrow = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor.to(narrow), theirs[name].to(narrow)), name


def test_the_schema_names_what_is_federated() -> None:
    schema = schema_of(Mixed(), BLOCK)
    assert [(spec.name, spec.shape, spec.dtype) for spec in schema.parameters] == [
        ("scale", (3,), "float16"),
        ("single", (), "float64"),
        ("embedding.weight", (7, 4), "float32"),
        ("norm.weight", (4,), "float32"),
        ("norm.bias", (4,), "float32"),
        ("narrow.weight", (4, 4), "bfloat16"),
        ("narrow.bias", (4,), "bfloat16"),
    ]
    assert [(spec.name, spec.minimum) for spec in schema.buffers] == [
        ("norm.running_mean", None),
        ("norm.running_var", 0.0),
    ]
    assert [(spec.name, spec.dtype) for spec in schema.counters] == [
        ("seen", "int32"),
        ("norm.num_batches_tracked", "int64"),
    ]
    assert schema.aliases == (("head.weight", "embedding.weight"),)
    schema.check()


def test_frozen_values_enter_the_schema_and_trainable_ones_do_not() -> None:
    schema = schema_of(Mixed(0), BLOCK)
    schema.require_equal(schema_of(Mixed(1), BLOCK), "here")
    other = Mixed()
    with torch.no_grad():
        other.frozen.bias[2] += 1e-3
    with pytest.raises(SchemaMismatch, match="frozen"):
        schema.require_equal(schema_of(other, BLOCK), "here")
    other = Mixed()
    other.mask[0] = False
    assert schema_of(other, BLOCK).frozen_hash != schema.frozen_hash


def test_a_state_written_is_the_state_read() -> None:
    source, target = Mixed(0), Mixed(1)
    trained(source)
    schema = schema_of(source, BLOCK)
    state = read_state(source, schema)
    assert not np.array_equal(state.vector, read_state(target, schema).vector)
    places = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    write_state(target, schema, state)
    again = read_state(target, schema)
    assert np.array_equal(state.vector, again.vector)
    assert np.array_equal(state.counters, again.counters)
    assert state.counters.tolist() == [3, 3, 3]
    assert {name: tensor.data_ptr() for name, tensor in target.state_dict().items()} == places
    assert_equal(source, target)


def delta_between(model: nn.Module, schema: Schema, base: ModelState) -> ModelState:
    delta, found = ModelState.zeros(schema), TrainedDelta(model, schema, base)
    for shard in schema.shards:
        delta.shard(shard)[...] = found.shard(shard)
    return delta


def test_a_model_left_alone_has_a_delta_of_exactly_zero() -> None:
    model = Mixed()
    schema = schema_of(model, BLOCK)
    base = read_state(model, schema)
    # Values that bfloat16 and float16 cannot hold: a base after averaging looks like this.
    base.vector[: schema.parameter_count] += np.float32(1e-4)
    write_state(model, schema, base)
    delta, advance = delta_between(model, schema, base)
    assert not delta.any()
    assert not advance.any()
    assert delta.dtype == np.float32
    assert advance.dtype == np.int64


def test_the_delta_is_base_minus_model_and_counters_advance() -> None:
    model = Mixed()
    schema = schema_of(model, BLOCK)
    base = read_state(model, schema)
    write_state(model, schema, base)
    trained(model, 4)
    after = read_state(model, schema)
    delta, advance = delta_between(model, schema, base)
    changes = ModelState(delta, advance)
    name = "embedding.weight"
    assert np.array_equal(changes.view(schema, name), base.view(schema, name) - after.view(schema, name))
    assert changes.view(schema, name).any()
    assert changes.view(schema, "narrow.weight").any()
    assert changes.view(schema, "norm.running_mean").any()
    assert advance.tolist() == [4, 4, 4]
    assert not delta[schema.parameter_count : schema.parameter_stop].any()


def test_a_double_keeps_small_changes() -> None:
    model = Mixed()
    schema = schema_of(model, BLOCK)
    base = read_state(model, schema)
    write_state(model, schema, base)
    with torch.no_grad():
        model.single += 1e-12
    delta, advance = delta_between(model, schema, base)
    assert ModelState(delta, advance).view(schema, "single") == pytest.approx(-1e-12, rel=1e-3)


def test_another_model_is_off_the_schema() -> None:
    schema = schema_of(nn.Linear(3, 2), BLOCK)
    state = ModelState.zeros(schema)
    with pytest.raises(SchemaMismatch, match=r"weight.*\[2, 4\].*\[2, 3\]"):
        write_state(nn.Linear(4, 2), schema, state)
    with pytest.raises(SchemaMismatch, match="bias"):
        read_state(nn.Linear(3, 2, bias=False), schema)


def test_what_cannot_be_federated_is_refused() -> None:
    with pytest.raises(RecipeError, match="complex64"):
        schema_of(nn.Linear(2, 2, dtype=torch.complex64), BLOCK)
    with pytest.raises(RecipeError, match="weight"):
        schema_of(nn.LazyLinear(2), BLOCK)


def test_an_exported_file_loads_into_the_plain_model(tmp_path: Path) -> None:
    founder, trainer = Mixed(0), Mixed(1)
    schema = schema_of(founder, BLOCK)
    initial = tmp_path / "model.safetensors"
    safetensors.torch.save_file(initial_state_dict(founder), initial)
    assert np.array_equal(read_model(initial, schema).vector, read_state(founder, schema).vector)
    trained(trainer)
    state = read_state(trainer, schema)
    exported = tmp_path / "export.safetensors"
    safetensors.torch.save_file(export_state_dict(schema, state, safetensors.torch.load_file(initial)), exported)
    fresh = Mixed(2)
    fresh.load_state_dict(safetensors.torch.load_file(exported))
    assert_equal(trainer, fresh)
    with pytest.raises(SchemaMismatch, match=r"head\.weight"):
        export_state_dict(schema, state, {n: t for n, t in initial_state_dict(founder).items() if n != "head.weight"})


def test_what_is_frozen_comes_from_the_initial_model(tmp_path: Path) -> None:
    founder, joiner = Mixed(), Mixed()
    with torch.no_grad():
        founder.frozen.weight.fill_(0.25)
    founder.mask[1] = False
    schema = schema_of(founder, BLOCK)
    safetensors.torch.save_file(initial_state_dict(founder), tmp_path / "model.safetensors")
    before = joiner.embedding.weight.clone()
    load_frozen(joiner, schema, tmp_path / "model.safetensors")
    schema.require_equal(schema_of(joiner, BLOCK), "here")
    assert torch.equal(joiner.embedding.weight, before)
    del founder.mask
    safetensors.torch.save_file(initial_state_dict(founder), tmp_path / "lacking.safetensors")
    with pytest.raises(SchemaMismatch, match="mask"):
        load_frozen(joiner, schema, tmp_path / "lacking.safetensors")
