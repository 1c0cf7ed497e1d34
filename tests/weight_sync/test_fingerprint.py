"""The fingerprint of a tensor depends on every bit and its position, and not on strides."""

import pytest
import torch

from hybridflow.kernels import library
from hybridflow.runtime.partial_tensor import PartialTensor
from hybridflow.weight_sync import fingerprint
from hybridflow.weight_sync.fingerprint import BLOCK, Fingerprints, _odd

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
@pytest.mark.parametrize("size", [0, 1, 3, 7, 1000, 8 * BLOCK - 1, 20 * BLOCK + 5])
def test_fingerprint_follows_definition_with_and_without_kernel(dtype, size, monkeypatch):
    tensor = (50 * torch.randn(size, generator=torch.Generator().manual_seed(size))).to(dtype)
    expected, threads = reference(tensor), torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        assert fingerprint(tensor) == expected
    torch.set_num_threads(threads)
    monkeypatch.setattr(library, "_library", lambda: None)  # no compiler: PyTorch's own products
    assert fingerprint(tensor) == expected


@pytest.mark.parametrize("index", [0, 1, 4999, 99_999])
def test_fingerprint_detects_change_of_one_unit_in_last_place(index):
    tensor = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    changed = tensor.clone()
    changed[index] = torch.nextafter(changed[index], torch.tensor(10.0))
    assert fingerprint(changed) != fingerprint(tensor)


def test_fingerprint_detects_exchanged_elements_rows_and_blocks():
    tensor = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    numbers = {fingerprint(tensor)}
    exchanged = tensor.clone()
    exchanged[0, 0], exchanged[63, 299] = tensor[63, 299], tensor[0, 0]
    numbers.add(fingerprint(exchanged))
    numbers.add(fingerprint(tensor.flip(0)))
    transposed = tensor.clone()
    transposed[8:24, 100:116] = tensor[8:24, 100:116].T
    numbers.add(fingerprint(transposed))
    numbers.add(fingerprint(torch.roll(tensor.flatten(), 2 * BLOCK)))
    assert len(numbers) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("indices", [slice(None), slice(1, None, 4), [1, 33], [3, 7], [1, 1 + 2 * BLOCK], [0, 2, 4, 6]])
def test_fingerprint_detects_signs_that_change_together(dtype, indices):
    tensor = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed = tensor.clone()
    changed[indices] *= -1
    assert fingerprint(changed) != fingerprint(tensor)


def test_fingerprint_detects_exchange_of_values_that_differ_in_high_bits():
    tensor = torch.zeros(4096)
    for i in range(1, 4096, 2):
        tensor[i] = 0.5
    seen, pairs = {fingerprint(tensor)}, set()
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        i, j = (1 + 2 * torch.randint(2048, (2,), generator=generator)).tolist()
        changed = tensor.clone()
        changed[i] = -0.5
        changed[j] *= -1
        if i != j:
            seen.add(fingerprint(changed))
            pairs.add(frozenset((i, j)))
    assert len(seen) == 1 + len(pairs)


def test_fingerprint_depends_on_contents_and_not_on_strides():
    tensor = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    assert fingerprint(tensor.T) == fingerprint(tensor.T.contiguous()) != fingerprint(tensor)
    assert fingerprint(torch.zeros(4)) != fingerprint(-torch.zeros(4))


def test_fingerprints_on_a_device_need_no_transfer_until_they_are_read():
    """A transfer of a single number raises on the meta device."""
    tensors = {str(size): torch.zeros(size, device="meta") for size in (0, 3, 5 * BLOCK + 1)}
    started = Fingerprints(tensors)
    assert all(found.device.type == "meta" and found.ndim == 0 for found in started._sums.values())
    with pytest.raises(NotImplementedError, match="meta"):
        started.read()


def test_fingerprints_of_several_tensors_are_read_in_their_order(monkeypatch):
    tensors = {"b": torch.ones(5), "a": torch.full((9000,), -1.5), "c": torch.zeros(0)}
    expected = {name: reference(tensor) for name, tensor in tensors.items()}
    assert list(Fingerprints(tensors).read().items()) == list(expected.items())
    monkeypatch.setattr(library, "_library", lambda: None)  # as on a GPU: sums stay tensors until they are read
    started = Fingerprints(tensors)
    assert all(isinstance(found, torch.Tensor) for found in started._sums.values())
    assert list(started.read().items()) == list(expected.items())


def test_fingerprint_of_a_partial_tensor_is_that_of_its_elements_in_memory():
    whole = torch.arange(24.0).view(4, 6)
    part = whole[1:3, 2:].contiguous()
    assert fingerprint(PartialTensor(whole.shape, whole.dtype, "a", ((1, 3), (2, 6)), part)) == fingerprint(part)
