import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import AlgorithmError
from hybridflow.rollout.sampling import uniform_after
from hybridflow.runtime.random_streams import derive_seed, uniform, uniform_state

MASK = 2**64 - 1
KEY = st.one_of(st.integers(-5, 5), st.integers(-(2**63), 2**64 - 1))


def splitmix_finalizer(x: int) -> int:
    """Return the published finalizer in plain Python integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def chained(domain: int, keys: list[int]) -> int:
    state = splitmix_finalizer(domain + len(keys))
    for key in keys:
        state = splitmix_finalizer(state ^ splitmix_finalizer(((key & MASK) + 0x9E3779B97F4A7C15) & MASK))
    return state


@given(st.lists(KEY, min_size=1, max_size=5))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_numbers_equal_the_published_mixer_in_plain_integers(keys):
    expected = (chained(0x756E69666F726D00, keys) >> 11) / 2**53
    assert float(uniform(*keys)) == expected
    assert derive_seed(*keys) == chained(0x7365656400000000, keys) >> 1
    *first, last = keys
    if first and last < 2**63:
        states = torch.from_numpy(np.array([uniform_state(*first)]).view(np.int64))
        assert uniform_after(states, torch.tensor([last])).tolist() == [expected]


def test_bits_are_equal_on_every_machine():
    assert uniform(0).tobytes().hex() == "3eb48c21fd28e53f"
    assert uniform(17, np.arange(3)).tobytes().hex() == "df487f78c607e83fb12d0e67cfa4ed3fa60a2935c65cdd3f"
    assert derive_seed(17, 4) == 2912361767416562940


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_arrays_of_keys_broadcast_and_equal_one_call_per_element(dtype):
    steps, rows = np.arange(4, dtype=dtype).reshape(4, 1), np.arange(5, dtype=dtype)
    table = uniform(3, steps, rows, 9)
    assert (table.shape, table.dtype) == ((4, 5), np.float64)
    assert table.tolist() == [[float(uniform(3, step, row, 9)) for row in range(5)] for step in range(4)]
    assert rows.tolist() == [0, 1, 2, 3, 4]  # keys are not modified
    states = torch.from_numpy(np.array([uniform_state(3, step) for step in range(4)]).view(np.int64))
    found = uniform_after(states[:, None], torch.arange(5))
    assert (found.dtype, found.numpy().tobytes()) == (torch.float64, uniform(3, steps, rows).tobytes())


def test_numbers_without_a_key_or_with_another_type_are_errors():
    assert uniform(1, np.zeros((0, 3), dtype=np.int64)).shape == (0, 3)
    assert isinstance(uniform(1, 2), np.ndarray)
    assert uniform(1, 2).shape == ()
    for key in (1.5, "1", None, 2**64, -(2**63) - 1, np.array([0.0]), np.array(["a"])):
        with pytest.raises(AlgorithmError, match="key 1 is"):
            uniform(0, key)
    with pytest.raises(AlgorithmError, match="at least one integer key"):
        uniform()
    with pytest.raises(AlgorithmError, match=r"shape \(3,\)"):
        derive_seed(0, np.arange(3))  # pyright: ignore[reportArgumentType]
