import pytest
import torch
from torch.nn.functional import silu

from hybridflow.errors import ModelError
from hybridflow.models.kernels.decoder import PackedLinear

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 6e-3}
SHAPES = [(1, 8, 1), (3, 36, 33), (13, 64, 32), (121, 18, 83), (26, 256, 70)]  # rows, in, out


def draw(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def error(ours, exact):
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_product_with_bias_and_residual_equals_float64(rows, inputs, outputs, dtype):
    x, weight = draw(rows, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype, seed=1)
    bias, residual = draw(outputs, dtype=dtype, seed=2), draw(rows, outputs, dtype=dtype, seed=3)
    exact = x.double() @ weight.double().T
    assert error(PackedLinear([weight], [None])(x), exact) < TOLERANCE[dtype]
    assert error(PackedLinear([weight], [bias])(x), exact + bias.double()) < TOLERANCE[dtype]
    linear = PackedLinear([weight], [bias])
    assert error(linear(x, residual), exact + bias.double() + residual.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_gated_product_equals_float64(rows, inputs, outputs, dtype):
    x = draw(rows, inputs, dtype=dtype)
    weights = [draw(outputs, inputs, dtype=dtype, seed=seed) / inputs**0.5 for seed in (1, 2)]
    biases = [draw(outputs, dtype=dtype, seed=seed) for seed in (3, 4)]
    for given in (biases, [None, None], [biases[0], None]):
        gate, up = (
            x.double() @ w.double().T + (0 if b is None else b.double()) for w, b in zip(weights, given, strict=True)
        )
        assert error(PackedLinear(weights, given, gated=True)(x), silu(gate) * up) < 2 * TOLERANCE[dtype]


def test_concatenated_layers_and_strided_weights_equal_pytorch():
    x = draw(5, 12, dtype=torch.float32)
    first, second = draw(12, 7, dtype=torch.float32, seed=1).T, draw(3, 24, dtype=torch.float32, seed=2)[:, ::2]
    both = PackedLinear([first, second], [None, torch.ones(3)])(x)
    torch.testing.assert_close(both, torch.cat([x @ first.T, x @ second.T + 1], 1))
    torch.testing.assert_close(PackedLinear([first], [None])(x), x @ first.T)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_row_is_bit_identical_for_any_batch_and_threads(dtype, with_threads):
    x, weight = draw(301, 64, dtype=dtype), draw(100, 64, dtype=dtype, seed=1)
    linear = PackedLinear([weight], [None])
    single, double = with_threads(lambda: linear(x))
    assert torch.equal(single, double)
    for start, stop in ((0, 1), (7, 12), (100, 226), (290, 301)):
        assert torch.equal(linear(x[start:stop]), single[start:stop])


def test_empty_input_gives_empty_output():
    assert PackedLinear([torch.ones(3, 4)], [None])(torch.ones(0, 4)).shape == (0, 3)


def test_unsupported_inputs_and_weights_are_errors():
    linear = PackedLinear([torch.ones(3, 4)], [None])
    for x in (torch.ones(2, 5), torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4)):
        with pytest.raises(ModelError, match=r"expected \(rows, 4\) of torch.float32"):
            linear(x)
    with pytest.raises(ModelError, match="a bfloat16 weight with 5 inputs cannot be packed"):
        PackedLinear([torch.ones(3, 5, dtype=torch.bfloat16)], [None])
