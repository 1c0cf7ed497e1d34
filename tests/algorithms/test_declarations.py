"""The declarations agree with the signatures of the functions."""

import inspect

import pytest

from hybridflow.algorithms import ADVANTAGES, AGGREGATIONS, POLICY_LOSSES, SELECTIONS
from hybridflow.algorithms.declarations import ESTIMATORS, EXTRA_COLUMNS, LOSSES
from hybridflow.protocol import FIELDS

FUNCTIONS = [
    *[pytest.param(ESTIMATORS[name], ADVANTAGES[name], id=f"advantage-{name}") for name in ESTIMATORS],
    *[pytest.param(LOSSES[name], POLICY_LOSSES[name], id=f"loss-{name}") for name in LOSSES],
]


def test_the_tables_of_functions_have_the_declared_names_in_order():
    assert list(ADVANTAGES) == list(ESTIMATORS)
    assert list(POLICY_LOSSES) == list(LOSSES)
    assert list(SELECTIONS) == [name for name, loss in LOSSES.items() if loss.selection]


@pytest.mark.parametrize(("declared", "function"), FUNCTIONS)
def test_extra_columns_are_those_of_the_signature(declared, function):
    assert set(EXTRA_COLUMNS) <= set(FIELDS)
    assert set(declared.extra_columns) == set(EXTRA_COLUMNS).intersection(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", [name for name, estimator in ESTIMATORS.items() if estimator.at_most_group_size])
def test_a_limited_parameter_declares_the_default_of_its_function(name):
    parameter, default = ESTIMATORS[name].at_most_group_size
    assert inspect.signature(ADVANTAGES[name]).parameters[parameter].default == default


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_reads_selected_tokens_declares_a_selection(name):
    assert bool(LOSSES[name].selection) == ("selected_tokens" in inspect.signature(POLICY_LOSSES[name]).parameters)


def test_losses_declare_existing_aggregations():
    for loss in LOSSES.values():
        assert set(loss.aggregations) <= set(AGGREGATIONS)
