import math

import pytest
import torch
from torch import nn

from hybridflow.config import OptimizerConfig
from hybridflow.engines.optimizer import MasterParameters, build_adamw, learning_rate


@pytest.mark.parametrize(
    ("steps", "total_steps", "config", "expected"),
    [
        (range(3), 3, {}, [2.0, 2.0, 2.0]),
        (range(6), 10, {"warmup_steps": 4}, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]),  # linear, to the peak
        (range(6), 5, {"schedule": "linear"}, [2.0, 1.6, 1.2, 0.8, 0.4, 0.0]),
        (
            range(8),
            6,
            {"schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.5},
            [1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0],
        ),
        # 1 + cos(pi * progress) for progress 0, 1/4, 1/2, 3/4, 1
        (range(5), 4, {"schedule": "cosine"}, [2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0]),
        (range(4, 5), 4, {"schedule": "cosine", "min_lr_ratio": 0.1}, [0.2]),
        (range(3), 3, {"warmup_steps": 8, "schedule": "cosine"}, [0.25, 0.5, 0.75]),  # a run shorter than its warm-up
        (range(10, 12), 4, {"schedule": "linear", "min_lr_ratio": 0.25}, [0.5, 0.5]),  # steps after the last
    ],
)
def test_learning_rates_follow_the_schedule(steps, total_steps, config, expected):
    rates = [learning_rate(OptimizerConfig(lr=2.0, **config), step, total_steps) for step in steps]
    assert rates == pytest.approx(expected)


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


def linear_model() -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
    return model


def test_norms_and_biases_have_no_weight_decay_also_stacked_ones_of_experts():
    shapes = {"norm.weight": (3,), "experts.gate_up_proj_bias": (2, 3), "experts.gate_up_proj": (2, 3, 3)}
    parameters = {name: torch.zeros(shape, requires_grad=True) for name, shape in shapes.items()}
    groups = build_adamw(parameters, OptimizerConfig(weight_decay=0.1)).param_groups
    decayed = [p for group in groups if group["weight_decay"] for p in group["params"]]
    assert [id(p) for p in decayed] == [id(parameters["experts.gate_up_proj"])]


def test_model_in_training_dtype_needs_no_masters():
    for dtype in (torch.float32, torch.float64):
        model = linear_model().to(dtype)
        assert MasterParameters(model, dtype).by_name["weight"] is model.weight


def test_parameters_are_cast_and_buffers_are_not():
    model = linear_model()
    model.register_buffer("frequencies", torch.tensor([1.0001]))
    master = MasterParameters(model, torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16
    assert model.get_buffer("frequencies").dtype == torch.float32
    assert master.by_name["weight"].dtype == torch.float32


def test_gradients_accumulate_in_float32():
    model = linear_model()
    master = MasterParameters(model, torch.bfloat16)
    # In bfloat16, 256 + 1 rounds to 256: a hundred small parts would be lost.
    for inputs in ([256.0, 0.0], *[[1.0, 0.0]] * 100):
        model(torch.tensor([inputs], dtype=torch.bfloat16)).sum().backward()
    gradient = master.by_name["weight"].grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    assert gradient.tolist() == [[356.0, 0.0]]
    assert model.weight.grad is None


def test_small_steps_accumulate_in_master_until_cast():
    model = linear_model()
    master = MasterParameters(model, torch.bfloat16)
    with torch.no_grad():
        for _ in range(8):
            master.by_name["weight"].add_(2.0**-10)  # lost in bfloat16 at 1.0, whose spacing is 2^-7
    assert model.weight.tolist() == [[1.0, 2.0]]
    master.cast()
    assert model.weight.tolist() == [[1.0 + 2.0**-7, 2.0]]


def test_tied_parameter_has_one_master_with_whole_gradient():
    embedding, head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    with torch.no_grad():
        embedding.weight.fill_(1.0)
    master = MasterParameters(model, torch.bfloat16)
    assert list(master.by_name) == ["0.weight"]
    assert head.weight is embedding.weight
    model(torch.tensor([1])).sum().backward()
    gradient = master.by_name["0.weight"].grad
    assert gradient is not None
    assert gradient.tolist() == [[1, 1], [4, 4], [1, 1]]  # 1 from the head everywhere, 3 from the token
