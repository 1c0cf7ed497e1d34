import math

import pytest
import torch

from hybridflow.checkpoint import first_difference, zeros_like_state


def state(**changes):
    return {"model": {"a": torch.tensor([1.0, math.nan]), "b": torch.tensor(2.0)}, "num_updates": 3, **changes}


A, B = torch.tensor([1.0, math.nan]), torch.tensor(2.0)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, ""),  # although a NaN is not equal to itself
        ({"model": {"a": A, "b": torch.tensor(2.5)}}, "tensor 'model/b'"),
        ({"model": {"a": A.double(), "b": B}}, "tensor 'model/a'"),
        ({"model": {"a": A}}, "its structure"),
        ({"num_updates": 4}, "its structure"),
        ({"model": {"a": A, "b": B, "c": torch.tensor(-0.0)}}, "tensor 'model/c'"),
    ],
)
def test_the_first_difference_is_named(changes, difference):
    zero = {"model": {"a": A, "b": B, "c": torch.tensor(0.0)}} if difference.endswith("c'") else {}
    assert first_difference(state(**zero), state(**changes)) == difference


def test_zeros_have_the_shapes_and_other_values_are_kept():
    zeros = zeros_like_state(state())
    assert zeros["num_updates"] == 3
    assert zeros["model"]["a"].tolist() == [0.0, 0.0]
