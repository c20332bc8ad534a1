"""What a codec costs next to a memory copy in the same run: one thread, shards of 2^20 float32 values.

python -m benchmarks.codecs [--json] [--shards N] [--repeats N]

- encode: a client's delta to payloads; with error feedback the whole of it: add the residual, encode, keep what is left;
- decode: payloads to float32;
- accumulate: payloads into the exact 64-bit sums of a round.

A ratio is a copy's time over the step's, both for the same float32 bytes: 0.5 takes twice as long as copying. Times are the
least of several, by the process's own clock, so that other work on the machine counts little.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable

import numpy as np

from ravnest_fed import codecs
from ravnest_fed.aggregation.fixed_point import Accumulator, choose_scale_bits, value_bits
from ravnest_fed.codecs import Codec
from ravnest_fed.codecs.base import slices
from ravnest_fed.parameters import MAX_SHARD, Float32

CONTRIBUTIONS = 1024
WEIGHT = 40_000
TARGETS = {"int8": (0.27, 0.2), "int4": (0.18, 0.12), "topk128": (0.05, 0.2)}
"""Least ratios of encode and accumulate without a compiler."""


def deltas(shards: int) -> list[Float32]:
    """Values as training gives them: normal, of a size that differs from tensor to tensor."""
    generator = np.random.default_rng(0)
    sizes = np.repeat(np.exp(generator.normal(-7, 1, MAX_SHARD // 4096)), 4096).astype(np.float32)
    return [generator.standard_normal(MAX_SHARD, np.float32) * sizes for _ in range(shards)]


def encode(codec: Codec, delta: Float32, residual: Float32 | None) -> bytes:
    """One shard as a client encodes it; `residual` is brought up to date in place."""
    if residual is None:
        return codec.encode(delta)
    residual *= np.float32(codec.feedback_decay or 1.0)
    residual += delta
    payload = codec.encode(residual)
    residual -= codec.decode(payload, residual.size)
    return payload


def accumulate(codec: Codec, payload: bytes, sums: Accumulator) -> None:
    """One shard as its owner adds it."""
    for start, stop in slices(sums.count, codec.step):
        places, values = codec.entries(payload, sums.count, start, stop)
        sums.add(values, WEIGHT, start, places)


def least(step: Callable[[int], object], shards: int, repeats: int) -> float:
    """Seconds of the process for one shard, the least of `repeats` walks over all."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        for shard in range(shards):
            step(shard)
        found.append((time.process_time() - began) / shards)
    return min(found)


def measure(shards: int, repeats: int) -> dict[str, dict[str, float]]:
    """Ratios and bytes a parameter by codec."""
    values, target = deltas(shards), deltas(shards)
    copying = least(lambda shard: np.copyto(target[shard], values[shard]), shards, 3 * repeats)
    found: dict[str, dict[str, float]] = {"copy": {"GB/s": round(4 * MAX_SHARD / copying / 1e9, 2)}}
    scale_bits = choose_scale_bits([max(float(np.abs(one).max()) for one in values)], CONTRIBUTIONS)
    sums = [Accumulator(MAX_SHARD, scale_bits, value_bits(CONTRIBUTIONS)) for _ in range(shards)]
    for name in codecs.names():
        codec = codecs.get(name)
        left = [None if codec.feedback_decay is None else np.zeros(MAX_SHARD, np.float32) for _ in range(shards)]
        payloads = [codec.encode(one) for one in values]
        steps: dict[str, Callable[[int], object]] = {
            "encode": lambda shard, codec=codec, left=left: encode(codec, values[shard], left[shard]),  # type: ignore[misc]
            "decode": lambda shard, codec=codec, payloads=payloads: codec.decode_into(  # type: ignore[misc]
                payloads[shard], MAX_SHARD, target[shard]
            ),
            "accumulate": lambda shard, codec=codec, payloads=payloads: accumulate(  # type: ignore[misc]
                codec, payloads[shard], sums[shard]
            ),
        }
        found[name] = {"bytes": round(len(payloads[0]) / MAX_SHARD, 4)}
        for step, call in steps.items():
            found[name][step] = round(copying / least(call, shards, repeats), 3)
    return found


def main() -> None:
    """Measure and print; exit status 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    found = measure(options.shards, options.repeats)
    missed = [
        f"{name} {step} {found[name][step]} < {target}"
        for name, targets in TARGETS.items()
        for step, target in zip(("encode", "accumulate"), targets, strict=True)
        if found[name][step] < target
    ]
    if options.json:
        machine = {"machine": platform.machine(), "python": platform.python_version(), "numpy": np.__version__}
        print(json.dumps({**machine, "ratios": found, "missed": missed}))
    else:
        print(f"copy: {found.pop('copy')['GB/s']} GB/s; ratios to it:")
        print(f"{'codec':8} {'bytes':>7} {'encode':>8} {'decode':>8} {'accumulate':>10}")
        for name, row in found.items():
            print(f"{name:8} {row['bytes']:7} {row['encode']:8} {row['decode']:8} {row['accumulate']:10}")
        for line in missed:
            print(f"missed: {line}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
