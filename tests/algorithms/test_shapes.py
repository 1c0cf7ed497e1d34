import subprocess
import sys

import pytest
import torch

from hybridflow.algorithms import gae_advantages, masked_mean


@pytest.fixture
def checked_shapes(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--shapes") == "off":
        pytest.skip("--shapes=off")


@pytest.mark.usefixtures("checked_shapes")
def test_the_tests_check_shapes():
    from jaxtyping import TypeCheckError

    with pytest.raises(TypeCheckError, match="response_mask"):
        gae_advantages(
            token_level_rewards=torch.zeros(2, 3),
            values=torch.zeros(2, 3),
            response_mask=torch.ones(2, 4, dtype=torch.bool),
            gamma=1,
            lam=1,
            whiten_advantages=False,
        )


@pytest.mark.usefixtures("checked_shapes")
def test_the_tests_check_results_of_private_functions():
    assert hasattr(masked_mean, "__wrapped__")


def test_production_checks_no_shapes():
    program = (
        "import sys, hybridflow.algorithms as algorithms\n"
        "print(hasattr(algorithms.masked_mean, '__wrapped__'), 'beartype' in sys.modules, 'typeguard' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False"] * 3
