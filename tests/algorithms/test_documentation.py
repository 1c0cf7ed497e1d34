import re
from pathlib import Path

import pytest

from hybridflow import algorithms
from hybridflow.algorithms.declarations import ESTIMATORS, EXTRA_COLUMNS, LOSSES, Estimator, Loss

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def needs(declared: Estimator | Loss) -> str:
    """Return the declared requirements of a function in words."""
    words = [f"`{column}`: {EXTRA_COLUMNS[column]}" for column in declared.extra_columns]
    if isinstance(declared, Loss):
        words += [f"tokens that `{declared.selection.partition(':')[2]}` selects"] if declared.selection else []
        words += [f"defined for `loss_aggregation = {name}`" for name in declared.aggregations]
        return "; ".join(words)
    words += ["`rollout.group_size` of 2 or more"] * declared.compares_groups
    if declared.at_most_group_size:
        words.append(
            "a parameter `{}` (default {}) of at most `rollout.group_size`".format(*declared.at_most_group_size)
        )
    words += ["no `kl_in_reward`"] * (not declared.takes_kl_in_reward)
    words += ["another part of the loss to learn from"] * declared.is_zero
    return "; ".join(words)


def table(key: str) -> str:
    """Return the Markdown table of a key: each name with its function and its requirements."""
    declarations = {"algorithm.advantage": ESTIMATORS, "actor.policy_loss": LOSSES}[key]
    lines = [f"| `{key}` | function | needs |", "|---|---|---|"]
    for name, declared in declarations.items():
        lines.append(f"| `{name}` | `{declared.function.partition(':')[2]}` | {needs(declared)} |")
    return "\n".join(lines)


def test_the_examples_of_the_page_run_as_one_script():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 9
    exec(compile("\n".join(blocks), PAGE.name, "exec"), {"__name__": "__main__"})


def test_the_page_names_all_public_names_and_table_entries():
    text = PAGE.read_text()
    tables = [algorithms.ADVANTAGES, algorithms.POLICY_LOSSES, algorithms.KL_ESTIMATORS, algorithms.AGGREGATIONS]
    for name in [*algorithms.__all__, *(name for table in tables for name in table)]:
        assert f"`{name}" in text or f"{name}(" in text, name


@pytest.mark.parametrize("key", ["algorithm.advantage", "actor.policy_loss"])
def test_the_page_shows_the_declared_needs(key):
    assert table(key) in PAGE.read_text(), f"put this into docs/algorithms.md:\n{table(key)}"
