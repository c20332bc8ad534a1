"""Checkpoints: the log folded up to a round, as one safetensors file that every broker writes alike.

A checkpoint holds the whole replicated state, so a replica goes on from it as if it had folded every commit. It needs no
signature of its own: the commit of its round, which a majority signed, names the hash of exactly that state.
"""

import base64
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from ravnest_fed.errors import RemoteProtocolError, SchemaMismatch, VerificationError
from ravnest_fed.facts import Body, body_hash, decode, encode
from ravnest_fed.federation import Federation
from ravnest_fed.head import Head
from ravnest_fed.model_files import fill, parse, tensor
from ravnest_fed.parameters import Float32, Int64
from ravnest_fed.replica import FoldedHashes, Replica

FORMAT = "ravnest-fed checkpoint 1"
OUTER = "outer_state."


def checkpoint_pieces(replica: Replica) -> Iterator[memoryview]:
    """The bytes of the checkpoint of `replica`, in pieces: the same on every broker that stands at the same round.

    A safetensors file: the model's federated tensors by name (float32, counters int64), the outer optimiser's vectors
    (float32, as `outer_state.NAME`), and in its metadata the head, with the counted table, the recorded norms, the
    roster and the members.
    """
    schema, federation, hashes = replica.schema, replica.federation, replica.hashes()
    head = msgspec.structs.replace(replica.head, counted=dict(sorted(replica.head.counted.items())))
    arrays: dict[str, Float32 | Int64] = {}
    for spec in (*schema.counters, *schema.parameters, *schema.buffers):
        arrays[spec.name] = replica.state.view(schema, spec.name)
    for name, vector in replica.outer_state.items():
        arrays[OUTER + name] = vector
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "federation": federation.fingerprint.hex(),
            "recipe": federation.federation.recipe,
            "recipe_hash": federation.federation.recipe_hash,
            "server_round": str(head.server_round),
            "model_hash": hashes.model_hash.hex(),
            "state_hash": hashes.state_hash.hex(),
            "head": base64.b64encode(encode(head)).decode(),
        }
    }
    offset = 0
    for name, array in arrays.items():
        dtype = "I64" if array.dtype == np.int64 else "F32"
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for array in arrays.values():
        little = np.ascontiguousarray(array).reshape(-1)
        if little.size:
            yield little.astype(little.dtype.newbyteorder("<"), copy=False).data.cast("B")


def read_checkpoint(data: memoryview, federation: Federation, commit: bytes) -> Replica:
    """The replica in the checkpoint `data` of the round that the body `commit` (its bytes) decided.

    Raises VerificationError unless the whole replicated state in it is the one whose hash that body names. So a checkpoint
    needs no other proof than the votes for its round.
    """
    body = decode(Body, commit)
    where = f"the checkpoint of round {body.server_round}"
    try:
        header, values = parse(np.frombuffer(data, np.uint8))
        metadata = header["__metadata__"]
        if metadata["format"] != FORMAT or metadata["federation"] != federation.fingerprint.hex():
            raise VerificationError(f"{where} is of another federation or format")
        head = decode(Head, base64.b64decode(metadata["head"], validate=True))
        state = fill(header, values, federation.schema, where)
        vectors = Replica(federation, state).outer_state
        for name, vector in vectors.items():
            vector[...] = tensor(header[OUTER + name], values)
        replica = Replica.at(federation, state, vectors, head)
    except (ValueError, KeyError, TypeError, RecursionError, SchemaMismatch, RemoteProtocolError) as error:
        raise VerificationError(f"{where} cannot be read: {error}", "copy it from another broker") from None
    hashes = replica.hashes()
    clients = tuple(one.client for one in body.counted)
    if (
        hashes != FoldedHashes(body.model_hash, body.state_hash)
        or head.commit_hash != body_hash(commit)
        or head.model_hash != body.model_hash
        or head.last_clients != clients
    ):
        raise VerificationError(f"{where} holds another state than a majority signed", "copy it from another broker")
    return replica
