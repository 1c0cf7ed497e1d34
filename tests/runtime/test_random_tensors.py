import numpy as np
import torch

from hybridflow.runtime import uniform, uniform_state
from hybridflow.runtime.random_tensors import uniform_after

EDGES = np.array([0, 1, 11, 2**31, 2**53, 2**62, 2**63 - 1], dtype=np.int64)


def test_bits_of_tensors_equal_those_on_the_host():
    keys = [(0,), (17, 4), (-1, 2**64 - 1), (2**63, 5, 0), *((step, step * 977, 3) for step in range(500))]
    for index in (0, 7):
        states = np.array([uniform_state(*key, index) for key in keys])
        positions = np.arange(40)
        found = uniform_after(torch.from_numpy(states.view(np.int64))[:, None], torch.from_numpy(positions))
        expected = np.stack([uniform(*key, index, positions) for key in keys])
        assert found.dtype == torch.float64
        assert found.numpy().tobytes() == expected.tobytes()


def test_every_last_key_gives_the_same_bits():
    last = np.concatenate([EDGES, -EDGES])
    states = torch.from_numpy(np.broadcast_to(uniform_state(3, 5), last.shape).copy().view(np.int64))
    assert uniform_after(states, torch.from_numpy(last)).numpy().tobytes() == uniform(3, 5, last).tobytes()


def test_a_state_differs_from_the_state_of_more_keys():
    assert int(uniform_state(3, 0)) != int(uniform_state(3))
    assert float(uniform(3, 0)) != float(uniform(3, 0, 0))
