"""Between a torch model and the flat federated state. Imports torch: only clients, `init` and `export` load this.

Values cross between a parameter's dtype and float32 by torch's casts on the CPU (round to nearest, ties to even), so
that every client puts the same bits into its model.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.parameter import is_lazy

from ravnest_fed.errors import RecipeError, SchemaMismatch
from ravnest_fed.hashing import digest
from ravnest_fed.parameters import Float32, Int64, Kind, ModelState, Schema, Shard, TensorSpec

PIECE = 2**20
"""Values looked at at once."""
COUNTER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Dtypes of integer buffers that are federated."""


def schema_of(model: nn.Module, shard_size: int) -> Schema:
    """What of `model` is federated, cut into shards of `shard_size` values.

    Federated are the trainable floating-point parameters and the persistent buffers, in the model's own order; a tensor
    with several names goes by its first, and the others are its aliases. Frozen parameters and persistent buffers of
    other dtypes are not; their bytes enter `frozen_hash`. Raises RecipeError for a parameter that cannot be federated.
    """
    parameters: list[TensorSpec] = []
    buffers: list[TensorSpec] = []
    counters: list[TensorSpec] = []
    frozen: list[bytes] = []
    aliases: list[tuple[str, str]] = []
    first_names: dict[int, str] = {}
    for name, tensor, is_parameter in _persistent(model):
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            aliases.append((name, first))
            continue
        if is_lazy(tensor):
            raise RecipeError(f"parameter {name} has no shape yet", "run one batch through the model in model()")
        dtype = str(tensor.dtype).removeprefix("torch.")
        spec = TensorSpec(name, tuple(tensor.shape), dtype)
        if is_parameter and tensor.requires_grad:
            if not tensor.is_floating_point():
                raise RecipeError(f"parameter {name} is {dtype}", "train real floating-point parameters only")
            parameters.append(spec)
        elif not is_parameter and tensor.is_floating_point():
            # A variance is never negative, whatever the mean of coded deltas says.
            least = 0.0 if name.endswith("running_var") else None
            buffers.append(TensorSpec(name, spec.shape, dtype, least))
        elif not is_parameter and tensor.dtype in COUNTER_DTYPES:
            counters.append(spec)
        else:
            content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            for part in (name.encode(), str(spec.shape).encode(), dtype.encode(), content.tobytes()):
                frozen += [len(part).to_bytes(8, "little"), part]
    federated = {spec.name for spec in (*parameters, *buffers, *counters)}
    return Schema(
        tuple(parameters),
        tuple(buffers),
        tuple(counters),
        digest("frozen parameters", *frozen).hex(),
        shard_size,
        tuple((alias, name) for alias, name in aliases if name in federated),
    )


def read_state(model: nn.Module, schema: Schema) -> ModelState:
    """The federated values of `model`. Raises SchemaMismatch for a tensor that is missing or has another shape."""
    state = ModelState.zeros(schema)
    for name, kind, spec, tensor in _federated(model, schema):
        wide = torch.int64 if kind == "counters" else torch.float32
        state.view(schema, name)[...] = tensor.detach().cpu().to(wide).numpy().reshape(spec.shape)
    return state


@torch.no_grad()
def write_state(model: nn.Module, schema: Schema, state: ModelState) -> None:
    """Put `state` into `model`, in place, in each tensor's dtype and on its device. Raises as `read_state` does."""
    for name, _, _, tensor in _federated(model, schema):
        # `to` copies where the dtype differs, and only there.
        tensor.copy_(torch.from_numpy(state.view(schema, name)).to(tensor.dtype))


class TrainedDelta:
    """What training changed since `write_state(model, schema, base)`, shard by shard; it holds no copy of the whole.

    The base is taken as the model's dtype held it, so that an untouched model gives exactly zero. Parameters and buffers
    are base - model in float32, counters model - base in int64. It tells what holds as the model stands when asked.
    """

    def __init__(self, model: nn.Module, schema: Schema, base: ModelState) -> None:
        self._base = base
        self._tensors = [
            (kind, schema.offsets[name][1], spec.count, tensor)
            for name, kind, spec, tensor in _federated(model, schema)
        ]

    def shard(self, shard: Shard) -> Float32 | Int64:
        """The shard's values; zeros where no tensor lies."""
        base = self._base.shard(shard)
        values = np.zeros_like(base)
        for kind, offset, count, tensor in self._tensors:
            start, stop = max(offset, shard.start), min(offset + count, shard.start + shard.count)
            if kind == shard.kind and start < stop:
                part = slice(start - shard.start, stop - shard.start)
                after = tensor.detach().reshape(-1)[start - offset : stop - offset].cpu()
                values[part] = _change(torch.from_numpy(np.array(base[part])), after)
        return values


def _change(base: torch.Tensor, after: torch.Tensor) -> np.ndarray[Any, Any]:
    before = base.to(after.dtype)
    if base.dtype == torch.int64:
        change = after.to(torch.int64) - before.to(torch.int64)
    else:
        wide = torch.float64 if after.dtype == torch.float64 else torch.float32
        change = (before.to(wide) - after.to(wide)).to(torch.float32)
    return change.numpy()


def finite(model: nn.Module, schema: Schema) -> bool:
    """Whether every federated floating-point value of `model` is a finite number."""
    return all(
        # In pieces: the check takes as much memory as it looks at.
        bool(torch.isfinite(piece).all())
        for _, kind, _, tensor in _federated(model, schema)
        if kind != "counters"
        for piece in torch.split(tensor.detach().reshape(-1), PIECE)
    )


def parameter_shifts(model: nn.Module, schema: Schema, shift: Float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each federated parameter of `model` with its part of `shift`, in its dtype and on its device.

    `shift` is float32, in the layout of the parameters' part of the float32 vector.
    """
    shifts = []
    for name, kind, spec, tensor in _federated(model, schema):
        if kind == "parameters":
            start = schema.offsets[name][1]
            part = torch.from_numpy(shift[start : start + spec.count].reshape(spec.shape))
            shifts.append((tensor, part.to(tensor.device, tensor.dtype)))
    return shifts


@torch.no_grad()
def load_frozen(model: nn.Module, schema: Schema, initial: Path) -> None:
    """Put what `schema` does not federate into `model` from the safetensors file `initial`, in place.

    Raises SchemaMismatch for a tensor that is missing or has another shape or dtype.
    """
    federated = schema.offsets.keys() | {alias for alias, _ in schema.aliases}
    with safe_open(initial, framework="pt") as file:
        held = set(file.keys())
        for name, tensor in model.state_dict().items():
            if name in federated:
                continue
            value = file.get_tensor(name) if name in held else None
            if value is None or value.shape != tensor.shape or value.dtype != tensor.dtype:
                raise SchemaMismatch(
                    f"the initial model holds no tensor {name} of {list(tensor.shape)} {tensor.dtype}",
                    "use the federation's own recipe",
                )
            tensor.copy_(value)


def initial_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole state dict of `model`, for a safetensors file: contiguous copies on the CPU, every name its own.

    Raises RecipeError for an entry that is no tensor, which such a file cannot hold.
    """
    tensors = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise RecipeError(f"the model's state dict holds {name}, a {type(value).__name__}", "keep tensors only")
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return tensors


def export_state_dict(
    schema: Schema, state: ModelState, initial: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`initial` (every tensor of the model's state dict, frozen ones included) with `state` in place of its federated
    values, each in its own dtype and under each of its names; the recipe's plain model loads it.

    Raises SchemaMismatch if `initial` lacks a federated tensor.
    """
    tensors = dict(initial)
    names = [(name, name) for name in schema.offsets] + list(schema.aliases)
    for name, source in names:
        if name not in tensors or tuple(tensors[name].shape) != schema.offsets[source][2].shape:
            raise SchemaMismatch(f"the initial model holds no tensor {name} of the schema's shape")
        tensors[name] = _cast(state, schema, source, tensors[name].dtype)
    return tensors


def _persistent(model: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """Every parameter and persistent buffer under every name: name, tensor, whether it is a parameter."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, True
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            yield name, buffer, False


def _federated(model: nn.Module, schema: Schema) -> Iterator[tuple[str, Kind, TensorSpec, torch.Tensor]]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers(remove_duplicate=False))}
    for name, (kind, _, spec) in schema.offsets.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise SchemaMismatch(f"the model holds no tensor {name}", "use the federation's own recipe")
        if tuple(tensor.shape) != spec.shape:
            raise SchemaMismatch(
                f"{name} has the shape {list(tensor.shape)}, the federation's schema {list(spec.shape)}",
                "use the federation's own recipe",
            )
        yield name, kind, spec, tensor


def _cast(state: ModelState, schema: Schema, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Tensor `name` of `state`, copied, in `dtype`, on the CPU."""
    return torch.from_numpy(np.array(state.view(schema, name))).to(dtype)
