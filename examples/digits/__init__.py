"""Handwritten digits: the recipe is `recipe.py`."""
