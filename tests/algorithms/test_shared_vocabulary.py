"""Ranks with shards of the vocabulary compute the same as one rank with all of it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hybridflow.algorithms import (
    candidate_log_probs_from_logits,
    log_probs_and_entropy_from_logits,
    sum_squared_probs_from_logits,
    top_log_probs_from_logits,
)
from hybridflow.errors import AlgorithmError

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(2, 3, 11, dtype=torch.float64, generator=GENERATOR)
CANDIDATES = torch.randint(0, 11, (2, 3, 4), generator=GENERATOR)
PARTS = (4, 4, 3)


class Exchange:
    """Threads that wait for each other and exchange their tensors."""

    def __init__(self, size):
        self.barrier, self.tensors = threading.Barrier(size), [None] * size


class Share:
    def __init__(self, rank, exchange):
        self.rank, self.exchange = rank, exchange
        self.first, self.size = sum(PARTS[:rank]), sum(PARTS)

    def gather(self, x):
        self.exchange.tensors[self.rank] = x.clone()
        self.exchange.barrier.wait(timeout=120)
        together = torch.stack(self.exchange.tensors)
        self.exchange.barrier.wait(timeout=120)
        return together

    def sum(self, x):
        return self.gather(x).sum(0)

    def logsumexp(self, x):
        return self.gather(x).logsumexp(0)


FUNCTIONS = {
    "log_probs_and_entropy": lambda logits, shared: log_probs_and_entropy_from_logits(
        logits, CANDIDATES[..., 0], temperature=0.7, chunk_size=3, shared=shared
    ),
    "candidates": lambda logits, shared: (
        candidate_log_probs_from_logits(logits, CANDIDATES, temperature=0.7, chunk_size=3, shared=shared),
    ),
    "sum_squared_probs": lambda logits, shared: (
        sum_squared_probs_from_logits(logits, temperature=0.7, chunk_size=3, shared=shared),
    ),
    "top 2": lambda logits, shared: top_log_probs_from_logits(logits, 2, temperature=0.7, shared=shared),
    "top 7": lambda logits, shared: top_log_probs_from_logits(logits, 7, temperature=0.7, shared=shared),
    "top 3 below 5": lambda logits, shared: top_log_probs_from_logits(logits, 3, below=5, shared=shared),
    "top 11": lambda logits, shared: top_log_probs_from_logits(logits, 11, temperature=0.7, shared=shared),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_three_ranks_with_unequal_shards_equal_one(name):
    exchange = Exchange(len(PARTS))
    parts = LOGITS.split(PARTS, dim=-1)

    def of_rank(rank):
        return FUNCTIONS[name](parts[rank].contiguous(), Share(rank, exchange))

    with ThreadPoolExecutor(len(PARTS)) as pool:
        results = list(pool.map(of_rank, range(len(PARTS))))
    for result in results:
        for found, wanted in zip(result, FUNCTIONS[name](LOGITS, None), strict=True):
            torch.testing.assert_close(found, wanted)


def test_shard_gradients_are_the_shards_of_the_gradient():
    whole = LOGITS.clone().requires_grad_()
    weights = torch.randn(CANDIDATES.shape, dtype=torch.float64, generator=GENERATOR)
    (candidate_log_probs_from_logits(whole, CANDIDATES, temperature=0.7) * weights).sum().backward()
    exchange = Exchange(len(PARTS))
    parts = [part.detach().clone().requires_grad_() for part in LOGITS.split(PARTS, dim=-1)]

    def of_rank(rank):
        found = FUNCTIONS["candidates"](parts[rank], Share(rank, exchange))[0]
        (found * weights).sum().backward()

    with ThreadPoolExecutor(len(PARTS)) as pool:
        list(pool.map(of_rank, range(len(PARTS))))
    torch.testing.assert_close(torch.cat([part.grad for part in parts], dim=-1), whole.grad)


def test_a_repeated_candidate_gets_both_gradients():
    logits = LOGITS[0, :1].clone().requires_grad_()
    twice = torch.tensor([[5, 5]])
    candidate_log_probs_from_logits(logits, twice).sum().backward()
    wanted = 2 * (torch.nn.functional.one_hot(torch.tensor([5]), 11) - logits.detach().softmax(-1))
    torch.testing.assert_close(logits.grad, wanted)


def test_candidates_can_be_limited_to_the_first_entries():
    ids, log_probs = top_log_probs_from_logits(LOGITS, 3, below=5)
    assert int(ids.max()) < 5
    torch.testing.assert_close(log_probs, LOGITS.log_softmax(-1)[..., :5].topk(3).values)


@pytest.mark.parametrize(("k", "below", "most"), [(0, None, 11), (12, None, 11), (6, 5, 5), (12, 20, 11)])
def test_more_candidates_than_entries_are_rejected(k, below, most):
    with pytest.raises(AlgorithmError, match=f"use 1 to {most}"):
        top_log_probs_from_logits(LOGITS, k, below=below)
