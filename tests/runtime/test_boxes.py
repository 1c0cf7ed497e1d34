import pytest
import torch

from hybridflow.runtime.boxes import (
    box_of_shard,
    box_of_view,
    box_shape,
    contains,
    intersection,
    num_elements,
    part_of,
    whole_box,
)


def test_intersection_of_boxes():
    assert intersection(((0, 4), (2, 6)), ((3, 8), (0, 3))) == ((3, 4), (2, 3))
    assert intersection(((0, 4),), ((4, 8),)) is None
    assert intersection(((2, 2),), ((0, 8),)) is None
    assert intersection((), ()) == ()


def test_box_contains_its_parts_only():
    assert contains(((0, 4), (2, 6)), ((1, 4), (2, 3)))
    assert not contains(((0, 4), (2, 6)), ((1, 5), (2, 3)))
    assert not contains(((0, 4), (2, 6)), ((1, 4), (1, 3)))


def test_shape_and_number_of_elements_of_a_box():
    assert box_shape(((1, 4), (2, 6))) == (3, 4)
    assert num_elements(((1, 4), (2, 6))) == 12
    assert num_elements(((1, 1), (2, 6))) == 0
    assert whole_box(torch.Size([3, 2])) == ((0, 3), (0, 2))


def test_part_of_a_tensor_that_holds_a_box():
    whole = torch.arange(24).view(4, 6)
    held = whole[1:4, 2:6]
    assert torch.equal(part_of(held, ((1, 4), (2, 6)), ((2, 4), (3, 5))), whole[2:4, 3:5])


def test_tensor_that_is_not_sharded_holds_all_of_itself():
    assert box_of_shard(torch.zeros(3, 2)) == ((0, 3), (0, 2))


@pytest.mark.parametrize(
    ("view", "box"),
    [
        (lambda x: x, ((0, 4), (0, 6))),
        (lambda x: x[1:3], ((1, 3), (0, 6))),
        (lambda x: x.narrow(1, 2, 3), ((0, 4), (2, 5))),
        (lambda x: x[2:].narrow(1, 5, 1), ((2, 4), (5, 6))),
        (lambda x: x[4:], ((4, 4), (0, 6))),
        (lambda x: x[0], None),
        (lambda x: x.t(), None),
        (lambda x: x[::2], None),
        (lambda x: x.view(6, 4)[:4], None),
    ],
)
def test_box_of_a_view(view, box):
    whole = torch.empty(4, 6, device="meta")
    assert box_of_view(view(whole), whole) == box
