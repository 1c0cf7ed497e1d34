import math

import numpy as np
import pytest
import torch

from hybridflow.rollout import SamplingParams
from hybridflow.rollout.row_sampling import RowRules, SamplingKinds, sample_rows
from hybridflow.rollout.sampling import sample_tokens
from hybridflow.runtime import uniform

ALMOST_ONE = 1 - 2.0**-53
ALL = SamplingKinds(greedy=True, restricted=True)
SAMPLINGS = [
    SamplingParams(1),
    SamplingParams(1, temperature=0.7),
    SamplingParams(1, temperature=0.0),
    SamplingParams(1, temperature=1.5, top_k=7),
    SamplingParams(1, top_p=0.6),
    SamplingParams(1, temperature=0.9, top_k=50, top_p=0.8),
    SamplingParams(1, top_k=1),
    SamplingParams(1, top_k=10_000),
]


def rules(samplings: list[SamplingParams]) -> RowRules:
    return RowRules(
        torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float64),
        torch.tensor([sampling.top_k if sampling.temperature else 0 for sampling in samplings]),
        torch.tensor([sampling.top_p if sampling.temperature else 1.0 for sampling in samplings], dtype=torch.float64),
    )


def plain(samplings: list[SamplingParams]) -> SamplingKinds:
    """Return the kinds that these rows need."""
    return SamplingKinds(
        greedy=any(sampling.temperature == 0 for sampling in samplings),
        restricted=any(sampling.top_k or sampling.top_p < 1 for sampling in samplings),
    )


def random_logits(rows: int, vocabulary: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:, ::7] = -math.inf
    return logits.to(dtype)


@pytest.mark.parametrize("vocabulary", [1, 2, 5, 40, 151, 1000])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tokens_equal_those_of_equal_parameters_in_float64(sampling, vocabulary):
    logits = random_logits(300, vocabulary + 1)[:, 1:]  # the first token is possible
    uniforms = torch.from_numpy(uniform(1, np.arange(300)))
    expected, log_probs = sample_tokens(logits, uniforms, sampling)
    for kinds in (plain([sampling]), ALL):
        tokens, found = sample_rows(logits, uniforms, rules([sampling] * 300), kinds)
        assert torch.equal(tokens, expected)
        torch.testing.assert_close(found, log_probs, rtol=1e-12, atol=1e-12)


def test_rows_of_different_parameters_get_their_own_distribution():
    samplings = SAMPLINGS * 50
    logits = random_logits(len(samplings), 300)
    uniforms = torch.from_numpy(uniform(2, np.arange(len(samplings))))
    tokens, log_probs = sample_rows(logits, uniforms, rules(samplings), plain(samplings))
    for i, sampling in enumerate(samplings):
        token, log_prob = sample_tokens(logits[i : i + 1], uniforms[i : i + 1], sampling)
        assert int(tokens[i]) == int(token)
        assert float(log_probs[i]) == pytest.approx(float(log_prob), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", SAMPLINGS[:3])
def test_low_precision_differs_only_where_a_draw_is_near_a_boundary(sampling, dtype):
    logits = random_logits(2000, 500, dtype)
    uniforms = torch.from_numpy(uniform(3, np.arange(2000)))
    tokens, log_probs = sample_rows(logits, uniforms, rules([sampling] * 2000), plain([sampling]))
    exact, _ = sample_tokens(logits.double(), uniforms, sampling)
    cumulative = (logits.double() / (sampling.temperature or 1)).softmax(-1).cumsum(-1)
    near = (cumulative - uniforms[:, None]).abs().amin(-1) < 1e-5
    assert bool(((tokens == exact) | near).all())
    assert log_probs.dtype == torch.float32
    all_log_probs = (logits.double() / (sampling.temperature or 1)).log_softmax(-1)
    torch.testing.assert_close(
        log_probs.double(), all_log_probs.gather(1, tokens[:, None]).squeeze(1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("possible", [[0], [4], [2, 3], [0, 8], [8]])
def test_impossible_tokens_are_never_drawn(possible):
    logits = torch.full((4, 9), -math.inf)
    logits[:, possible] = 0.0
    uniforms = torch.tensor([0.0, 2.0**-53, 0.5 - 2.0**-54, ALMOST_ONE], dtype=torch.float64)
    tokens, log_probs = sample_rows(logits, uniforms, rules([SamplingParams(1)] * 4), SamplingKinds())
    assert tokens.tolist() == [possible[0]] * 3 + [possible[-1]]
    assert log_probs.tolist() == pytest.approx([-math.log(len(possible))] * 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_give_non_finite_log_probs(temperature, bad):
    logits = torch.zeros(3, 60)
    logits[1, 30] = bad
    samplings = [SamplingParams(1, temperature=temperature)] * 3
    for kinds in (plain(samplings), ALL):
        tokens, log_probs = sample_rows(logits, torch.full((3,), 0.5, dtype=torch.float64), rules(samplings), kinds)
        assert log_probs.isfinite().tolist() == [True, False, True]
        assert bool(((tokens >= 0) & (tokens < 60)).all())  # the next step looks it up
