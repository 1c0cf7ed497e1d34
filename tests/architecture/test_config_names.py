"""Checks of the configuration: literal types equal the tables they select from, and the number of keys is bounded."""

from typing import get_args

import pytest

from hybridflow.algorithms import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES
from hybridflow.config import leaf_keys
from hybridflow.config.keys import sections
from hybridflow.config.roles import ROLES
from hybridflow.config.sections.base import RoleName
from hybridflow.config.sections.learning import AdvantageName, AggregationName, KLEstimatorName, PolicyLossName
from hybridflow.config.sections.models import DTypeName
from hybridflow.controller import Role
from hybridflow.models.loading import DTYPES

KEY_BUDGET = 200


@pytest.mark.parametrize(
    ("names", "table"),
    [
        (AdvantageName, ADVANTAGES),
        (AggregationName, AGGREGATIONS),
        (DTypeName, DTYPES),
        (KLEstimatorName, KL_ESTIMATORS),
        (PolicyLossName, POLICY_LOSSES),
        (RoleName, ROLES),
    ],
)
def test_configuration_names_equal_the_table_keys(names, table):
    assert set(get_args(names)) == set(table)


def test_controller_roles_equal_the_table_keys():
    assert {role.value for role in Role} == {
        *ROLES,
        "reward_model",
    }  # a documented role; runs use Role.Reward


def test_configuration_stays_within_its_key_budget():
    assert len(leaf_keys()) <= KEY_BUDGET


def test_every_key_has_a_description():
    fields = {f"{name}.{key}": info for name, section in sections() for key, info in type(section).model_fields.items()}
    assert [key for key in leaf_keys() if not (fields[key].description or "").endswith(".")] == []
