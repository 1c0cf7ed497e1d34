import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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

WHOLE = torch.arange(30).view(5, 6)


def ranges(size):
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ends: tuple(sorted(ends)))


BOXES = st.tuples(ranges(5), ranges(6))


def cut(box):
    (top, bottom), (left, right) = box
    return WHOLE[top:bottom, left:right]


@given(BOXES, BOXES)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_boxes_are_sets_of_places(a, b):
    places_a, places_b = (set(cut(box).flatten().tolist()) for box in (a, b))
    assert (box_shape(a), num_elements(a)) == (tuple(cut(a).shape), len(places_a))
    both = intersection(a, b)
    assert (set(cut(both).flatten().tolist()) if both else set()) == places_a & places_b
    assert (both is None) == (not places_a & places_b)
    if places_b:
        assert contains(a, b) == (places_b <= places_a)
    if both:
        assert torch.equal(part_of(cut(a), a, both), cut(both))


def test_a_scalar_and_a_whole_tensor_are_boxes():
    assert intersection((), ()) == ()
    assert whole_box(torch.Size([3, 2])) == box_of_shard(torch.zeros(3, 2)) == ((0, 3), (0, 2))


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
