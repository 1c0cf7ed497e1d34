import pytest
import torch

from hybridflow.models.kernels.elementwise import rms_norm, rotary, silu_mul
from hybridflow.models.kernels.library import serves, use_kernels

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 6e-3}


@pytest.fixture
def only_pytorch():
    use_kernels(False)
    yield
    use_kernels(True)


def rms_norm_of(x, weight):
    return rms_norm(x, weight, 1e-5)


def rotary_of(x, angles):
    return rotary(x, angles.detach().cos(), angles.detach().sin())


CASES = {
    "rms_norm": (rms_norm_of, (130, 36), (36,)),
    "rms_norm of heads": (rms_norm_of, (9, 5, 16), (16,)),
    "rms_norm of many rows": (rms_norm_of, (2000, 64), (64,)),
    "rotary": (rotary_of, (150, 3, 12), (150, 6)),
    "rotary of many tokens": (rotary_of, (900, 4, 64), (900, 32)),
    "silu_mul": (silu_mul, (33, 45), (33, 45)),
    "silu_mul of many": (silu_mul, (500, 200), (500, 200)),
}


def values_and_gradients(function, inputs, weights):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    learning = leaves[:1] if function is rotary_of else leaves  # angles do not learn
    return [out.detach(), *torch.autograd.grad(out, learning, weights.to(out.dtype))]


def relative_error(ours, exact):
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


def inputs_of(shapes, dtype, second_dtype):
    generator = torch.Generator().manual_seed(0)
    first, second = (2 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return first.to(dtype), second.to(second_dtype), torch.randn(shapes[0], generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_pytorch_in_float64(name, dtype):
    function, *shapes = CASES[name]
    angles = torch.float32 if function is rotary_of else dtype
    first, second, weights = inputs_of(shapes, dtype, angles)
    weights = weights.to(dtype)
    assert serves(first)
    ours = values_and_gradients(function, (first, second), weights)
    exact = values_and_gradients(function, (first.double(), second.double()), weights)
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.dtype == dtype
        assert relative_error(mine, theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_number_of_threads(name, with_threads):
    function, *shapes = CASES[name]
    first, second, weights = inputs_of(shapes, torch.float32, torch.float32)
    single, double = with_threads(lambda: values_and_gradients(function, (first, second), weights))
    assert all(torch.equal(one, two) for one, two in zip(single, double, strict=True))


def test_results_equal_hand_computed_values():
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    torch.testing.assert_close(rms_norm(x, weight, 0.0), torch.tensor([[3 / 12.5**0.5, 8 / 12.5**0.5]]))
    turned = rotary(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.zeros(1, 2), torch.ones(1, 2))  # by 90 degrees
    torch.testing.assert_close(turned, torch.tensor([[[-3.0, -4.0, 1.0, 2.0]]]))
    gate = torch.tensor([0.0, 1.0, -200.0, 200.0, -1e38])
    wanted = torch.tensor([0.0, 2 / (1 + 2.718281828**-1), 0.0, 400.0, 0.0])
    torch.testing.assert_close(silu_mul(gate, torch.full((5,), 2.0)), wanted)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_nan_is_propagated(dtype):
    x = torch.ones(2, 32, dtype=dtype)
    x[0, 3] = torch.nan
    assert rms_norm(x, torch.ones(32, dtype=dtype), 1e-6)[0].isnan().all()
    assert silu_mul(x, x).isnan().sum() == 1
    assert rotary(x[:, None], torch.ones(2, 16), torch.zeros(2, 16))[0, 0, 3].isnan()


def test_non_contiguous_inputs_are_supported(only_pytorch):
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    heads, cos, sin = x[:, 32:64].unflatten(1, (2, 16)), torch.rand(7, 8), torch.rand(7, 8)
    expected = rotary(heads, cos, sin)
    use_kernels(True)
    torch.testing.assert_close(rotary(heads, cos, sin), expected)
    torch.testing.assert_close(rotary(heads.transpose(1, 2).contiguous().transpose(1, 2), cos, sin), expected)


def test_disabled_kernels_serve_no_tensor(only_pytorch):
    assert not serves(torch.ones(1))
    torch.testing.assert_close(silu_mul(torch.ones(1), torch.ones(1)), torch.tensor([0.7310586]))


def test_non_contiguous_weight_is_supported():
    x, weight = torch.ones(2, 8), torch.arange(16.0)[::2].requires_grad_()
    torch.testing.assert_close(rms_norm(x, weight, 0.0), weight.expand(2, 8))
    (gradient,) = torch.autograd.grad(rms_norm(x, weight, 0.0).sum(), weight)
    torch.testing.assert_close(gradient, torch.full((8,), 2.0))


def test_mixed_dtypes_and_integer_constants_work_as_in_pytorch():
    x, half = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.full((4, 8), 0.5)
    torch.testing.assert_close(silu_mul(x, half.bfloat16()), silu_mul(x, half))
    torch.testing.assert_close(silu_mul(x, half[:1]), silu_mul(x, half))
    assert torch.equal(rms_norm(torch.ones(2, 4), torch.ones(4), 0), torch.ones(2, 4))
    turned = rotary(x.view(4, 2, 4), torch.zeros(4, 2, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64))
    torch.testing.assert_close(turned, rotary(x.view(4, 2, 4), torch.zeros(4, 2), torch.ones(4, 4)[:, ::2]))


def test_weight_of_wrong_width_is_an_error():
    with pytest.raises(RuntimeError, match="size"):
        rms_norm(torch.ones(2, 8), torch.ones(4), 1e-6)
