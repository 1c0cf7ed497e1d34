"""Sampling of tokens, for rows with equal parameters and for rows with parameters of their own."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.rollouts import distribution, draw
from hybridflow.rollout import SamplingParams
from hybridflow.rollout.sampling import RowRules, SamplingKinds, sample_rows, sample_tokens
from hybridflow.runtime.random_streams import uniform

LOGITS = torch.tensor([0.0, math.log(2), math.log(5), -math.inf, math.log(2)])  # probabilities .1 .2 .5 0 .2
ALMOST_ONE = 1 - 2.0**-53
ALL = SamplingKinds(greedy=True, restricted=True)


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


def by_rows(logits, numbers, sampling):
    """Sample as `sample_tokens` with `sample_rows`, which may do work that no row needs."""
    samplings = [sampling] * len(logits)
    tokens, log_probs = sample_rows(logits, numbers.double(), rules(samplings), plain(samplings))
    more, same = sample_rows(logits, numbers.double(), rules(samplings), ALL)
    assert torch.equal(tokens, more)
    torch.testing.assert_close(log_probs, same, equal_nan=True)
    return tokens, log_probs


@pytest.fixture(params=[sample_tokens, by_rows], ids=["tokens", "rows"])
def sample(request):
    """Return each way to sample."""
    return request.param


@pytest.fixture
def drawn(sample):
    """Return a function that draws a token of LOGITS for each number."""
    return lambda numbers, dtype=torch.float64, **parameters: sample(
        LOGITS.to(dtype).expand(len(numbers), -1),
        torch.tensor(numbers, dtype=torch.float64),
        SamplingParams(1, **parameters),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_token_is_the_first_whose_cumulative_probability_exceeds_u(drawn, dtype):
    numbers = [0.0, 0.099, 0.101, 0.299, 0.301, 0.799, 0.801, 0.999, ALMOST_ONE]
    assert drawn(numbers, dtype)[0].tolist() == [0, 0, 1, 1, 2, 2, 4, 4, 4]
    assert drawn([0.05, 0.15, 0.5, 0.9], dtype, top_k=100)[0].tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("parameters", "kept", "log_prob"),
    [
        ({}, {0, 1, 2, 4}, math.log(0.5)),
        ({"temperature": 0.5}, {0, 1, 2, 4}, math.log(25 / 34)),  # .1 .2 .5 .2 are squared: 1 4 25 4 of 34
        ({"temperature": 0.0}, {2}, math.log(0.5)),
        ({"top_k": 1}, {2}, 0.0),
        ({"top_k": 2}, {1, 2}, math.log(5 / 7)),  # of equal logits the lower id
        ({"top_p": 0.1}, {2}, 0.0),
        ({"top_p": 0.5 + 1e-6}, {1, 2}, math.log(5 / 7)),
        ({"top_p": 0.7 + 1e-6}, {1, 2, 4}, math.log(5 / 9)),
        ({"top_p": 0.95}, {0, 1, 2, 4}, math.log(0.5)),
        ({"top_k": 2, "top_p": 0.7}, {2}, 0.0),  # of the top two, .5 and .2, the first has 5/7 of the mass
        ({"top_k": 2, "top_p": 0.72}, {1, 2}, math.log(5 / 7)),
    ],
)
def test_top_k_and_top_p_restrict_the_distribution(drawn, parameters, kept, log_prob):
    tokens, log_probs = drawn(np.linspace(0, ALMOST_ONE, 200).tolist(), **parameters)
    assert set(tokens.tolist()) == kept
    assert log_probs[tokens == 2].tolist() == pytest.approx([log_prob] * int((tokens == 2).sum()))


@pytest.mark.parametrize("possible", [[0], [4], [2, 3], [0, 8], [8]])
def test_impossible_tokens_are_never_drawn(sample, possible):
    logits = torch.full((4, 9), -math.inf)
    logits[:, possible] = 0.0
    numbers = torch.tensor([0.0, 2.0**-53, 0.5 - 2.0**-54, ALMOST_ONE], dtype=torch.float64)
    tokens, log_probs = sample(logits, numbers, SamplingParams(1))
    assert tokens.tolist() == [possible[0]] * 3 + [possible[-1]]
    assert log_probs.tolist() == pytest.approx([-math.log(len(possible))] * 4)


def test_log_probs_are_float32_unless_logits_are_float64(sample):
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        logits = torch.tensor([[1.0, 2.0, 4.0]], dtype=dtype)
        _, log_probs = sample(logits, torch.tensor([0.99]), SamplingParams(1, temperature=0.3))
        exact = 4 / 0.3 - math.log(sum(math.exp(x / 0.3) for x in (1, 2, 4)))
        assert log_probs.dtype == expected
        assert log_probs.item() == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_give_non_finite_log_probs(sample, temperature, bad):
    for width in (3, 600):
        logits = torch.zeros(3, width)
        logits[1, width // 2] = bad
        tokens, log_probs = sample(logits, torch.full((3,), 0.5), SamplingParams(1, temperature=temperature))
        assert log_probs.isfinite().tolist() == [True, False, True]
        assert bool(((tokens >= 0) & (tokens < width)).all())  # the next step looks it up


def random_logits(rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocabulary + 1, generator=generator, dtype=torch.float64)
    logits[:, ::7] = -math.inf
    return logits[:, 1:]  # the first token is possible


SAMPLINGS = st.builds(
    SamplingParams,
    st.just(1),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 7, 50, 10_000]),
    top_p=st.sampled_from([1.0, 0.6, 0.8]),
)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.lists(SAMPLINGS, min_size=1, max_size=8), st.sampled_from([1, 2, 5, 40, 151, 1000]), st.integers(0, 99))
def test_rows_of_different_parameters_get_their_own_distribution(samplings, vocabulary, seed):
    logits = random_logits(len(samplings), vocabulary, seed)
    uniforms = torch.from_numpy(uniform(seed, np.arange(len(samplings))))
    for kinds in (plain(samplings), ALL):
        tokens, log_probs = sample_rows(logits, uniforms, rules(samplings), kinds)
        for i, sampling in enumerate(samplings):
            probabilities = distribution(logits[i].tolist(), sampling)
            expected = draw(probabilities, float(uniforms[i])) if sampling.temperature else int(logits[i].argmax())
            alone = sample_tokens(logits[i : i + 1], uniforms[i : i + 1], sampling)
            assert int(tokens[i]) == int(alone[0]) == expected
            exact = pytest.approx(math.log(probabilities[expected]), rel=1e-12, abs=1e-12)
            assert float(log_probs[i]) == exact
            assert float(alone[1]) == exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_low_precision_differs_only_where_a_draw_is_near_a_boundary(sample, temperature, dtype):
    logits, sampling = random_logits(500, 300, 0).to(dtype), SamplingParams(1, temperature=temperature)
    uniforms = torch.from_numpy(uniform(3, np.arange(500)))
    tokens, log_probs = sample(logits, uniforms, sampling)
    exact, _ = sample_tokens(logits.double(), uniforms, sampling)
    all_log_probs = (logits.double() / (temperature or 1)).log_softmax(-1)
    near = (all_log_probs.exp().cumsum(-1) - uniforms[:, None]).abs().amin(-1) < 1e-5
    assert bool(((tokens == exact) | near).all())
    assert log_probs.dtype == torch.float32
    exact_log_probs = all_log_probs.gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(log_probs.double(), exact_log_probs, rtol=1e-5, atol=1e-5)
