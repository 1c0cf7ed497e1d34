"""Admission by the memory of keys and values on a CPU."""

import pytest

from hybridflow.errors import RolloutConfigError
from hybridflow.models import load_causal_lm
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate

TOKEN_BYTES = 2 * 2 * 1 * 32 * 4
"""Keys and values, 2 layers, 1 head of 32 dimensions, float32."""

SAMPLING = SamplingParams(12, stop_token_ids=(0, 1, 2))
WANTED = [Request(i, [5 + i, 9, 12, 7], SAMPLING, 2, (7, i)) for i in range(6)]  # 2 * 16 tokens each


@pytest.fixture
def engine(tiny_model):
    """Return `engine(num_bytes)`, an engine with this memory of keys and values."""
    model = load_causal_lm(tiny_model())
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads, model.config.head_dim) == (2, 1, 32)
    return lambda num_bytes: EmbeddedRollout(model, kv_cache_bytes=num_bytes)


def most_running(engine, requests) -> int:
    """Return the largest number of sequences that ran in a step of the requests' generation."""
    for request in requests:
        engine.submit(request)
    most = 0
    while engine.has_unfinished():
        engine.step()
        most = max(most, engine._running.num_running if engine._running else 0)
    engine.finished()
    return most


def test_sequences_wait_until_their_keys_and_values_fit(engine):
    unlimited, limited = engine(0), engine(2 * 32 * TOKEN_BYTES)
    expected = [completion.token_ids for completion in generate(unlimited, WANTED)]
    assert [completion.token_ids for completion in generate(limited, WANTED)] == expected
    assert 4 < most_running(unlimited, WANTED) <= 12
    assert most_running(limited, WANTED) <= 4


def test_rows_of_other_sampling_parameters_count(engine):
    greedy = Request(9, [5, 9, 12, 7], SamplingParams(12, temperature=0.0), 1, (7, 9))
    limited = engine(3 * 32 * TOKEN_BYTES)
    assert most_running(limited, [*WANTED[:2], greedy]) == 5
    limited = engine(2 * 32 * TOKEN_BYTES)
    assert most_running(limited, [*WANTED[:2], greedy]) <= 4


def test_a_group_that_never_fits_is_an_error_and_leaves_no_request(engine):
    small = engine(32 * TOKEN_BYTES - 1)
    message = rf"request 0: its 2 sequences need {32 * TOKEN_BYTES} bytes .* raise rollout\.kv_cache_bytes=16383 "
    with pytest.raises(RolloutConfigError, match=message):
        generate(small, WANTED)
    assert not small.has_unfinished()
