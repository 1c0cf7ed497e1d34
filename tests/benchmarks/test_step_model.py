from pathlib import Path

import pytest


@pytest.fixture
def model(monkeypatch):
    """Return the calculation for two engines with two groups each, and two training ranks."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from support.step_model import StepModel

    return StepModel([[[300, 98], [50, 48]], [[98, 48], [198, 398]]], 2)


def test_stages_take_the_time_of_their_lengths(model):
    assert model.generation == pytest.approx([0.3, 0.398])
    assert model.training == pytest.approx((1238 + 16) / 2 * 2e-4)
    assert model.bound == pytest.approx(0.398)
    assert model.sync == pytest.approx(0.398 + 0.05 + 0.1254)


def test_streaming_trains_on_a_part_while_the_next_is_generated(model):
    # Parts: 50, 48 and 98, 48 at 98 ms; 300, 98 and 198, 398 at 398 ms. Training ends with the last part: its rows
    # have 302, 100, 200 and 400 tokens, which is 402 or 600 for a rank in order, and 502 or 500 if they are balanced.
    assert model.streamed() == pytest.approx(0.398 + 0.05 + 502 * 2e-4)
    assert model.streamed(balanced=False) == pytest.approx(0.398 + 0.05 + 600 * 2e-4)
