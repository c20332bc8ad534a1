"""Weights for the char_lm recipe to start from: a short training on one machine, kept for the next time.

    python examples/char_lm/warm_start.py --out warm.safetensors
    ravnest-fed init examples/char_lm/recipe.py --from warm.safetensors ...

Training takes about a minute on one core. The weights are kept in the user's cache folder under a hash of the text,
the recipe and the settings, so that the same call again only copies them.
"""

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from safetensors.torch import save_file

from ravnest_fed.hashing import digest
from ravnest_fed.model_state import initial_state_dict
from ravnest_fed.recipe import LoadedRecipe, Partition, load_recipe

STEPS = 800
BATCH = 32
PEAK_RATE = 3e-3
SEED = 0


def train(loaded: LoadedRecipe, data: torch.Tensor, steps: int) -> torch.nn.Module:
    """Train the recipe's model for `steps` steps on the windows `data`; the learning rate falls linearly to a tenth."""
    model = loaded.build_model(SEED)
    optimizer = loaded.build_optimizer(list(model.parameters()))
    random = torch.Generator().manual_seed(SEED)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, (step + 1) / 50) * (1 - 0.9 * step / steps)
        batch = data[torch.randint(len(data), (BATCH,), generator=random)]
        optimizer.zero_grad()
        loss = loaded.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} of {steps}: training loss {loss.item():.3f} nats a character", flush=True)
    return model


def warm_weights(steps: int = STEPS, cache: Path | None = None) -> Path:
    """The file of warm weights for the text at hand, trained now if it is not in the folder `cache` yet."""
    loaded = load_recipe(Path(__file__).with_name("recipe.py"))
    data: Any = loaded.train_data(Partition(0, 1, SEED))
    settings = f"{loaded.hash} {steps} {BATCH} {PEAK_RATE} {SEED}".encode()
    name = digest("char_lm warm start", settings, b"\0", data.contiguous().numpy().tobytes()).hex()[:32]
    file = (cache or user_cache_path("ravnest-fed")) / f"char_lm-{name}.safetensors"
    if not file.exists():
        model = train(loaded, data, steps)
        model.eval()
        with torch.no_grad():
            measured = loaded.evaluate(model)
        if measured is not None:
            print(f"held-out loss {measured[0]['loss']:.3f} nats a character", flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        save_file(initial_state_dict(model), part)
        part.replace(file)
    return file


def main() -> None:
    """Write the warm weights to where `--out` says."""
    parser = argparse.ArgumentParser(description="Make weights for the char_lm recipe to start from.")
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of training (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    kept = warm_weights(options.steps)
    shutil.copyfile(kept, options.out)
    print(f"{options.out}: warm weights, kept in {kept}")


if __name__ == "__main__":
    main()
