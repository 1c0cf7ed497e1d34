import json
import logging
import random

import numpy as np
import torch

from hybridflow.runtime import capture_random_state, restore_random_state, seed_random_state, unchanged_random_state


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


def assert_plain(value):
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
        for item in value.values():
            assert_plain(item)
    elif isinstance(value, list):
        for item in value:
            assert_plain(item)
    else:
        assert type(value) in (torch.Tensor, int, float, str, bool, type(None))
        if not isinstance(value, torch.Tensor):
            json.dumps(value)


def test_restored_generators_continue_the_sequence():
    for seed in (0, 1):
        seed_all(seed)
        draw()  # leaves one cached normal number in python's and in numpy's generator
        state = capture_random_state()
        expected = [draw(), draw()]
        seed_all(99)
        restore_random_state(state)
        assert [draw(), draw()] == expected


def test_capture_does_not_draw():
    seed_all(5)
    expected = draw()
    seed_all(5)
    capture_random_state()
    assert draw() == expected


def test_captured_state_has_only_tensors_and_json_values():
    np.random.seed(1)
    np.random.randn()
    assert_plain(capture_random_state())


def test_captured_state_is_a_copy():
    state = capture_random_state()
    words, key = state["python"]["words"].clone(), state["numpy"]["key"].clone()
    seed_all(123)
    assert torch.equal(state["python"]["words"], words)
    assert torch.equal(state["numpy"]["key"], key)


def test_states_of_absent_cuda_devices_are_skipped_with_a_warning(caplog):
    count = torch.cuda.device_count()
    state = capture_random_state() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * (count + 1)}
    if count:
        state["cuda"][:count] = torch.cuda.get_rng_state_all()
    with caplog.at_level(logging.WARNING):
        restore_random_state(state)
    assert f"has {count + 1} CUDA devices, this process has {count}" in caplog.text


def test_seed_random_state_seeds_every_generator():
    seed_random_state(7)
    first = draw()
    seed_random_state(7)
    assert draw() == first
    seed_random_state(8)
    second = draw()
    assert not any(a == b for a, b in zip(first, second, strict=True))


def test_unchanged_random_state_restores_after_the_block():
    seed_all(3)
    expected = draw()
    seed_all(3)
    with unchanged_random_state():
        draw()
    assert draw() == expected
