import pytest
import torch

from hybridflow.errors import WeightSyncError
from hybridflow.runtime.partial_tensor import PartialTensor, contents_of

WHOLE = torch.arange(24.0).view(4, 6)
BOX = ((1, 4), (2, 6))


@pytest.fixture
def partial() -> PartialTensor:
    return PartialTensor(WHOLE.shape, WHOLE.dtype, "a.weight", BOX, WHOLE[1:4, 2:6].clone())


def test_partial_tensor_has_the_shape_and_dtype_of_the_whole(partial):
    assert (partial.shape, partial.dtype, partial.device.type) == (WHOLE.shape, torch.float32, "cpu")
    assert partial.narrow(0, 1, 2).shape == (2, 6)
    assert torch.equal(contents_of(partial), WHOLE[1:4, 2:6])
    assert contents_of(WHOLE) is WHOLE


@pytest.mark.parametrize(
    "view", [lambda x: x[1:4, 2:6], lambda x: x.narrow(0, 2, 1).narrow(1, 3, 2), lambda x: x.detach()[3:, 2:]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_of_a_view_reads_the_elements_of_the_whole(partial, view, dtype):
    target = torch.zeros_like(view(WHOLE), dtype=dtype)
    assert target.copy_(view(partial)) is target
    assert torch.equal(target, view(WHOLE).to(dtype))


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:2, 2:], lambda x: x[1:, 1:3], lambda x: x.t()])
def test_reading_elements_that_are_not_in_memory_is_an_error(partial, view):
    with pytest.raises(
        WeightSyncError, match=r"weight 'a.weight': the engine reads .* received \(\(1, 4\), \(2, 6\)\)"
    ):
        torch.zeros_like(view(WHOLE)).copy_(view(partial))


@pytest.mark.parametrize("operation", [lambda x: x + 1, lambda x: x.to(torch.float64), lambda x: x.clone(), torch.cat])
def test_operations_besides_views_and_copies_are_errors(partial, operation):
    with pytest.raises(WeightSyncError, match=r"'a.weight' is in memory in part; only views and copies of it"):
        operation([partial, partial] if operation is torch.cat else partial)


def test_tensor_without_contents_records_what_is_read():
    weight = PartialTensor((4, 6), torch.float32, "a.weight")
    target = torch.ones(2, 6)
    target.copy_(weight[2:])
    torch.empty(6, 4, device="meta").copy_(weight.t())
    assert weight.boxes_read == [((2, 4), (0, 6)), None]
    assert torch.equal(target, torch.ones(2, 6))
