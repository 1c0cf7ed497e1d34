import torch
from torch import nn

from hybridflow.engines.precision import MasterParameters


def linear_model() -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
    return model


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
