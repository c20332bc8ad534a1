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
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= MAX_HEADER_BYTES:
                raise ValueError("its header has an impossible length")
            header: dict[str, Any] = json.loads(file.read(size))
        data = np.memmap(path, np.uint8, "r", offset=8 + size)
        return _fill(header, data, schema, path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LedgerError(f"model file {path} cannot be read: {error}", "copy the whole folder again") from None


def _fill(header: dict[str, Any], data: "np.ndarray[Any, Any]", schema: Schema, path: Path) -> ModelState:
    state = ModelState.zeros(schema)
    for name, (kind, _, spec) in schema.offsets.items():
        entry = header.get(name)
        if entry is None:
            raise SchemaMismatch(f"{path} holds no tensor {name}", "use weights of the recipe's model")
        if tuple(entry["shape"]) != spec.shape:
            raise SchemaMismatch(f"{path}: {name} has the shape {entry['shape']}, the schema {list(spec.shape)}")
        start, stop = entry["data_offsets"]
        raw = np.frombuffer(bytes(data[start:stop]), _DTYPES[entry["dtype"]])
        if raw.size != spec.count:
            raise ValueError(f"tensor {name} has {raw.size} values, not {spec.count}")
        if entry["dtype"] == "BF16":
            raw = (raw.astype("<u4") << 16).view("<f4")
        target = state.view(schema, name)
        target[...] = raw.reshape(spec.shape).astype(np.int64 if kind == "counters" else np.float32)
    return state


def write_durably(path: Path, data: bytes) -> None:
    """Write `data` to `path`: under a temporary name, fsynced, renamed, its directory fsynced."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)
