"""The contract of rollout engines; each test runs on every implementation (conftest.ENGINES).

The reference computes one sequence at a time with the transformers model, without a cache, and samples tokens by the
formulas.
"""

import math
import random
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridflow.config import Config, load_config
from hybridflow.config.faults import Fault
from hybridflow.errors import OutOfMemoryError, RolloutError
from hybridflow.models import load_causal_lm
from hybridflow.rollout import Completion, EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.runtime import capture_random_state, progress, uniform
from hybridflow.runtime.fault_points import (
    arm_faults,
    current_worker,
    fault_point_of_step,
    plan_faults,
    unfired_faults,
)

EOS = 1
PROMPTS = [[5, 9, 12, 7], [8], [3, 30, 22], [11, 4, 6, 17, 25, 39, 10], [8, 8]]


def requests(sampling: SamplingParams, group_size: int = 2, prompts=PROMPTS) -> list[Request]:
    return [Request(i, prompt, sampling, group_size, (7, 0, i)) for i, prompt in enumerate(prompts)]


def distribution(logits: list[float], sampling: SamplingParams) -> list[float]:
    """Return the sampling probabilities, computed with Python numbers."""
    scaled = [logit / (sampling.temperature or 1.0) for logit in logits]
    largest = max(scaled)
    weights = [math.exp(value - largest) for value in scaled]
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total, mass, kept = sum(weights[token] for token in ranked), 0.0, []
    for token in ranked:
        if mass < sampling.top_p:
            kept.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(weights))]


def draw(probabilities: list[float], number: float) -> int:
    """Return the first token whose cumulative probability exceeds the number."""
    cumulative = 0.0
    for token, probability in enumerate(probabilities):
        cumulative += probability
        if cumulative > number:
            return token
    raise AssertionError(number)


def reference_sequence(model, request: Request, index: int) -> tuple[list[int], list[float]]:
    sampling, tokens, log_probs = request.sampling, [], []
    for position in range(sampling.max_new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([[*request.prompt_ids, *tokens]])).logits[0, -1].tolist()
        probabilities = distribution(logits, sampling)
        token = probabilities.index(max(probabilities))
        if sampling.temperature:
            token = draw(probabilities, float(uniform(*request.noise_key, index, position)))
        tokens.append(token)
        log_probs.append(math.log(probabilities[token]))
        if token in sampling.stop_token_ids:
            break
    return tokens, log_probs


def stock_model(directory, use_float64_throughout):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="sdpa")
    return use_float64_throughout(model)


def serve(engine, between_steps=lambda step: None) -> list[Completion]:
    """Step until the engine is idle; call `between_steps` before each step with the number of steps so far."""
    done, steps = [], 0
    while engine.has_unfinished():
        between_steps(steps)
        engine.step()
        steps += 1
        done += engine.finished()
    return done


def by_name(completions: list[Completion]) -> dict[tuple[int, int], Completion]:
    return {(c.request_id, c.index): c for c in completions}


# ------------------------------------------------------------------------------------------ generated tokens


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(6, temperature=1.0, stop_token_ids=(EOS,)),
        SamplingParams(6, temperature=0.7),
        SamplingParams(6, temperature=1.5, top_k=5, stop_token_ids=(3, EOS, 20)),
        SamplingParams(6, temperature=1.0, top_p=0.6),
        SamplingParams(6, temperature=0.9, top_k=12, top_p=0.8),
        SamplingParams(6, temperature=0.0, stop_token_ids=(EOS, 8)),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("build_rollout", ["embedded", "paged"], indirect=True)
def test_tokens_and_log_probs_equal_recomputation_of_single_sequences(
    build_rollout, tiny_model, use_float64_throughout, sampling, tied
):
    directory = tiny_model("qwen2", tie_word_embeddings=tied)
    engine, stock = build_rollout(directory), stock_model(directory, use_float64_throughout)
    use_float64_throughout(engine.model)
    wanted = requests(sampling)
    for completion, request in zip(generate(engine, wanted), [r for r in wanted for _ in range(2)], strict=True):
        tokens, log_probs = reference_sequence(stock, request, completion.index)
        assert completion.token_ids == tokens
        assert completion.log_probs == pytest.approx(log_probs, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(6),
        SamplingParams(6, temperature=0.0),
        SamplingParams(6, temperature=1.5, top_k=5),
        SamplingParams(6, temperature=0.9, top_k=12, top_p=0.8),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_log_probs_are_under_the_sampling_distribution(
    build_rollout, tiny_model, use_float64_throughout, sampling, tied
):
    directory = tiny_model("qwen2", tie_word_embeddings=tied)
    stock, wanted = stock_model(directory, use_float64_throughout), requests(sampling)
    completions = generate(build_rollout(directory), wanted)
    for completion, request in zip(completions, [r for r in wanted for _ in range(2)], strict=True):
        tokens = completion.token_ids
        with torch.no_grad():
            logits = stock(torch.tensor([[*request.prompt_ids, *tokens]])).logits[0, len(request.prompt_ids) - 1 : -1]
        expected = [distribution(row, sampling)[token] for row, token in zip(logits.tolist(), tokens, strict=True)]
        assert completion.log_probs == pytest.approx([math.log(p) for p in expected], abs=1e-4)


def test_progress_counts_the_decoding_steps(build_rollout, tiny_model):
    engine, before = build_rollout(tiny_model()), progress()
    generate(engine, requests(SamplingParams(6, temperature=0.0)))
    assert progress() - before >= 6


def test_samples_follow_the_distribution(build_rollout, tiny_model, use_float64_throughout):
    sampling, prompt, count = SamplingParams(1, temperature=1.2, top_k=6), [5, 9, 12], 4000
    stock = stock_model(tiny_model("qwen2"), use_float64_throughout)
    with torch.no_grad():
        probabilities = distribution(stock(torch.tensor([prompt])).logits[0, -1].tolist(), sampling)
    wanted = [Request(i, prompt, sampling, 8, (0, i)) for i in range(count // 8)]
    drawn = [c.token_ids[0] for c in generate(build_rollout(tiny_model("qwen2")), wanted)]
    for token, probability in enumerate(probabilities):
        sigma = math.sqrt(count * probability * (1 - probability))
        assert abs(drawn.count(token) - count * probability) <= 4.5 * sigma
    pairs = [drawn[i] == drawn[i + 1] for i in range(count - 1)]  # neighbors in a group and across prompts
    alike = sum(p * p for p in probabilities)
    assert sum(pairs) == pytest.approx((count - 1) * alike, abs=6 * math.sqrt(count * alike))


def test_neighboring_prompts_share_no_sample(build_rollout, tiny_model):
    wanted = [Request(i, [5, 6], SamplingParams(8), 4, (0, i)) for i in range(4)]
    assert len({tuple(c.token_ids) for c in generate(build_rollout(tiny_model()), wanted)}) == 16


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_equal_those_of_transformers_generate(build_rollout, tiny_model, family):
    stock = AutoModelForCausalLM.from_pretrained(tiny_model(family), attn_implementation="eager")
    engine = build_rollout(tiny_model(family), "float32")
    completions = generate(engine, requests(SamplingParams(12, temperature=0.0, stop_token_ids=(EOS,)), group_size=1))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([prompt])
        expected = stock.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


def test_completions_are_ordered_by_request_and_index(build_rollout, tiny_model):
    wanted = requests(SamplingParams(5, stop_token_ids=tuple(range(20))), group_size=3)
    names = [(c.request_id, c.index) for c in generate(build_rollout(tiny_model()), wanted[::-1])]
    assert names == [(i, index) for i in (4, 3, 2, 1, 0) for index in range(3)]


def test_every_token_has_a_log_prob_and_a_version(build_rollout, tiny_model):
    for completion in generate(build_rollout(tiny_model()), requests(SamplingParams(5, stop_token_ids=(*range(20),)))):
        assert 1 <= len(completion.token_ids) <= 5
        assert len(completion.token_ids) == len(completion.log_probs) == len(completion.versions)
        assert all(log_prob < 0 for log_prob in completion.log_probs)
        assert set(completion.versions) == {0}


def test_sequence_ends_at_its_first_stop_token_or_its_limit(build_rollout, tiny_model):
    stop_ids = tuple(range(0, 40, 4))
    completions = generate(build_rollout(tiny_model()), requests(SamplingParams(6, stop_token_ids=stop_ids), 8))
    reasons = [completion.finish_reason for completion in completions]
    assert {"stop", "length"} == set(reasons)
    for completion in completions:
        stopped = completion.token_ids[-1] in stop_ids
        assert not any(token in stop_ids for token in completion.token_ids[:-1])
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.token_ids) == 6


def test_stop_string_across_tokens_ends_a_sequence(build_rollout, tiny_model):
    class Letters:
        def decode(self, token_ids, *, skip_special_tokens):
            return "".join("ab"[token % 2] for token in token_ids)

    plain = requests(SamplingParams(12), 8)
    stopping = requests(SamplingParams(12, stop_strings=("abba", "bab")), 8)
    engine = build_rollout(tiny_model(), tokenizer=Letters())
    reasons = set()
    for whole, ended in zip(generate(engine, plain), generate(engine, stopping), strict=True):
        text = Letters().decode(whole.token_ids, skip_special_tokens=True)
        ends = [n for n in range(1, 13) if any(stop in text[:n] for stop in ("abba", "bab"))]
        assert ended.token_ids == whole.token_ids[: min([*ends, 12])]
        assert ended.finish_reason == ("stop" if ends else "length")
        reasons.add(ended.finish_reason)
    assert reasons == {"stop", "length"}


def test_stop_string_may_be_a_special_token(build_rollout, tiny_model):
    from hybridflow.rollout.stop_strings import StopStrings

    class Tokenizer:
        def decode(self, token_ids, *, skip_special_tokens):
            return "".join("" if skip_special_tokens and i == 1 else ["a", "<end>"][i] for i in token_ids)

    assert StopStrings(Tokenizer()).end([0, 0, 1], ["<end>"])
    assert not StopStrings(Tokenizer()).end([0, 0, 0], ["<end>"])


def test_stop_strings_without_a_tokenizer_are_an_error(build_rollout, tiny_model):
    with pytest.raises(RolloutError, match=r"request 0 has stop_strings=\('x',\), but the engine was built without"):
        build_rollout(tiny_model()).submit(Request(0, [5], SamplingParams(4, stop_strings=("x",))))


def test_responses_of_one_token(build_rollout, tiny_model):
    completions = generate(build_rollout(tiny_model()), requests(SamplingParams(1)))
    assert [len(completion.token_ids) for completion in completions] == [1] * 10


def test_prompt_and_response_may_use_all_positions(build_rollout, tiny_model):
    wanted = [Request(0, [5] * 60, SamplingParams(4)), Request(1, [6], SamplingParams(4))]
    assert [len(completion.token_ids) for completion in generate(build_rollout(tiny_model()), wanted)] == [4, 4]


def test_more_prompt_tokens_than_one_step_holds(build_rollout, tiny_model):
    wanted = [Request(i, [5 + i % 30] * 60, SamplingParams(2), noise_key=(0, i)) for i in range(150)]
    completions = generate(build_rollout(tiny_model(), max_running_sequences=256), wanted)
    assert [len(completion.token_ids) for completion in completions] == [2] * 150
    (alone,) = generate(build_rollout(tiny_model()), [wanted[149]])
    assert alone.token_ids == completions[149].token_ids


def test_no_requests_give_no_completions(build_rollout, tiny_model):
    engine = build_rollout(tiny_model())
    assert generate(engine, []) == []
    engine.step()
    assert engine.finished() == []


# ------------------------------------------------------------------------------------------ independence


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("max_running_sequences", [2, 5, 1024])
def test_request_gets_the_same_tokens_alone_and_among_others(build_rollout, tiny_model, dtype, max_running_sequences):
    wanted = requests(SamplingParams(10, stop_token_ids=(EOS, 5, 6, 7)))
    engine = build_rollout(tiny_model("qwen3"), dtype, max_running_sequences=max_running_sequences)
    together = by_name(generate(engine, wanted))
    for request in wanted:
        for alone in generate(build_rollout(tiny_model("qwen3"), dtype), [request]):
            other = together[alone.request_id, alone.index]
            assert alone.token_ids == other.token_ids
            assert alone.log_probs == pytest.approx(other.log_probs, rel=1e-10 if dtype == "float64" else 1e-4)


def test_requests_admitted_while_others_run_get_their_tokens(build_rollout, tiny_model):
    wanted = requests(SamplingParams(8, stop_token_ids=(EOS, 5)))
    expected = by_name(generate(build_rollout(tiny_model()), wanted))
    engine = build_rollout(tiny_model())
    engine.submit(wanted[0])
    done = serve(engine, lambda step: engine.submit(wanted[step]) if 1 <= step < 5 else None)
    assert {name: c.token_ids for name, c in by_name(done).items()} == {n: c.token_ids for n, c in expected.items()}


def test_requests_may_differ_in_sampling_parameters(build_rollout, tiny_model):
    several = [
        SamplingParams(7, temperature=0.0),
        SamplingParams(4, temperature=1.3),
        SamplingParams(9, top_k=3),
        SamplingParams(9, top_p=0.5, stop_token_ids=(EOS, 9)),
        SamplingParams(4, temperature=1.3),
    ]
    wanted = [
        Request(i, prompt, sampling, 2, (3, i))
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, several, strict=True))
    ]
    together = generate(build_rollout(tiny_model(), max_running_sequences=6), wanted)
    alone = [c for request in wanted for c in generate(build_rollout(tiny_model()), [request])]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_equal_requests_with_different_noise_differ(build_rollout, tiny_model):
    sampling = SamplingParams(8, temperature=1.5)
    wanted = [Request(i, [5, 6], sampling, 2, (i // 2, 0)) for i in range(4)]
    completions = [tuple(c.token_ids) for c in generate(build_rollout(tiny_model()), wanted)]
    assert completions[:2] == completions[2:4]  # the same noise key
    assert len(set(completions)) == 4  # another key, another index in the group


def test_generating_twice_gives_equal_tokens(build_rollout, tiny_model):
    engine = build_rollout(tiny_model(), "float32")
    wanted = requests(SamplingParams(8, stop_token_ids=(EOS,)))
    assert generate(engine, wanted) == generate(engine, wanted)


# ------------------------------------------------------------------------------------------ requests


def test_completions_of_one_step_are_in_order_of_submission(build_rollout, tiny_model):
    long, short = SamplingParams(3, temperature=0.5), SamplingParams(3, temperature=1.0)
    engine = build_rollout(tiny_model())
    for request_id, sampling in ((9, long), (4, short), (7, long), (5, short)):
        engine.submit(Request(request_id, [5, 6], sampling, 2))
    done = serve(engine)
    assert [(c.request_id, c.index) for c in done] == [(r, i) for r in (9, 4, 7, 5) for i in (0, 1)]


def test_finished_returns_each_completion_once(build_rollout, tiny_model):
    engine = build_rollout(tiny_model())
    engine.submit(Request(0, [5], SamplingParams(1), 3))
    assert engine.finished() == []
    engine.step()
    assert [c.index for c in engine.finished()] == [0, 1, 2]
    assert engine.finished() == []
    assert not engine.has_unfinished()


@pytest.fixture
def engine_name(request) -> str:
    """Return the name of the engine in `ENGINES`."""
    return request.node.callspec.params["build_rollout"]


@pytest.fixture
def has_step_in_flight(engine_name) -> bool:
    """Return whether the engine has begun its next step when a step returns."""
    return engine_name == "vllm_async"


def test_max_running_sequences_limits_the_running_sequences(build_rollout, tiny_model, has_step_in_flight):
    engine = build_rollout(tiny_model(), max_running_sequences=4)
    for request in requests(SamplingParams(2), group_size=2):
        engine.submit(request)
    finished = []
    while engine.has_unfinished():
        engine.step()
        finished.append({c.request_id for c in engine.finished()})
    assert [ids for ids in finished if ids] == [{0, 1}, {2, 3}, {4}]
    if has_step_in_flight:  # a step in flight when sequences end does not admit others
        assert 6 <= len(finished) <= 8
    else:
        assert finished == [set(), {0, 1}, set(), {2, 3}, set(), {4}]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(3, [], SamplingParams(4)), "request 3 has an empty prompt"),
        (Request(3, [5], SamplingParams(4), 0), "request 3 has group_size=0; it must be at least 1"),
        (Request(3, [5], SamplingParams(4), 9), r"group_size=9 exceeds rollout\.max_running_sequences=8"),
        (Request(3, [5] * 61, SamplingParams(4)), "61 prompt tokens and 4 new ones exceed the model's 64 positions"),
        (Request(3, [5, 40], SamplingParams(4)), r"token ids from 5 to 40; they must be in \[0, 40\)"),
        (Request(3, [5, 6], SamplingParams(4), resume_offset=-1), "resume_offset=-1 and first_index=0; they count"),
        (Request(3, [5, 6], SamplingParams(4), first_index=-2), "first_index=-2; they count"),
        (Request(3, [-1, 5], SamplingParams(4)), r"token ids from -1 to 5; they must be in \[0, 40\)"),
    ],
)
def test_request_that_can_never_be_served_is_an_error(build_rollout, tiny_model, request_, message):
    engine = build_rollout(tiny_model(), max_running_sequences=8)
    with pytest.raises(RolloutError, match=message):
        engine.submit(request_)
    assert not engine.has_unfinished()


def test_a_request_for_one_response_of_a_group_gets_its_tokens(build_rollout, tiny_model):
    engine = build_rollout(tiny_model())
    load_weights(engine, weights_of(tiny_model()).items(), version=0)
    whole = Request(3, [5, 9, 6], SamplingParams(6), group_size=3, noise_key=(1, 4))
    group = generate(engine, [whole])
    for index in range(3):
        (alone,) = generate(engine, [replace(whole, group_size=1, first_index=index)])
        assert (alone.index, alone.token_ids) == (0, group[index].token_ids)
    assert len({tuple(response.token_ids) for response in group}) == 3


def test_request_id_in_use_is_an_error_until_it_is_finished(build_rollout, tiny_model):
    engine = build_rollout(tiny_model(), max_running_sequences=1)
    for request_id in (0, 1):
        engine.submit(Request(request_id, [5], SamplingParams(2)))
    engine.step()  # 0 runs, 1 waits
    for request_id in (0, 1):
        with pytest.raises(RolloutError, match=f"request {request_id} is waiting or running already"):
            engine.submit(Request(request_id, [6], SamplingParams(2)))
    assert len(serve(engine)) == 2
    engine.submit(Request(0, [6], SamplingParams(2)))
    assert len(serve(engine)) == 1


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 is invalid: it must be at least 1"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, r"top_p=0\.0 is invalid: expected"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"stop_strings": ("a", "")}, "an empty string would end every response"),
    ],
)
def test_sampling_parameters_are_checked(parameters, message):
    with pytest.raises(RolloutError, match=message):
        SamplingParams(**({"max_new_tokens": 4} | parameters))


@pytest.mark.parametrize("bad", [Request(7, [], SamplingParams(4)), Request(0, [5], SamplingParams(4))])
def test_generate_leaves_the_engine_idle_after_an_invalid_request(build_rollout, tiny_model, bad):
    engine = build_rollout(tiny_model())
    wanted = requests(SamplingParams(3))
    with pytest.raises(RolloutError):
        generate(engine, [*wanted, bad])
    assert not engine.has_unfinished()
    assert engine.finished() == []
    assert len(generate(engine, wanted)) == 10


def test_generate_ignores_completions_of_earlier_requests(build_rollout, tiny_model):
    engine = build_rollout(tiny_model())
    engine.submit(Request(7, [5], SamplingParams(4)))
    engine.step()
    engine.abort(7)
    wanted = requests(SamplingParams(3))
    assert [c.request_id for c in generate(engine, wanted)] == [
        r.request_id for r in wanted for _ in range(r.group_size)
    ]


def test_generate_requires_an_idle_engine(build_rollout, tiny_model):
    engine = build_rollout(tiny_model())
    engine.submit(Request(0, [5], SamplingParams(2)))
    with pytest.raises(RolloutError, match="generate needs an idle engine"):
        generate(engine, [Request(1, [5], SamplingParams(2))])


# ------------------------------------------------------------------------------------------ kept sequences


def long_turn(num_requests: int = 3, length: int = 150) -> list[Request]:
    """Return requests to keep, with prompts longer than a block of vLLM's prefix cache."""
    prompts = [[5 + (i + 3 * j) % 30 for j in range(length + 7 * i)] for i in range(num_requests)]
    sampling = SamplingParams(9, temperature=0.0, stop_token_ids=(EOS,))
    return [Request(i, prompt, sampling, 1, (7, i), keep=True) for i, prompt in enumerate(prompts)]


def next_turn(turn: list[Request], done: list[Completion]) -> list[Request]:
    pairs = zip(turn, done, strict=True)
    return [replace(request, prompt_ids=[*request.prompt_ids, *c.token_ids, 7, 11]) for request, c in pairs]


def test_later_turns_reuse_kept_sequences_with_equal_results(build_rollout, engine_name, tiny_model):
    directory, turn = tiny_model(max_position_embeddings=512), long_turn()
    engine, tolerance = build_rollout(directory), 1e-4 if engine_name.startswith("vllm") else 1e-9
    for number in range(3):
        before = engine.reused_tokens
        done = generate(engine, turn)
        for found, expected in zip(done, generate(build_rollout(directory), turn), strict=True):
            assert found.token_ids == expected.token_ids
            assert found.log_probs == pytest.approx(expected.log_probs, abs=tolerance)
        share = (engine.reused_tokens - before) / sum(len(request.prompt_ids) for request in turn)
        assert share > 0.7 if number else share == 0
        turn = next_turn(turn, done)


@pytest.mark.parametrize("forget", ["forget_kept", "sleep", "retract", "load", "abort"])
def test_forgotten_sequences_are_computed_again(build_rollout, tiny_model, forget):
    directory, turn = tiny_model(max_position_embeddings=512), long_turn(2)
    engine, weights = build_rollout(directory), weights_of(tiny_model(max_position_embeddings=512, seed=1))
    expected = next_turn(turn, generate(engine, [replace(request, keep=False) for request in turn]))
    if forget == "abort":  # aborted sequences are not kept
        for request in turn:
            engine.submit(request)
        engine.step()
        for request in turn:
            engine.abort(request.request_id)
        engine.finished()
    else:
        assert next_turn(turn, generate(engine, turn)) == expected
        if forget == "load":
            load_weights(engine, weights.items(), version=1)
        else:
            getattr(engine, forget)()
    before = engine.reused_tokens
    done = generate(engine, expected)
    assert engine.reused_tokens == before
    other = build_rollout(tiny_model(max_position_embeddings=512, seed=int(forget == "load")))
    assert [c.token_ids for c in done] == [c.token_ids for c in generate(other, expected)]


def test_a_prompt_that_continues_no_kept_sequence_is_computed(build_rollout, tiny_model):
    engine, turn = build_rollout(tiny_model(max_position_embeddings=512)), long_turn(2)
    wanted = [
        replace(request, prompt_ids=[39, *request.prompt_ids[1:]])
        for request in next_turn(turn, generate(engine, turn))
    ]
    before = engine.reused_tokens
    done = generate(engine, wanted)
    assert engine.reused_tokens == before
    other = build_rollout(tiny_model(max_position_embeddings=512))
    assert [c.token_ids for c in done] == [c.token_ids for c in generate(other, wanted)]


# ------------------------------------------------------------------------------------------ abort


def test_aborted_request_returns_its_tokens_so_far(build_rollout, tiny_model):
    wanted = requests(SamplingParams(6))
    expected = by_name(generate(build_rollout(tiny_model()), wanted))
    engine = build_rollout(tiny_model())
    for request in wanted:
        engine.submit(request)
    for _ in range(2):
        engine.step()
    engine.abort(1)
    engine.abort(3)
    stopped = engine.finished()
    assert [(c.request_id, c.index, c.finish_reason) for c in stopped] == [
        (1, 0, "abort"), (1, 1, "abort"), (3, 0, "abort"), (3, 1, "abort"),
    ]  # fmt: skip
    for completion in stopped:
        assert completion.token_ids == expected[completion.request_id, completion.index].token_ids[:2]
        assert len(completion.log_probs) == len(completion.versions) == 2
    others = serve(engine)
    assert {c.request_id for c in others} == {0, 2, 4}
    for completion in others:
        assert completion.token_ids == expected[completion.request_id, completion.index].token_ids


def test_waiting_request_is_aborted_without_tokens(build_rollout, tiny_model):
    engine = build_rollout(tiny_model(), max_running_sequences=2)
    for request in requests(SamplingParams(3)):
        engine.submit(request)
    engine.step()
    engine.abort(2)
    assert engine.finished() == [Completion(2, 0, finish_reason="abort"), Completion(2, 1, finish_reason="abort")]
    assert {c.request_id for c in serve(engine)} == {0, 1, 3, 4}


def test_requests_wait_until_they_run(build_rollout, tiny_model):
    engine = build_rollout(tiny_model(), max_running_sequences=4)
    assert engine.waiting() == []
    for request in requests(SamplingParams(3)):
        engine.submit(request)
    assert engine.waiting() == [0, 1, 2, 3, 4]
    engine.step()
    assert engine.waiting() == [2, 3, 4]
    engine.abort(3)
    assert engine.waiting() == [2, 4]
    assert {c.request_id for c in serve(engine) if c.token_ids} == {0, 1, 2, 4}
    assert engine.waiting() == []


def test_aborting_all_requests_leaves_the_engine_idle(build_rollout, tiny_model):
    engine = build_rollout(tiny_model(), max_running_sequences=4)
    for request in requests(SamplingParams(3)):
        engine.submit(request)
    engine.step()
    for request_id in range(5):
        engine.abort(request_id)
    assert not engine.has_unfinished()
    assert len(engine.finished()) == 10


def test_abort_keeps_finished_sequences_of_a_group(build_rollout, tiny_model):
    sampling = SamplingParams(30, stop_token_ids=tuple(range(0, 40, 8)))
    engine = build_rollout(tiny_model())
    engine.submit(Request(0, [5, 6], sampling, 8))
    done = []
    while not done:
        engine.step()
        done = engine.finished()
    engine.abort(0)
    stopped = engine.finished()
    assert done
    assert stopped
    assert {c.finish_reason for c in done} == {"stop"}
    assert {c.finish_reason for c in stopped} == {"abort"}
    assert sorted(c.index for c in done + stopped) == list(range(8))


def test_aborting_a_finished_request_is_an_error(build_rollout, tiny_model):
    engine = build_rollout(tiny_model())
    generate(engine, requests(SamplingParams(2)))
    with pytest.raises(RolloutError, match="request 0 is neither waiting nor running"):
        engine.abort(0)


# ------------------------------------------------------------------------------------------ weights


def weights_of(directory, dtype=torch.float64) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in load_causal_lm(directory, dtype).named_parameters()}


def test_new_weights_and_their_version_are_used_from_the_next_step(build_rollout, tiny_model, has_step_in_flight):
    wanted = requests(SamplingParams(5, temperature=0.8))
    engine = build_rollout(tiny_model())
    load_weights(engine, weights_of(tiny_model()).items(), version=3)
    before = by_name(generate(engine, wanted))
    other = build_rollout(tiny_model(seed=1))
    load_weights(other, weights_of(tiny_model(seed=1)).items(), version=4)
    after = by_name(generate(other, wanted))
    for request in wanted:
        engine.submit(request)
    new = weights_of(tiny_model(seed=1))
    done = by_name(serve(engine, lambda step: load_weights(engine, new.items(), version=4) if step == 2 else None))
    for name, completion in done.items():
        assert completion.versions == ([3, 3, 3, 4, 4] if has_step_in_flight else [3, 3, 4, 4, 4])
        num_old = completion.versions.count(3)
        assert completion.token_ids[:num_old] == before[name].token_ids[:num_old]
        assert completion.log_probs[:num_old] == pytest.approx(before[name].log_probs[:num_old], rel=1e-4)
    assert any(
        done[name].log_probs[num_old] != pytest.approx(before[name].log_probs[num_old], rel=1e-4) for name in done
    )
    assert any(done[name].token_ids != before[name].token_ids for name in done)
    again = by_name(generate(engine, wanted))
    assert {name: c.token_ids for name, c in again.items()} == {name: c.token_ids for name, c in after.items()}
    assert {version for c in again.values() for version in c.versions} == {4}


def with_new_weights(engine, wanted, weights, step, retract) -> dict[tuple[int, int], Completion]:
    """Serve the requests; load weights as version 1 after some steps, and retract."""
    for request in wanted:
        engine.submit(request)

    def load(number):
        if number == step:
            load_weights(engine, weights.items(), version=1)
            if retract:
                engine.retract()

    return by_name(serve(engine, load))


def continued(engine, request: Request, old: list[int]) -> Completion:
    """Return what an engine generates after the prompt and the first tokens of a response."""
    left = replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - len(old))
    prompt = [*request.prompt_ids, *old]
    (done,) = generate(engine, [replace(request, prompt_ids=prompt, sampling=left, resume_offset=len(old))])
    return done


@pytest.mark.parametrize("sampling", [SamplingParams(20, temperature=0.0, stop_token_ids=(EOS,)), SamplingParams(20)])
def test_retracted_sequences_continue_as_in_an_engine_with_the_new_weights(
    build_rollout, engine_name, tiny_model, sampling
):
    if engine_name.startswith("vllm") and sampling.temperature:
        pytest.skip("vLLM's noise depends on the tokens before in the same engine")
    new, wanted = weights_of(tiny_model(seed=1)), requests(sampling, group_size=1)
    engine, other = build_rollout(tiny_model()), build_rollout(tiny_model(seed=1))
    load_weights(engine, weights_of(tiny_model()).items(), version=0)
    before = by_name(generate(engine, wanted))
    kept = with_new_weights(engine, wanted, new, 11, retract=False)
    load_weights(engine, weights_of(tiny_model()).items(), version=0)
    done = with_new_weights(engine, wanted, new, 11, retract=True)
    tolerance = 1e-4 if engine_name.startswith("vllm") else 1e-9
    for name, completion in done.items():
        num_old = completion.versions.count(0)
        assert completion.token_ids[:num_old] == before[name].token_ids[:num_old]
        assert completion.versions == sorted(completion.versions)
        if num_old == len(completion.token_ids):
            continue  # it had stopped
        expected = continued(other, wanted[name[0]], completion.token_ids[:num_old])
        assert completion.token_ids[num_old:] == expected.token_ids
        assert completion.log_probs[num_old:] == pytest.approx(expected.log_probs, abs=tolerance)
        assert completion.finish_reason == expected.finish_reason
        assert kept[name].token_ids[:num_old] == completion.token_ids[:num_old]
    assert any(0 in c.versions and 1 in c.versions for c in done.values())
    assert any(kept[name].log_probs != pytest.approx(done[name].log_probs, abs=1e-3) for name in done)


def test_retracted_groups_of_long_prompts_continue_with_the_new_weights(build_rollout, tiny_model):
    sampling = SamplingParams(12, temperature=0.0)
    wanted = [Request(i, [5 + (i + j) % 30 for j in range(40)], sampling, 3, (7, 0, i)) for i in range(2)]
    engine, other = build_rollout(tiny_model()), build_rollout(tiny_model(seed=1))
    load_weights(engine, weights_of(tiny_model()).items(), version=0)
    for name, completion in with_new_weights(engine, wanted, weights_of(tiny_model(seed=1)), 5, True).items():
        num_old = completion.versions.count(0)
        assert 0 < num_old < len(completion.token_ids)
        expected = continued(other, replace(wanted[name[0]], group_size=1), completion.token_ids[:num_old])
        assert completion.token_ids[num_old:] == expected.token_ids


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("retract", [False, True])
def test_weights_that_come_before_the_first_token_or_after_the_last(
    build_rollout, tiny_model, step, retract, has_step_in_flight
):
    wanted = requests(SamplingParams(3))
    engine = build_rollout(tiny_model(), max_running_sequences=4)  # others wait for their first tokens
    load_weights(engine, weights_of(tiny_model()).items(), version=0)
    before = by_name(generate(engine, wanted))
    done = with_new_weights(engine, wanted, weights_of(tiny_model(seed=1)), step, retract)
    assert set(done) == set(before)
    assert all(len(c.token_ids) == len(c.versions) == 3 for c in done.values())
    num_old = min(3, step + has_step_in_flight) if step else 0
    for index in range(2):
        assert done[0, index].versions == [0] * num_old + [1] * (3 - num_old)
        assert done[0, index].token_ids[:num_old] == before[0, index].token_ids[:num_old]
        assert done[4, index].versions == [1] * 3


def test_a_stop_string_that_begins_before_retraction_ends_a_sequence(build_rollout, tiny_model):
    class Characters:
        def decode(self, token_ids, *, skip_special_tokens):
            return "".join(chr(ord("A") + token) for token in token_ids)

    weights = weights_of(tiny_model())
    engine = build_rollout(tiny_model(), tokenizer=Characters())
    load_weights(engine, weights.items(), version=0)
    request = Request(0, PROMPTS[0], SamplingParams(12), 1, (7, 0, 0))
    whole = generate(engine, [request])[0].token_ids
    text = Characters().decode(whole[4:7], skip_special_tokens=True)
    request = replace(request, sampling=SamplingParams(12, stop_strings=(text,)))
    done = with_new_weights(engine, [request], weights, 5, True)  # equal weights: the same tokens
    assert done[0, 0].token_ids == whole[:7]
    assert done[0, 0].finish_reason == "stop"
    assert sorted(set(done[0, 0].versions)) == [0, 1]


def test_log_probs_between_steps_change_no_running_sequence(build_rollout, tiny_model):
    wanted, probes = requests(SamplingParams(8, stop_token_ids=(EOS,))), [[3, 9, 4, 7, 20], [6, 5, 30]]
    engine = build_rollout(tiny_model())
    expected, log_probs = by_name(generate(engine, wanted)), engine.log_probs(probes)
    for request in wanted:
        engine.submit(request)
    found = []
    done = by_name(serve(engine, lambda step: found.append(engine.log_probs(probes))))
    assert {name: c.token_ids for name, c in done.items()} == {name: c.token_ids for name, c in expected.items()}
    assert len(found) >= 3
    for each in found:
        assert [*chain(*each)] == pytest.approx([*chain(*log_probs)], abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), r"weights are missing: model\.norm\.weight"),
        (lambda weights: weights.update(extra=torch.zeros(2)), "no weights called extra"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(7)}), r"shape \(7,\), in .* \(64,\)"),
    ],
)
def test_weights_that_do_not_fit_are_an_error_and_change_nothing(build_rollout, tiny_model, change, message):
    engine = build_rollout(tiny_model())
    wanted = requests(SamplingParams(5))
    before = generate(engine, wanted)
    weights = weights_of(tiny_model(seed=1))
    change(weights)
    with pytest.raises(RolloutError, match=message):
        load_weights(engine, weights.items(), version=1)
    assert generate(engine, wanted) == before


def test_repeated_or_missing_weight_is_an_error_until_all_are_loaded(build_rollout, tiny_model):
    engine, weights = build_rollout(tiny_model()), weights_of(tiny_model(seed=1))
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    (first, second), *rest = [list(weights.items())[:2], *list(weights.items())[2:]]
    engine.start_loading(shapes)
    engine.load([first, second])
    with pytest.raises(RolloutError, match=f"weight '{first[0]}' came twice"):
        engine.load([first])
    engine.start_loading(shapes)
    engine.load([first, *rest])
    with pytest.raises(RolloutError, match=f"weights did not come: {second[0]}"):
        engine.finish_loading(version=3)
    load_weights(engine, weights.items(), version=2)
    other = build_rollout(tiny_model(seed=1))
    load_weights(other, weights.items(), version=2)
    wanted = requests(SamplingParams(5))
    assert generate(engine, wanted) == generate(other, wanted)


def test_engine_of_one_rank_loads_whole_weights(build_rollout, tiny_model):
    engine, wanted = build_rollout(tiny_model()), requests(SamplingParams(5))
    before = generate(engine, wanted)
    assert engine.boxes_to_load() == {}
    assert generate(engine, wanted) == before


def test_weights_load_in_any_order_and_in_several_calls(build_rollout, tiny_model):
    weights, wanted = weights_of(tiny_model("qwen2", seed=1)), requests(SamplingParams(5))
    other = build_rollout(tiny_model("qwen2", seed=1))
    load_weights(other, weights.items(), version=2)
    engine, items = build_rollout(tiny_model("qwen2")), list(weights.items())[::-1]
    engine.start_loading({name: tensor.shape for name, tensor in items})
    for i in range(0, len(items), 3):
        engine.load(items[i : i + 3])
    engine.finish_loading(version=2)
    assert generate(engine, wanted) == generate(other, wanted)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_log_probs_of_given_sequences_equal_those_of_transformers(build_rollout, tiny_model, family):
    stock = AutoModelForCausalLM.from_pretrained(tiny_model(family), attn_implementation="eager")
    found = build_rollout(tiny_model(family)).log_probs([[3, 9, 12, 7, 38], [8, 1]])
    for sequence, log_probs in zip([[3, 9, 12, 7, 38], [8, 1]], found, strict=True):
        with torch.no_grad():
            expected = stock(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1)
        assert log_probs == pytest.approx(
            [float(row[t]) for row, t in zip(expected, sequence[1:], strict=True)], abs=1e-4
        )


def test_building_and_generating_keep_the_random_state(build_rollout, tiny_model):
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    before = capture_random_state()
    engine = build_rollout(tiny_model())
    generate(engine, requests(SamplingParams(4)))
    engine.log_probs([[5, 6, 7]])
    after = capture_random_state()
    assert torch.equal(before["torch"], after["torch"])
    assert torch.equal(before["python"]["words"], after["python"]["words"])
    assert torch.equal(before["numpy"]["key"], after["numpy"]["key"])
    assert before["numpy"]["position"] == after["numpy"]["position"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_weights_are_an_error_and_can_be_replaced(build_rollout, tiny_model, temperature):
    engine = build_rollout(tiny_model())
    wanted = requests(SamplingParams(5, temperature=temperature))
    before = generate(engine, wanted)
    weights = weights_of(tiny_model())
    diverged = weights | {"model.norm.weight": torch.full((64,), torch.nan, dtype=torch.float64)}
    load_weights(engine, diverged.items(), version=1)
    with pytest.raises(RolloutError, match=r"request \d: the model's logits are not finite"):
        generate(engine, wanted)
    assert not engine.has_unfinished()
    load_weights(engine, weights.items(), version=0)
    assert generate(engine, wanted) == before


def test_a_memory_fault_between_two_steps_changes_no_token(build_rollout, tiny_model, tmp_path):
    wanted = requests(SamplingParams(6))
    engine = build_rollout(tiny_model())
    expected = by_name(generate(engine, wanted))
    plan_faults(tmp_path, [Fault.of_text("1: memory rollout/0 in generate")], 1)
    arm_faults(load_config(None, ["faults.random=1", f"trainer.run_dir={tmp_path}"]))
    token = current_worker.set("rollout/0")
    try:
        fault_point_of_step(1)
        for request in wanted:
            engine.submit(request)
        if not isinstance(engine, EmbeddedRollout):  # which goes on with fewer sequences
            with pytest.raises(OutOfMemoryError, match="out of memory in generation by vLLM"):
                serve(engine)
        found = by_name([*engine.finished(), *serve(engine)])
        assert {name: c.token_ids for name, c in found.items()} == {name: c.token_ids for name, c in expected.items()}
        for name, completion in found.items():  # of fewer sequences at a time, which may round differently
            assert completion.log_probs == pytest.approx(expected[name].log_probs, rel=1e-5)
        assert unfired_faults() == []
    finally:
        current_worker.reset(token)
        arm_faults(Config())
