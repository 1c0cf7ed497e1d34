import inspect

import pytest

from hybridflow.algorithms import ADVANTAGES, POLICY_LOSSES
from hybridflow.config import ActorConfig, AlgorithmConfig
from hybridflow.workers.signature_columns import columns_of, parameters_of


def test_columns_are_the_arguments_that_the_glossary_knows():
    def loss(*, log_probs, advantages, clip_ratio_low, response_mask):
        pass

    assert columns_of(loss) == ("advantages", "response_mask")


def test_parameters_are_the_arguments_that_are_keys_of_the_section():
    def loss(*, advantages, clip_ratio_low, clip_ratio_dual, elsewhere=1):
        pass

    section = ActorConfig(clip_ratio_low=0.1, clip_ratio_dual=5.0)
    assert parameters_of(loss, section) == {"clip_ratio_low": 0.1, "clip_ratio_dual": 5.0}


@pytest.mark.parametrize(
    ("functions", "section", "given"),
    [(POLICY_LOSSES, ActorConfig(), {"log_probs"}), (ADVANTAGES, AlgorithmConfig(), {"epsilon"})],
)
def test_every_argument_of_an_algorithm_is_a_column_or_a_key(functions, section, given):
    for function in functions.values():
        known = {*columns_of(function), *parameters_of(function, section), *given}
        assert set(inspect.signature(function).parameters) <= known
