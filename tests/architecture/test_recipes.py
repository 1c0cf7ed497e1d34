"""Every recipe parses, and what it says fits together; each algorithm has one."""

from pathlib import Path

import pytest

from hybridflow.algorithms import ADVANTAGES, POLICY_LOSSES
from hybridflow.config import leaf_keys, load_config

DIRECTORY = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(DIRECTORY.glob("*.toml"))
OVERLAYS = sorted((DIRECTORY / "algorithms").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_loads(recipe):
    load_config(recipe)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)
def test_the_recipe_of_an_algorithm_fits_the_demos(overlay):
    load_config([DIRECTORY / "countdown_grpo.toml", overlay])


def test_no_recipe_of_an_algorithm_says_what_another_one_says():
    configs = {
        overlay.name: leaf_keys(load_config([DIRECTORY / "countdown_grpo.toml", overlay])) for overlay in OVERLAYS
    }
    seen: list[dict[str, object]] = []
    for keys in configs.values():
        assert keys not in seen
        seen.append(keys)


def test_every_estimator_and_every_policy_loss_has_a_recipe():
    configs = [load_config([DIRECTORY / "countdown_grpo.toml", overlay]) for overlay in OVERLAYS]
    assert {config.algorithm.advantage for config in configs} == set(ADVANTAGES)
    assert {config.actor.policy_loss for config in configs} == set(POLICY_LOSSES)
