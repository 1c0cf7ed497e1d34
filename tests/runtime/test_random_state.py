import logging
import random

import numpy as np
import pytest
import torch

from hybridflow.runtime.random_state import (
    capture_random_state,
    restore_random_state,
    seed_random_state,
    unchanged_random_state,
)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw() -> tuple:
    return (
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(70),
        np.random.rand(3).tolist(),
        float(np.random.randn()),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    )


def leaves(value):
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("seed", [0, 1])
def test_restored_generators_continue_the_sequence(seed):
    seed_all(seed)
    draw()  # leaves one cached normal number in python's and in numpy's generator
    state = capture_random_state()
    assert {type(leaf) for leaf in leaves(state)} <= {torch.Tensor, int, float, str, bool, type(None)}
    expected = [draw(), draw()]  # capturing does not draw, and the state is a copy
    seed_all(seed)
    draw()
    assert [draw(), draw()] == expected
    seed_all(99)
    restore_random_state(state)
    assert [draw(), draw()] == expected


def test_states_of_absent_cuda_devices_are_skipped_with_a_warning(caplog):
    count = torch.cuda.device_count()
    state = capture_random_state() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * (count + 1)}
    if count:
        state["cuda"][:count] = torch.cuda.get_rng_state_all()
    with caplog.at_level(logging.WARNING):
        restore_random_state(state)
    assert f"has {count + 1} CUDA devices, this process has {count}" in caplog.text


def test_seed_random_state_seeds_every_generator():
    draws = []
    for seed in (7, 7, 8):
        seed_random_state(seed)
        with unchanged_random_state():
            draws.append(draw())
        assert draw() == draws[-1]
    assert draws[0] == draws[1]
    assert not any(a == b for a, b in zip(draws[0], draws[2], strict=True))
