"""Writes the char_lm recipe's warm start to a file, for `ravnest-fed init --from` or for work elsewhere.

python examples/char_lm/warm_start.py --out warm.safetensors
"""

import argparse
from pathlib import Path

from safetensors.torch import save_file

from ravnest_fed.model_state import initial_state_dict
from ravnest_fed.recipe import load_recipe


def main() -> None:
    """Write the warm weights to where `--out` says."""
    parser = argparse.ArgumentParser(description="Write the warm start of the char_lm recipe.")
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    parser.add_argument("--steps", type=int, help="steps of training, if not the recipe's own number")
    options = parser.parse_args()
    loaded = load_recipe(Path(__file__).with_name("recipe.py"))
    if options.steps is not None:
        if options.steps < 1:
            parser.error("--steps must be at least 1")
        loaded.recipe.warm_steps = options.steps
    model = loaded.build_model()
    loaded.warm_start(model)
    save_file(initial_state_dict(model), options.out)
    print(f"{options.out}: warm weights")


if __name__ == "__main__":
    main()
