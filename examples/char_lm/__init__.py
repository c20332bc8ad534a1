"""A small language model on source text: the recipe is `recipe.py`, its warm start `warm_start.py`."""
