import pytest

from hybridflow.algorithms import AdaptiveKLController, FixedKLController
from hybridflow.errors import AlgorithmError


def test_a_fixed_coefficient_is_constant():
    controller = FixedKLController(0.25)
    controller.update(kl=100.0, num_samples=1000)
    assert controller.coef == 0.25


def test_the_coefficient_follows_the_error():
    controller = AdaptiveKLController(coef=0.5, target=8.0, horizon=100)
    controller.update(kl=9.0, num_samples=10)  # error 1/8, times 10/100
    assert controller.coef == pytest.approx(0.5 * 1.0125)
    controller.update(kl=7.0, num_samples=20)  # error -1/8, times 20/100
    assert controller.coef == pytest.approx(0.5 * 1.0125 * 0.975)


def test_the_error_is_clipped_to_a_fifth():
    controller = AdaptiveKLController(coef=1.0, target=1.0, horizon=10)
    controller.update(kl=50.0, num_samples=5)
    assert controller.coef == pytest.approx(1.1)
    controller = AdaptiveKLController(coef=1.0, target=1.0, horizon=10)
    controller.update(kl=-50.0, num_samples=5)
    assert controller.coef == pytest.approx(0.9)


def test_the_coefficient_is_constant_on_target():
    controller = AdaptiveKLController(coef=0.3, target=0.1, horizon=10)
    controller.update(kl=0.1, num_samples=10)
    assert controller.coef == 0.3


def test_a_batch_larger_than_the_horizon_keeps_the_sign():
    controller = AdaptiveKLController(coef=1.0, target=1.0, horizon=10)
    controller.update(kl=0.0, num_samples=10_000)
    assert controller.coef == pytest.approx(0.8)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coef": -1.0, "target": 1.0, "horizon": 1}, "coef=-1.0"),
        ({"coef": 1.0, "target": 0.0, "horizon": 1}, "target=0.0"),
        ({"coef": 1.0, "target": 1.0, "horizon": 0}, "horizon=0"),
    ],
)
def test_settings_out_of_range_are_rejected(arguments, message):
    with pytest.raises(AlgorithmError, match=message):
        AdaptiveKLController(**arguments)
    with pytest.raises(AlgorithmError, match="coef=-1"):
        FixedKLController(-1.0)


def test_a_nan_kl_is_rejected():
    controller = AdaptiveKLController(coef=0.5, target=1.0, horizon=10)
    with pytest.raises(AlgorithmError, match="kl=nan"):
        controller.update(kl=float("nan"), num_samples=1)
    with pytest.raises(AlgorithmError, match="num_samples=-1"):
        controller.update(kl=1.0, num_samples=-1)
    assert controller.coef == 0.5
