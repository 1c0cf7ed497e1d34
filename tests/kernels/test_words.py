"""Sums of words are those of arithmetic modulo 2**64, whatever computes them and with however many threads."""

import pytest
import torch

from hybridflow.kernels import library, weighted_sums


@pytest.mark.parametrize(("rows", "width"), [(0, 5), (1, 1), (3, 17), (40, 8192)])
def test_sums_are_those_of_pytorch_with_any_number_of_threads(rows, width, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**63), 2**63 - 1, (rows, width), generator=generator)
    weights = torch.randint(-(2**63), 2**63 - 1, (width,), generator=generator)
    threads, expected = torch.get_num_threads(), torch.mv(words, weights)
    for count in (1, 3):
        torch.set_num_threads(count)
        assert torch.equal(weighted_sums(words, weights), expected)
        assert torch.equal(weighted_sums(words.T.contiguous().T, weights), expected)
    torch.set_num_threads(threads)
    monkeypatch.setattr(library, "_library", lambda: None)
    assert torch.equal(weighted_sums(words, weights), expected)
