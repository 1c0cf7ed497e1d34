"""The fingerprint of a tensor depends on every bit and its position, and not on strides."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.models.kernels import library
from hybridflow.rollout.weight_sync.fingerprint import BLOCK, Fingerprints, _odd, fingerprint
from hybridflow.runtime.partial_tensor import PartialTensor

MODULUS = 2**64


def reference(tensor: torch.Tensor) -> int:
    """Compute the fingerprint word by word, as defined."""
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    constants = [value % MODULUS for value in _odd(BLOCK, torch.device("cpu")).tolist()]
    blocks = [words[i : i + BLOCK] for i in range(0, len(words), BLOCK)]
    sums = [sum(mixed(w, c) for w, c in zip(block, constants, strict=False)) for block in blocks]
    return sum(mixed(s % MODULUS, constants[i]) for i, s in enumerate(sums)) % MODULUS


def mixed(word: int, constant: int) -> int:
    word = word * constant % MODULUS
    word = (word ^ word >> 32) * constant % MODULUS
    return word ^ word >> 29


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_fingerprint_follows_definition_with_and_without_kernel(dtype, monkeypatch):
    sizes, threads = (0, 1, 3, 7, 1000, 8 * BLOCK - 1, 20 * BLOCK + 5), torch.get_num_threads()
    tensors = {
        str(size): (50 * torch.randn(size, generator=torch.Generator().manual_seed(size))).to(dtype) for size in sizes
    }
    expected = {name: reference(tensor) for name, tensor in tensors.items()}
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert list(Fingerprints(tensors).read().items()) == list(expected.items())
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(library, "_library", lambda: None)  # no compiler: PyTorch's own products, as on a GPU
    started = Fingerprints(tensors)
    assert all(isinstance(found, torch.Tensor) for found in started._sums.values())  # until they are read
    assert list(started.read().items()) == list(expected.items())
    assert fingerprint(tensors["1000"]) == expected["1000"]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.integers(2, 5 * BLOCK),
    st.sets(st.integers(0, 5 * BLOCK), min_size=1, max_size=4),
)
def test_fingerprint_detects_any_change_of_a_few_elements(dtype, size, places):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    indices = sorted({place % size for place in places})
    negated, next_up, rolled = tensor.clone(), tensor.clone(), tensor.clone()
    negated[indices] *= -1
    next_up[indices[0]] = torch.nextafter(next_up[indices[0]], torch.tensor(10.0, dtype=dtype))
    rolled[indices] = tensor[[(index + 1) % size for index in indices]]
    different = {"": tensor, "-": negated, "ulp": next_up, "moved": rolled}
    if torch.equal(rolled, tensor):
        del different["moved"]
    assert len(set(Fingerprints(different).read().values())) == len(different)


def test_fingerprint_depends_on_contents_and_not_on_strides():
    tensor = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    assert fingerprint(tensor.T) == fingerprint(tensor.T.contiguous()) != fingerprint(tensor)
    assert fingerprint(torch.zeros(4)) != fingerprint(-torch.zeros(4))
    whole = torch.arange(24.0).view(4, 6)
    part = whole[1:3, 2:].contiguous()
    assert fingerprint(PartialTensor(whole.shape, whole.dtype, "a", ((1, 3), (2, 6)), part)) == fingerprint(part)


def test_fingerprints_on_a_device_need_no_transfer_until_they_are_read():
    """A transfer of a single number raises on the meta device."""
    started = Fingerprints({str(size): torch.zeros(size, device="meta") for size in (0, 3, 5 * BLOCK + 1)})
    assert all(found.device.type == "meta" and found.ndim == 0 for found in started._sums.values())
    with pytest.raises(NotImplementedError, match="meta"):
        started.read()
