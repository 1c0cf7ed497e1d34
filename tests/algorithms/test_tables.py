import inspect
import pkgutil

import pytest

from hybridflow import algorithms
from hybridflow.algorithms import (
    ADVANTAGES,
    POLICY_LOSSES,
    SELECTIONS,
    gae_advantages,
    grpo_advantages,
    kl_cov_policy_loss,
    ppo_policy_loss,
    select_kl_cov,
)


def test_the_tables_map_names_to_functions():
    assert ADVANTAGES["gae"] is gae_advantages
    assert ADVANTAGES["grpo"] is grpo_advantages
    for name, function in ADVANTAGES.items():
        words = {"none": "no"}.get(name, name).replace("++", "_plus_plus").replace("@", "_at_").replace("-", "_")
        assert inspect.unwrap(function).__name__ == f"{words}_advantages"
    assert POLICY_LOSSES["ppo"] is ppo_policy_loss
    for name, function in POLICY_LOSSES.items():
        assert inspect.unwrap(function).__name__ == f"{name.replace('-', '_')}_policy_loss"
    assert POLICY_LOSSES["kl-cov"] is kl_cov_policy_loss
    assert SELECTIONS["kl-cov"] is select_kl_cov


@pytest.mark.parametrize("table", [ADVANTAGES, POLICY_LOSSES])
def test_functions_take_keyword_arguments_only(table):
    for function in table.values():
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_a_signature_names_the_columns_that_are_read():
    assert list(inspect.signature(gae_advantages).parameters)[:3] == ["token_level_rewards", "values", "response_mask"]
    assert list(inspect.signature(grpo_advantages).parameters)[:2] == ["scores", "group_ids"]


def test_public_names_are_imported_on_use():
    assert set(algorithms.__all__) <= set(dir(algorithms))
    with pytest.raises(AttributeError, match=r"module 'hybridflow.algorithms' has no attribute 'grop_advantages'"):
        algorithms.grop_advantages  # noqa: B018


def test_no_public_name_is_the_name_of_a_file():
    """Importing a file binds its name in the package, which would shadow the public name."""
    files = {module.name for module in pkgutil.iter_modules(algorithms.__path__)}
    assert "grpo" in files
    assert files.isdisjoint(algorithms.__all__)
