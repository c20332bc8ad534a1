"""Writes codecs.json and folding.json: what every implementation must give, to the bit.

    python -m tests.vectors.make

Inputs are derived from BLAKE3's output stream, so that they depend on no library's random numbers. Small vectors stand
in full, as hex of little-endian values; of large ones there is the plain BLAKE3 of those bytes.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from ravnest_fed import codecs
from ravnest_fed.aggregation import outer
from ravnest_fed.aggregation.reduce import reduce_shard
from ravnest_fed.aggregation.weighting import Weight
from ravnest_fed.codecs.counters import encode_counters
from ravnest_fed.parameters import Float32, Int64

HERE = Path(__file__).parent
SMALL, LARGE = 8, 70_001
EDGES = ("00000000", "00000080", "01000000", "ffff7f00", "00008000", "01008000", "ffff7f7f", "ffff7fff")
"""Little-endian float32: both zeros, subnormals, the least normals, the greatest finite ones."""


def sample(seed: str, count: int, exponent: int = 120, spread: int = 8) -> Float32:
    """`count` float32 values of both signs, exponents `exponent` to `exponent + spread - 1` (biased), any mantissa."""
    bits = np.frombuffer(blake3(seed.encode()).digest(length=4 * count), "<u4").astype(np.uint32)
    exponents = exponent + ((bits >> np.uint32(23)) & np.uint32(0xFF)) % np.uint32(spread)
    return ((bits & np.uint32(0x807FFFFF)) | exponents.astype(np.uint32) << np.uint32(23)).view(np.float32)


def increments(seed: str, count: int) -> Int64:
    """`count` integers below 2^32."""
    return np.frombuffer(blake3(seed.encode()).digest(length=4 * count), "<u4").astype(np.int64)


def shown(name: str, data: bytes) -> dict[str, Any]:
    """`data` in full if it is short, its hash if not."""
    return {f"{name}_hex": data.hex()} if len(data) <= 128 else {f"{name}_blake3": blake3(data).hexdigest()}


def raw(values: Float32 | Int64) -> bytes:
    """The values as little-endian bytes."""
    return values.astype(values.dtype.newbyteorder("<")).tobytes()


def codec_vectors() -> list[dict[str, Any]]:
    """Input, payload and decoded values of each codec."""
    inputs = {
        "edges": np.frombuffer(bytes.fromhex("".join(EDGES)), "<f4").astype(np.float32),
        "small": sample("small", SMALL),
        "large": sample("large", LARGE),
        "wide": sample("wide", LARGE, 1, 254),
    }
    cases: list[dict[str, Any]] = []
    for name in codecs.names():
        codec = codecs.get(name)
        for seed, values in inputs.items():
            payload = codec.encode(values)
            case = {"codec": name, "input": seed, "count": values.size, **shown("input", raw(values))}
            decoded = codec.decode(payload, values.size)
            cases.append({**case, **shown("payload", payload), **shown("decoded", raw(decoded))})
    for seed, count in (("small", SMALL), ("large", LARGE)):
        counters = increments(seed, count)
        case = {"codec": "counters", "input": seed, "count": count, **shown("input", raw(counters))}
        cases.append({**case, **shown("payload", encode_counters(counters))})
    return cases


def folding_vectors() -> list[dict[str, Any]]:
    """Parameters and outer state after three rounds, each the mean of three contributions."""
    cases = []
    weights = [Weight(65536, 65536), Weight(777, 40000), Weight(1, 3)]
    optimizers = (
        ("fedavg", 1.0, 0.0, False),
        ("fedavgm", 0.7, 0.9, False),
        ("fedavgm", 0.7, 0.9, True),
        ("fedadam", 0.01, 0.9, False),
        ("fedyogi", 0.01, 0.9, False),
        ("fedadagrad", 0.03, 0.0, False),
    )
    for name, rate, momentum, nesterov in optimizers:
        for codec_name in codecs.names():
            for count, exponent, scale_bits in ((SMALL, 112, 40), (LARGE, 112, 40), (LARGE, 1, 126)):
                codec, optimizer = codecs.get(codec_name), outer.get(name, rate, momentum, nesterov)
                # An update is encoded without error feedback, so never in a codec that needs it.
                down = codec if codec.feedback_decay is None else codecs.get("int8")
                parameters = sample("parameters", count, exponent)
                state = tuple(np.zeros(count, np.float32) for _ in optimizer.state_names())
                scalars: tuple[np.float32, ...] = ()
                updates = []
                for server_round in (1, 2, 3):
                    payloads = {
                        bytes([i]): codec.encode(sample(f"delta {server_round} {i}", count, exponent))
                        for i in range(len(weights))
                    }
                    chosen = {bytes([i]): weight for i, weight in enumerate(weights)}
                    total = sum(weight.share for weight in weights)
                    update = reduce_shard(
                        "parameters", count, chosen, total, payloads.__getitem__, scale_bits, 16, codec, down
                    )
                    scalars = optimizer.scalars(scalars)
                    optimizer.step(parameters, down.decode(update, count), state, scalars)
                    updates.append(update)
                cases.append(
                    {
                        "optimizer": [name, rate, momentum, nesterov],
                        "codec": codec_name,
                        "down": down.name,
                        "count": count,
                        "least_exponent": exponent,
                        "scale_bits": scale_bits,
                        **shown("updates", b"".join(updates)),
                        **shown("parameters", raw(parameters)),
                        **shown("state", b"".join(map(raw, state))),
                    }
                )
    return cases


FILES = {"codecs.json": codec_vectors, "folding.json": folding_vectors}

if __name__ == "__main__":
    for file_name, vectors in FILES.items():
        (HERE / file_name).write_text(json.dumps(vectors(), indent=1) + "\n")
