import math

import pytest
import torch

from hybridflow.config import OptimizerConfig
from hybridflow.engines.optimizer import build_adamw, learning_rate


def rates(steps: range, total_steps: int, **config) -> list[float]:
    return [learning_rate(OptimizerConfig(lr=2.0, **config), step, total_steps) for step in steps]


def test_constant_schedule_is_constant():
    assert rates(range(3), 3) == [2.0, 2.0, 2.0]


def test_warm_up_is_linear_and_ends_at_peak():
    assert rates(range(6), 10, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_schedule_decreases_in_equal_steps():
    assert rates(range(6), 5, schedule="linear") == pytest.approx([2.0, 1.6, 1.2, 0.8, 0.4, 0.0])


def test_linear_schedule_starts_after_warm_up_and_ends_at_minimum():
    assert rates(range(8), 6, schedule="linear", warmup_steps=2, min_lr_ratio=0.5) == pytest.approx(
        [1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]
    )


def test_cosine_schedule_is_halfway_in_the_middle():
    # (1 + cos(pi * progress)) for progress 0, 1/4, 1/2, 3/4, 1
    assert rates(range(5), 4, schedule="cosine") == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0])
    assert rates(range(4, 5), 4, schedule="cosine", min_lr_ratio=0.1) == pytest.approx([0.2])


def test_warm_up_longer_than_run_does_not_reach_peak():
    assert rates(range(3), 3, warmup_steps=8, schedule="cosine") == [0.25, 0.5, 0.75]


def test_steps_after_the_last_keep_the_final_rate():
    assert rates(range(10, 12), 4, schedule="linear", min_lr_ratio=0.25) == [0.5, 0.5]


def test_only_matrices_have_weight_decay():
    matrix, bias = torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = build_adamw({"matrix": matrix, "bias": bias}, OptimizerConfig(lr=0.5, weight_decay=0.1))
    matrix.grad, bias.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))  # 1 - lr * weight_decay
    assert bias.tolist() == [1, 1]


def test_model_without_biases_has_one_parameter_group():
    optimizer = build_adamw({"matrix": torch.ones(2, 2, requires_grad=True)}, OptimizerConfig())
    assert len(optimizer.param_groups) == 1


def test_steps_equal_update_rule_of_paper():
    lr, (beta1, beta2), epsilon, decay = 0.1, (0.8, 0.9), 1e-3, 0.2
    config = OptimizerConfig(lr=lr, betas=(beta1, beta2), epsilon=epsilon, weight_decay=decay)
    weight = torch.tensor([[1.5]], dtype=torch.float64, requires_grad=True)
    optimizer = build_adamw({"weight": weight}, config)
    expected, m, v = 1.5, 0.0, 0.0
    for step, gradient in enumerate([0.3, -0.7, 0.1], start=1):
        weight.grad = torch.tensor([[gradient]], dtype=torch.float64)
        optimizer.step()
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        expected -= lr * decay * expected
        expected -= lr * (m / (1 - beta1**step)) / (math.sqrt(v / (1 - beta2**step)) + epsilon)
        assert weight.item() == pytest.approx(expected, rel=1e-12)
