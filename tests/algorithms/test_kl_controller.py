import pytest

from hybridflow.algorithms import AdaptiveKLController, FixedKLController
from hybridflow.errors import AlgorithmError


def test_a_fixed_coefficient_is_constant():
    controller = FixedKLController(0.25)
    controller.update(kl=100.0, num_samples=1000)
    assert controller.coef == 0.25


@pytest.mark.parametrize(
    ("kl", "num_samples", "coef"),
    [
        (9.0, 10, 0.5 * 1.0125),  # error 1/8, times 10/100
        (7.0, 20, 0.5 * 0.975),  # error -1/8, times 20/100
        (50.0, 50, 0.5 * 1.1),  # the error is clipped to a fifth
        (-50.0, 50, 0.5 * 0.9),
        (8.0, 100, 0.5),  # on target
        (0.0, 10_000, 0.5 * 0.8),  # more samples than the horizon keep the sign
    ],
)
def test_the_coefficient_follows_the_error(kl, num_samples, coef):
    controller = AdaptiveKLController(coef=0.5, target=8.0, horizon=100)
    controller.update(kl=kl, num_samples=num_samples)
    assert controller.coef == pytest.approx(coef)


def test_the_state_restores_the_coefficient_exactly():
    controller = AdaptiveKLController(coef=0.1, target=0.3, horizon=7)
    controller.update(kl=0.7, num_samples=3)
    for restored in (AdaptiveKLController(coef=9.0, target=0.3, horizon=7), FixedKLController(9.0)):
        restored.load_state_dict(controller.state_dict())
        assert restored.coef == controller.coef


@pytest.mark.parametrize("state", [{}, {"coef": 0.1, "kl": 1.0}, {"coef": -0.1}, {"coef": float("nan")}])
def test_a_foreign_state_is_rejected(state):
    for controller in (FixedKLController(0.5), AdaptiveKLController(0.5, target=1.0, horizon=1)):
        with pytest.raises(AlgorithmError, match="coef"):
            controller.load_state_dict(state)
        assert controller.coef == 0.5


def test_a_nan_kl_is_rejected():
    controller = AdaptiveKLController(coef=0.5, target=1.0, horizon=10)
    with pytest.raises(AlgorithmError, match="kl=nan"):
        controller.update(kl=float("nan"), num_samples=1)
    with pytest.raises(AlgorithmError, match="num_samples=-1"):
        controller.update(kl=1.0, num_samples=-1)
    assert controller.coef == 0.5
