"""Comparison of states bit for bit."""

import math

import pytest
import torch

from hybridflow.checkpoint import first_difference, zeros_like_state


def state(**changes):
    return {"model": {"a": torch.tensor([1.0, math.nan]), "b": torch.tensor(2.0)}, "num_updates": 3, **changes}


def test_equal_states_have_no_difference_also_with_nan():
    assert first_difference(state(), state()) == ""


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"a": torch.tensor([1.0, math.nan]), "b": torch.tensor(2.5)}, "tensor 'model/b'"),
        ({"a": torch.tensor([1.0, math.nan], dtype=torch.float64), "b": torch.tensor(2.0)}, "tensor 'model/a'"),
        ({"a": torch.tensor([1.0, math.nan])}, "its structure"),
    ],
)
def test_the_first_tensor_that_differs_is_named(other, difference):
    assert first_difference(state(), state(model=other)) == difference


def test_a_number_that_differs_is_a_difference_of_structure():
    assert first_difference(state(), state(num_updates=4)) == "its structure"


def test_zero_differs_from_minus_zero():
    assert first_difference({"a": torch.tensor([0.0])}, {"a": torch.tensor([-0.0])}) == "tensor 'a'"


def test_zeros_have_the_shapes_and_other_values_are_kept():
    zeros = zeros_like_state(state())
    assert zeros["num_updates"] == 3
    assert zeros["model"]["a"].tolist() == [0.0, 0.0]
