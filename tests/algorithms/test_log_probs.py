"""Log-probs, entropies and candidates from logits: against softmax, and split over ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.algorithms import (
    candidate_log_probs_from_logits,
    log_probs_and_entropy_from_logits,
    log_probs_from_logits,
    sum_squared_probs_from_logits,
    top_log_probs_from_logits,
)

INF = float("inf")


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.randoms(use_true_random=True))
def test_values_and_gradients_equal_those_of_softmax(rng):
    rows, length, vocab = rng.randint(1, 3), rng.randint(0, 4), rng.randint(1, 19)
    dtype, scale = rng.choice([torch.float64, torch.float64, torch.bfloat16]), rng.choice([0.1, 3.0, 100.0])
    options = {"temperature": rng.choice([1.0, 0.6]), "chunk_size": rng.choice([1, 3, 7, 100])}
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits = scale * torch.randn(rows, length + 1, vocab, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, vocab, (rows, length), generator=generator)
    impossible = torch.rand(logits.shape, generator=generator) < rng.choice([0.0, 0.3])
    impossible[:, :-1].scatter_(-1, labels[..., None], False)
    leaf = logits.masked_fill(impossible, -INF).to(dtype).requires_grad_()
    before, exact = leaf.detach().clone(), leaf.detach().double().requires_grad_()

    found = [*log_probs_and_entropy_from_logits(leaf[:, :-1], labels, **options)]  # of a view
    p = (exact[:, :-1] / options["temperature"]).log_softmax(-1)
    wanted = [p.gather(-1, labels[..., None])[..., 0], -(p.exp() * p.where(p > -INF, 0.0)).sum(-1)]
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2**-8, "atol": 1e-4 * scale}
    used = rng.choice([(0,), (1,), (0, 1)])
    for index in (0, 1):
        assert found[index].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(found[index].double(), wanted[index], **tolerance)
    alone = (
        log_probs_from_logits(leaf[:, :-1], labels, **options),
        sum_squared_probs_from_logits(leaf[:, :-1].detach(), **options),
    )
    for result, expected in zip(alone, (wanted[0], p.exp().square().sum(-1)), strict=True):
        torch.testing.assert_close(result.double(), expected, **tolerance)
    sum(found[index].sum() for index in used).backward()
    sum(wanted[index].sum() for index in used).backward()
    assert leaf.grad.dtype == dtype
    torch.testing.assert_close(leaf.grad.double(), exact.grad, **tolerance)
    assert torch.equal(leaf.detach(), before)


def test_no_float32_copy_of_all_logits_exists():
    class LargestTensor(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, list | tuple) else [result]:
                if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                    self.numel = max(self.numel, tensor.numel())
            return result

    logits = torch.zeros(4, 1000, dtype=torch.bfloat16, requires_grad=True)
    with LargestTensor() as largest:
        labels = torch.zeros(4, dtype=torch.int64)
        log_probs, entropies = log_probs_and_entropy_from_logits(logits, labels, chunk_size=100)
        (log_probs + entropies).sum().backward()
    assert 0 < largest.numel <= 4 * 100


# Ranks with shards of the vocabulary compute the same as one rank with all of it.

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(2, 3, 11, dtype=torch.float64, generator=GENERATOR)
CANDIDATES = torch.randint(0, 11, (2, 3, 4), generator=GENERATOR)
WEIGHTS = torch.randn(CANDIDATES.shape, dtype=torch.float64, generator=GENERATOR)
PARTS = (4, 4, 3)


class Share:
    """The part of one rank, a thread; `tensors` and `barrier` are shared by all."""

    def __init__(self, rank, barrier, tensors):
        self.rank, self.barrier, self.tensors = rank, barrier, tensors
        self.first, self.size = sum(PARTS[:rank]), sum(PARTS)

    def gather(self, x):
        self.tensors[self.rank] = x.clone()
        self.barrier.wait(timeout=120)
        together = torch.stack(self.tensors)
        self.barrier.wait(timeout=120)
        return together

    def sum(self, x):
        return self.gather(x).sum(0)

    def logsumexp(self, x):
        return self.gather(x).logsumexp(0)


def on_ranks(function):
    barrier, tensors = threading.Barrier(len(PARTS)), [None] * len(PARTS)
    with ThreadPoolExecutor(len(PARTS)) as pool:
        return list(pool.map(lambda rank: function(rank, Share(rank, barrier, tensors)), range(len(PARTS))))


FUNCTIONS = {
    "log_probs_and_entropy": lambda logits, **options: log_probs_and_entropy_from_logits(
        logits, CANDIDATES[..., 0], chunk_size=3, **options
    ),
    "candidates": lambda logits, **options: [
        candidate_log_probs_from_logits(logits, CANDIDATES, chunk_size=3, **options)
    ],
    "sum_squared_probs": lambda logits, **options: [sum_squared_probs_from_logits(logits, chunk_size=3, **options)],
    "top 2": lambda logits, **options: top_log_probs_from_logits(logits, 2, **options),
    "top 7": lambda logits, **options: top_log_probs_from_logits(logits, 7, **options),
    "top 3 below 5": lambda logits, **options: top_log_probs_from_logits(logits, 3, below=5, **options),
    "top 11": lambda logits, **options: top_log_probs_from_logits(logits, 11, **options),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_three_ranks_with_unequal_shards_equal_one(name):
    parts = LOGITS.split(PARTS, dim=-1)
    results = on_ranks(lambda rank, share: FUNCTIONS[name](parts[rank].contiguous(), temperature=0.7, shared=share))
    for result in results:
        for found, wanted in zip(result, FUNCTIONS[name](LOGITS, temperature=0.7, shared=None), strict=True):
            torch.testing.assert_close(found, wanted)


def test_shard_gradients_are_the_shards_of_the_gradient():
    whole = LOGITS.clone().requires_grad_()
    (FUNCTIONS["candidates"](whole, temperature=0.7)[0] * WEIGHTS).sum().backward()
    parts = [part.detach().clone().requires_grad_() for part in LOGITS.split(PARTS, dim=-1)]
    on_ranks(
        lambda rank, share: (
            (FUNCTIONS["candidates"](parts[rank], temperature=0.7, shared=share)[0] * WEIGHTS).sum().backward()
        )
    )
    torch.testing.assert_close(torch.cat([part.grad for part in parts], dim=-1), whole.grad)


def test_a_repeated_candidate_gets_both_gradients():
    logits = LOGITS[0, :1].clone().requires_grad_()
    candidate_log_probs_from_logits(logits, torch.tensor([[5, 5]])).sum().backward()
    wanted = 2 * (torch.nn.functional.one_hot(torch.tensor([5]), 11) - logits.detach().softmax(-1))
    torch.testing.assert_close(logits.grad, wanted)


def test_candidates_are_the_most_likely_of_the_first_entries():
    for below in (11, 5):
        ids, log_probs = top_log_probs_from_logits(LOGITS, 3, below=below)
        wanted = LOGITS.log_softmax(-1)[..., :below].topk(3)
        assert torch.equal(ids, wanted.indices)
        torch.testing.assert_close(log_probs, wanted.values)
