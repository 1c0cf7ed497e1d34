"""Every recipe parses, and what it says fits together."""

from pathlib import Path

import pytest

from hybridflow.config import load_config

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_loads(recipe):
    load_config(recipe)
