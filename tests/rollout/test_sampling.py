import math

import numpy as np
import pytest
import torch

from hybridflow.rollout import SamplingParams
from hybridflow.rollout.sampling import sample_tokens
from hybridflow.runtime import uniform

LOGITS = torch.tensor([0.0, math.log(2), math.log(5), -math.inf, math.log(2)])  # probabilities .1 .2 .5 0 .2
ALMOST_ONE = 1 - 2.0**-53


def drawn(numbers: list[float], **parameters) -> list[int]:
    numbers_ = torch.tensor(numbers, dtype=torch.float64)
    return sample_tokens(LOGITS.double().expand(len(numbers), -1), numbers_, SamplingParams(1, **parameters))[
        0
    ].tolist()


def log_prob(token: int, **parameters) -> float:
    """Return the reported log-prob of a token, found by sampling all tokens."""
    numbers = torch.arange(0.005, 1, 0.01, dtype=torch.float64)
    tokens, log_probs = sample_tokens(
        LOGITS.double().expand(len(numbers), -1), numbers, SamplingParams(1, **parameters)
    )
    (value,) = set(log_probs[tokens == token].tolist())
    return value


def test_token_is_the_first_whose_cumulative_probability_exceeds_u():
    assert drawn([0.0, 0.099, 0.101, 0.299, 0.301, 0.799, 0.801, 0.999]) == [0, 0, 1, 1, 2, 2, 4, 4]


def test_largest_number_picks_the_last_possible_token():
    assert drawn([ALMOST_ONE]) == [4]
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    number = torch.tensor([ALMOST_ONE], dtype=torch.float64)
    assert sample_tokens(logits, number, SamplingParams(1))[0].tolist() == [1]


def test_smallest_number_skips_tokens_without_probability():
    logits = torch.tensor([[-math.inf, -math.inf, 0.0, 0.0]])
    assert sample_tokens(logits, torch.tensor([0.0]), SamplingParams(1))[0].tolist() == [2]


def test_log_probs_are_under_the_restricted_distribution():
    assert log_prob(2) == pytest.approx(math.log(0.5))
    # At temperature 0.5 the weights .1 .2 .5 .2 are squared: 1 4 25 4 of 34.
    assert log_prob(2, temperature=0.5) == pytest.approx(math.log(25 / 34))
    assert log_prob(2, top_k=1) == pytest.approx(0.0)
    assert log_prob(2, top_k=2) == pytest.approx(math.log(5 / 7))
    assert log_prob(1, top_p=0.6) == pytest.approx(math.log(2 / 7))


def test_top_k_prefers_the_lower_id_of_equal_logits():
    assert set(drawn([0.0, 0.2, 0.4, 0.8, ALMOST_ONE], top_k=2)) == {1, 2}


def test_top_k_above_the_vocabulary_size_keeps_all_tokens():
    numbers = [0.05, 0.15, 0.5, 0.9]
    assert drawn(numbers, top_k=100) == drawn(numbers) == [0, 1, 2, 4]


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    numbers = np.linspace(0, ALMOST_ONE, 50).tolist()
    assert set(drawn(numbers, top_p=0.1)) == {2}
    assert set(drawn(numbers, top_p=0.5 + 1e-6)) == {1, 2}
    assert set(drawn(numbers, top_p=0.7 + 1e-6)) == {1, 2, 4}
    assert set(drawn(numbers, top_p=0.95)) == {0, 1, 2, 4}


def test_top_p_applies_within_the_top_k():
    # Of the top two, .5 and .2, the first has 5/7 of the mass: enough for 0.7, not for 0.72.
    numbers = np.linspace(0, ALMOST_ONE, 50).tolist()
    assert set(drawn(numbers, top_k=2, top_p=0.7)) == {2}
    assert set(drawn(numbers, top_k=2, top_p=0.72)) == {1, 2}


def test_greedy_ignores_the_number_and_reports_untempered_log_probs():
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, -1.0]])
    tokens, log_probs = sample_tokens(logits, torch.tensor([0.9, 0.9]), SamplingParams(1, temperature=0))
    assert tokens.tolist() == [1, 0]
    expected = [-math.log(math.exp(-2) + 2), -math.log(1 + math.exp(-2) + math.exp(-3))]
    assert log_probs.tolist() == pytest.approx(expected)


def test_log_probs_are_float32_unless_logits_are_float64():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        logits = torch.zeros(1, 3, dtype=dtype)
        assert sample_tokens(logits, torch.tensor([0.5]), SamplingParams(1))[1].dtype == expected


def test_bfloat16_logits_are_tempered_in_float32():
    logits = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.bfloat16)
    _, log_probs = sample_tokens(logits, torch.tensor([0.99]), SamplingParams(1, temperature=0.3))
    expected = 4 / 0.3 - math.log(sum(math.exp(x / 0.3) for x in (1, 2, 4)))
    assert log_probs.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_give_non_finite_log_probs(temperature, bad):
    logits = torch.tensor([[0.0, bad, 0.0], [0.0, 1.0, 0.0]])
    _, log_probs = sample_tokens(logits, torch.tensor([0.5, 0.5]), SamplingParams(1, temperature=temperature))
    assert log_probs.isfinite().tolist() == [False, True]


@pytest.mark.parametrize(
    ("parameters", "probabilities"),
    [
        ({}, [0.1, 0.2, 0.5, 0.0, 0.2]),
        ({"temperature": 0.5}, [1 / 34, 4 / 34, 25 / 34, 0.0, 4 / 34]),
        ({"top_k": 3}, [0.0, 2 / 9, 5 / 9, 0.0, 2 / 9]),
        ({"top_p": 0.6}, [0.0, 2 / 7, 5 / 7, 0.0, 0.0]),
    ],
)
def test_frequencies_fit_the_probabilities(parameters, probabilities):
    """Apply Pearson's chi-square test to 20000 draws with the noise of 500 prompts, groups of 4 and 10 tokens."""
    numbers = uniform(11, np.arange(500)[:, None, None], np.arange(4)[:, None], np.arange(10)).ravel()
    counts = np.bincount(drawn(numbers.tolist(), **parameters), minlength=5)
    possible = [i for i, probability in enumerate(probabilities) if probability]
    assert counts.sum() == counts[possible].sum() == 20000
    chi_square = sum((counts[i] - 20000 * probabilities[i]) ** 2 / (20000 * probabilities[i]) for i in possible)
    # The values that 1 in 10000 samples exceeds, for 1, 2 and 3 degrees of freedom.
    assert chi_square < {1: 15.14, 2: 18.42, 3: 21.11}[len(possible) - 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_fused_sampling_equals_sampling_in_float64(temperature, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(500, 1000, generator=generator)).to(dtype)
    logits[:, ::7] = -math.inf
    numbers = torch.rand(500, generator=generator, dtype=torch.float64)
    tokens, log_probs = sample_tokens(logits, numbers, SamplingParams(1, temperature=temperature))
    exact_tokens, _ = sample_tokens(logits.double(), numbers, SamplingParams(1, temperature=temperature))
    assert (tokens == exact_tokens).float().mean() > 0.99  # rounding moves a boundary now and then
    exact = (logits.double() / (temperature or 1.0)).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(log_probs.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_single_non_finite_logit_gives_a_non_finite_log_prob(temperature):
    logits = torch.zeros(3, 600)
    logits[1, 300] = math.nan
    logits[2, 300] = math.inf
    _, log_probs = sample_tokens(logits, torch.full((3,), 0.5), SamplingParams(1, temperature=temperature))
    assert log_probs.isfinite().tolist() == [True, False, False]
