"""Models on disk: the initial model that a federation starts from, and the model that it exports, in safetensors.

The initial file holds every tensor of the recipe's state dict, frozen ones included. NumPy reads the federated ones, so
that a broker needs no torch; bfloat16, which NumPy lacks, is widened to float32 exactly.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from ravnest_fed.blobs import sync_folder
from ravnest_fed.errors import LedgerError, SchemaMismatch
from ravnest_fed.parameters import ModelState, Schema

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
MAX_HEADER_BYTES = 64 * 2**20
_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}


def read_model(path: Path, schema: Schema) -> ModelState:
    """The federated values in the safetensors file `path`, in the layout of `schema`.

    Raises LedgerError for a damaged file and SchemaMismatch for a tensor that is missing or has another shape.
    """
    try:
        header, values = parse(np.memmap(path, np.uint8, "r"))
        return fill(header, values, schema, str(path))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LedgerError(f"model file {path} cannot be read: {error}", "copy the whole folder again") from None


def parse(data: Bytes) -> tuple[dict[str, Any], Bytes]:
    """The header of a safetensors file's bytes, and the bytes behind it. Raises ValueError."""
    size = int.from_bytes(bytes(data[:8]), "little")
    if not 2 <= size <= min(MAX_HEADER_BYTES, data.size - 8):
        raise ValueError("its header has an impossible length")
    header = json.loads(bytes(data[8 : 8 + size]))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    return header, data[8 + size :]


def fill(header: dict[str, Any], values: Bytes, schema: Schema, where: str) -> ModelState:
    """The federated values among the tensors of a safetensors file. Raises SchemaMismatch, ValueError or KeyError."""
    state = ModelState.zeros(schema)
    for name, (kind, _, spec) in schema.offsets.items():
        entry = header.get(name)
        if entry is None:
            raise SchemaMismatch(f"{where} holds no tensor {name}", "use weights of the recipe's model")
        if tuple(entry["shape"]) != spec.shape:
            raise SchemaMismatch(f"{where}: {name} has the shape {entry['shape']}, the schema {list(spec.shape)}")
        raw = tensor(entry, values)
        if raw.size != spec.count:
            raise ValueError(f"tensor {name} has {raw.size} values, not {spec.count}")
        target = state.view(schema, name)
        target[...] = raw.reshape(spec.shape).astype(np.int64 if kind == "counters" else np.float32)
    return state


def tensor(entry: dict[str, Any], values: Bytes) -> "np.ndarray[Any, Any]":
    """The values that a header's `entry` names, flat; bfloat16 as float32."""
    start, stop = entry["data_offsets"]
    raw = np.frombuffer(bytes(values[start:stop]), _DTYPES[entry["dtype"]])
    return (raw.astype("<u4") << 16).view("<f4") if entry["dtype"] == "BF16" else raw


def write_durably(path: Path, data: bytes) -> None:
    """Write `data` to `path`: under a temporary name, fsynced, renamed, its directory fsynced."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)
