"""The tables of functions, their declarations and their documentation agree with the signatures."""

import inspect
import pkgutil
import re
from pathlib import Path

import pytest

from hybridflow import algorithms
from hybridflow.algorithms import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES, SELECTIONS
from hybridflow.algorithms.declarations import ESTIMATORS, EXTRA_COLUMNS, LOSSES, Estimator, Loss
from hybridflow.protocol import FIELDS

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
FUNCTIONS = [
    *[pytest.param(name, ESTIMATORS[name], ADVANTAGES[name], id=f"advantage-{name}") for name in ESTIMATORS],
    *[pytest.param(name, LOSSES[name], POLICY_LOSSES[name], id=f"loss-{name}") for name in LOSSES],
]


def test_the_tables_of_functions_have_the_declared_names_in_order():
    assert list(ADVANTAGES) == list(ESTIMATORS)
    assert list(POLICY_LOSSES) == list(LOSSES)
    assert list(SELECTIONS) == [name for name, loss in LOSSES.items() if loss.selection]
    assert SELECTIONS["kl-cov"] is algorithms.select_kl_cov
    assert set(EXTRA_COLUMNS) <= set(FIELDS)


@pytest.mark.parametrize(("name", "declared", "function"), FUNCTIONS)
def test_a_declaration_is_that_of_the_signature(name, declared, function):
    parameters = inspect.signature(function).parameters
    words = {"none": "no"}.get(name, name).replace("++", "_plus_plus").replace("@", "_at_").replace("-", "_")
    suffix = "advantages" if isinstance(declared, Estimator) else "policy_loss"
    assert inspect.unwrap(function).__name__ == f"{words}_{suffix}"
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert set(declared.extra_columns) == set(EXTRA_COLUMNS).intersection(parameters)
    if isinstance(declared, Loss):
        assert bool(declared.selection) == ("selected_tokens" in parameters)
        assert set(declared.aggregations) <= set(AGGREGATIONS)
    elif declared.at_most_group_size:
        parameter, default = declared.at_most_group_size
        assert parameters[parameter].default == default


def test_public_names_are_imported_on_use():
    assert set(algorithms.__all__) <= set(dir(algorithms))
    with pytest.raises(AttributeError, match=r"module 'hybridflow.algorithms' has no attribute 'grop_advantages'"):
        algorithms.grop_advantages  # noqa: B018
    # Importing a file binds its name in the package, which would shadow the public name.
    files = {module.name for module in pkgutil.iter_modules(algorithms.__path__)}
    assert "grpo" in files
    assert files.isdisjoint(algorithms.__all__)


# Documentation


def needs(declared: Estimator | Loss) -> str:
    words = [f"`{column}`: {EXTRA_COLUMNS[column]}" for column in declared.extra_columns]
    if isinstance(declared, Loss):
        words += [f"tokens that `{declared.selection.partition(':')[2]}` selects"] if declared.selection else []
        words += [f"defined for `loss_aggregation = {name}`" for name in declared.aggregations]
        return "; ".join(words)
    words += ["`rollout.group_size` of 2 or more"] * declared.compares_groups
    if declared.at_most_group_size:
        words += ["a parameter `{}` (default {}) of at most `rollout.group_size`".format(*declared.at_most_group_size)]
    words += ["no `kl_in_reward`"] * (not declared.takes_kl_in_reward)
    words += ["another part of the loss to learn from"] * declared.is_zero
    return "; ".join(words)


@pytest.mark.parametrize(("key", "table"), [("algorithm.advantage", ESTIMATORS), ("actor.policy_loss", LOSSES)])
def test_the_page_shows_the_declared_needs(key, table):
    lines = [f"| `{key}` | function | needs |", "|---|---|---|"]
    for name, declared in table.items():
        lines.append(f"| `{name}` | `{declared.function.partition(':')[2]}` | {needs(declared)} |")
    shown = "\n".join(lines)
    assert shown in PAGE, f"put this into docs/algorithms.md:\n{shown}"


def test_the_examples_of_the_page_run_and_all_names_are_there():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 9
    exec(compile("\n".join(blocks), "algorithms.md", "exec"), {"__name__": "__main__"})
    for name in [*algorithms.__all__, *ADVANTAGES, *POLICY_LOSSES, *KL_ESTIMATORS, *AGGREGATIONS]:
        assert f"`{name}" in PAGE or f"{name}(" in PAGE, name


# Shapes
