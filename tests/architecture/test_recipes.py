"""Every recipe is a valid configuration, and every algorithm has a recipe."""

import tomllib
from pathlib import Path

import pytest

from hybridflow.algorithms import ADVANTAGES, POLICY_LOSSES
from hybridflow.config import leaf_keys, load_config
from hybridflow.config.render import toml_value

DIRECTORY = Path(__file__).parents[2] / "recipes"
RECIPES = sorted([*DIRECTORY.glob("*.toml"), *DIRECTORY.glob("rlhf/*.toml"), DIRECTORY / "gpu/one_gpu.toml"])
OVERLAYS = sorted((DIRECTORY / "algorithms").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_recipe_loads(recipe):
    load_config(recipe)


def test_recipe_of_eight_gpus_loads_on_top_of_that_of_one():
    config = load_config([DIRECTORY / "gpu/one_gpu.toml", DIRECTORY / "gpu/eight_gpus.toml"])
    assert (config.controller.backend, config.controller.num_workers) == ("ray", 8)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)
def test_algorithm_recipe_loads_on_top_of_the_demo(overlay):
    load_config([DIRECTORY / "countdown_grpo.toml", overlay])


def test_algorithm_recipes_are_distinct():
    configs = {
        overlay.name: leaf_keys(load_config([DIRECTORY / "countdown_grpo.toml", overlay])) for overlay in OVERLAYS
    }
    seen: list[dict[str, object]] = []
    for keys in configs.values():
        assert keys not in seen
        seen.append(keys)


def test_every_estimator_and_policy_loss_has_a_recipe():
    configs = [load_config([DIRECTORY / "countdown_grpo.toml", overlay]) for overlay in OVERLAYS]
    assert {config.algorithm.advantage for config in configs} == set(ADVANTAGES)
    assert {config.actor.policy_loss for config in configs} == set(POLICY_LOSSES)


def table() -> str:
    """Return a Markdown table of algorithm recipes: name, paper (from the leading comment) and keys."""
    lines = ["| recipe | paper | keys |", "|---|---|---|"]
    for overlay in OVERLAYS:
        text = overlay.read_text("utf-8")
        comment = " ".join(line.removeprefix("# ") for line in text.split("\n\n")[0].splitlines())
        keys = [
            f"`{section}.{key} = {toml_value(value)}`"
            for section, values in tomllib.loads(text).items()
            for key, value in values.items()
        ]
        lines.append(f"| `{overlay.name}` | {comment} | {', '.join(keys)} |")
    return "\n".join(lines)


def test_recipe_table_in_the_docs_equals_the_generated_one():
    text = (DIRECTORY.parent / "docs" / "recipes.md").read_text("utf-8")
    shown = text.partition("<!-- generated: start -->\n\n")[2].partition("\n\n<!-- generated: end -->")[0]
    assert shown == table(), f"docs/recipes.md is outdated; replace its table with:\n{table()}"
