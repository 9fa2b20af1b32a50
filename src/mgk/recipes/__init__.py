"""Recipes: one YAML file for each experiment of the paper, with the rows of its tables, and the published numbers."""

from mgk.recipes.paper import paper, published
from mgk.recipes.recipe import Recipe, load, names
from mgk.recipes.row import parse_row, row_name

__all__ = ["Recipe", "load", "names", "paper", "parse_row", "published", "row_name"]
