import pytest
import torch

from hybridflow.engines.box_sum import box_sum, word_bytes
from hybridflow.runtime.boxes import part_of, whole_box


def sum_of(tensor, box=None, num_bytes=None):
    whole = whole_box(tensor.shape)
    num_bytes = num_bytes or tensor.element_size()
    return int(box_sum(part_of(tensor, whole, box or whole), box or whole, num_bytes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ((8, 12), [((0, 3), (0, 12)), ((3, 8), (0, 4)), ((3, 8), (4, 12))]),
        ((10,), [((0, 3),), ((3, 3),), ((3, 10),)]),
        ((2, 4, 6), [((0, 2), (0, 4), (0, 2)), ((0, 1), (0, 4), (2, 6)), ((1, 2), (0, 4), (2, 6))]),
    ],
)
def test_sums_of_tiles_add_up_to_the_sum_of_the_whole(dtype, shape, tiles):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    for num_bytes in {tensor.element_size(), word_bytes(tiles, tensor.element_size())}:
        parts = sum(sum_of(tensor, tile, num_bytes) for tile in tiles)
        assert (parts - sum_of(tensor, num_bytes=num_bytes)) % 2**64 == 0


def test_each_change_changes_the_sum_but_parts_do_not(monkeypatch):
    tensor = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    bit, signs = tensor.clone(), tensor.clone()
    bit.view(torch.int32)[2, 3] ^= 1
    signs[1:3] *= -1
    changes = [tensor, bit, signs, tensor.t(), tensor.roll(1, 0), tensor.roll(1, 1), tensor.flip(0)]
    for num_bytes in (4, 8):
        assert len({sum_of(change.contiguous(), num_bytes=num_bytes) for change in changes}) == len(changes)
    tiles = [((0, 2), (0, 2)), ((2, 4), (0, 2)), ((0, 2), (2, 4)), ((2, 4), (2, 4))]
    assert len({sum_of(torch.ones(4, 4), tile) for tile in tiles}) == 4  # it depends on the position in the whole
    at_once = sum_of(tensor)
    monkeypatch.setattr("hybridflow.engines.box_sum.PART", 10)
    assert sum_of(tensor) == at_once


def test_words_are_as_large_as_no_box_cuts_them():
    assert word_bytes([((0, 3), (0, 4)), ((0, 3), (4, 8))], 2) == 8
    assert word_bytes([((0, 3), (0, 2)), ((0, 3), (2, 8))], 2) == 4
    assert word_bytes([((0, 3),), ((3, 4),)], 2) == 2
    assert word_bytes([((0, 3),)], 8) == 8
    assert word_bytes([()], 4) == 4
    assert sum_of(torch.tensor(2.0)) == sum_of(torch.tensor([2.0]))
    assert sum_of(torch.zeros(0, 4)) == 0
