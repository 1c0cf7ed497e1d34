"""The contract of rollout engines; each test runs on every implementation (conftest.ENGINES)."""

import math
import random
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from support.faults import fired_faults, plan_faults
from transformers import AutoModelForCausalLM

from fixtures.rollouts import (
    EOS,
    PROMPTS,
    Letters,
    distribution,
    requests,
    require_as_computed,
    serve,
    stock_model,
    tokens_of,
    weights_of,
)
from hybridflow.errors import OutOfMemoryError, RolloutError
from hybridflow.rollout import Completion, EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.rollout.loading import Loading, require_announced
from hybridflow.rollout.requests import StopStrings, require_servable
from hybridflow.runtime.fault_points import FAULTS_VARIABLE, current_worker, fault_point
from hybridflow.runtime.progress import progress
from hybridflow.runtime.random_state import capture_random_state


def by_name(completions: list[Completion]) -> dict[tuple[int, int], Completion]:
    return {(c.request_id, c.index): c for c in completions}


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [c.token_ids for c in completions]


@pytest.fixture
def is_vllm(engine_name) -> bool:
    return engine_name.startswith("vllm")


@pytest.fixture
def has_step_in_flight(engine_name) -> bool:
    """Return whether the engine has begun its next step when a step returns."""
    return engine_name == "vllm_async"


@pytest.fixture
def tolerance(is_vllm) -> float:
    return 1e-4 if is_vllm else 1e-9


# ------------------------------------------------------------------------------------------ generated tokens


@pytest.mark.parametrize(
    ("sampling", "tied"),
    [
        (SamplingParams(6, stop_token_ids=(EOS,)), True),
        (SamplingParams(6, temperature=0.0, stop_token_ids=(EOS, 8)), False),
        (SamplingParams(6, temperature=0.7), False),
        (SamplingParams(6, temperature=1.5, top_k=5, stop_token_ids=(3, EOS, 20)), False),
        (SamplingParams(6, top_p=0.6), False),
        (SamplingParams(6, temperature=0.9, top_k=12, top_p=0.8), True),
    ],
)
def test_tokens_and_log_probs_are_those_of_the_formulas(
    build_rollout, is_vllm, tiny_model, use_float64_throughout, sampling, tied, tolerance
):
    directory = tiny_model("qwen2", tie_word_embeddings=tied)
    engine, stock, wanted = build_rollout(directory), use_float64_throughout(stock_model(directory)), requests(sampling)
    if not is_vllm:
        use_float64_throughout(engine.model)
    before = progress()
    done = generate(engine, wanted)
    assert progress() - before >= max(len(c.token_ids) for c in done)
    for completion in done:  # vLLM draws noise of its own
        require_as_computed(
            lambda version: stock, wanted[completion.request_id], completion, noise=not is_vllm, tolerance=tolerance
        )


@pytest.mark.parametrize("seeded", [True, pytest.param(False, marks=pytest.mark.vllm)])
def test_samples_follow_the_distribution(build_rollout, engine_name, tiny_model, seeded):
    if not seeded and engine_name != "vllm":
        pytest.skip("only vLLM draws without seeds")
    sampling, prompt, count = SamplingParams(1, temperature=1.2, top_k=6), [5, 9, 12], 4000
    with torch.no_grad():
        logits = stock_model(tiny_model())(torch.tensor([prompt])).logits[0, -1].tolist()
    probabilities = distribution(logits, sampling)
    wanted = [Request(i, prompt, sampling, 8, (0, i)) for i in range(count // 8)]
    engine = build_rollout(tiny_model(), **({} if seeded else {"seed_requests": False}))
    drawn = [c.token_ids[0] for c in generate(engine, wanted)]
    for token, probability in enumerate(probabilities):
        sigma = math.sqrt(count * probability * (1 - probability))
        assert abs(drawn.count(token) - count * probability) <= 4.5 * sigma
    pairs = [drawn[i] == drawn[i + 1] for i in range(count - 1)]  # neighbors in a group and across prompts
    alike = sum(p * p for p in probabilities)
    assert sum(pairs) == pytest.approx((count - 1) * alike, abs=6 * math.sqrt(count * alike))


def test_noise_depends_on_key_index_and_offset(build_rollout, tiny_model):
    engine = build_rollout(tiny_model())
    sampling = SamplingParams(8, temperature=1.5)
    keys = [(0, 0), (0, 1), (1, 0), (0, 0)]
    wanted = [Request(i, [5, 6], sampling, 3, key) for i, key in enumerate(keys)]
    done = [tuple(ids) for ids in ids_of(generate(engine, wanted))]
    assert done[:3] == done[9:]  # the same key
    assert len(set(done)) == 9  # another key, another index in the group
    for index in range(3):  # a request for one response of a group
        (alone,) = generate(engine, [replace(wanted[1], group_size=1, first_index=index)])
        assert (alone.index, tuple(alone.token_ids)) == (0, done[3 + index])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_and_log_probs_equal_those_of_transformers(build_rollout, tiny_model, family):
    directory = tiny_model(family)
    stock = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    engine = build_rollout(directory, "float32")
    completions = generate(engine, requests(SamplingParams(12, temperature=0.0, stop_token_ids=(EOS,)), group_size=1))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": EOS, "pad_token_id": 0}
        expected = stock.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert completion.token_ids == expected[0, len(prompt) :].tolist()
    sequences = [[3, 9, 12, 7, 38], [8, 1]]
    for sequence, log_probs in zip(sequences, engine.log_probs(sequences), strict=True):
        with torch.no_grad():
            rows = stock(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1)
        exact = [float(row[token]) for row, token in zip(rows, sequence[1:], strict=True)]
        assert log_probs == pytest.approx(exact, abs=1e-4)


def test_sequence_ends_at_its_first_stop_token_or_its_limit(build_rollout, tiny_model):
    stop_ids, engine = tuple(range(0, 40, 4)), build_rollout(tiny_model())
    wanted = requests(SamplingParams(6, stop_token_ids=stop_ids), 8)[::-1]
    done = generate(engine, wanted)
    assert [(c.request_id, c.index) for c in done] == [(i, index) for i in (4, 3, 2, 1, 0) for index in range(8)]
    assert {c.finish_reason for c in done} == {"stop", "length"}
    for c in done:
        assert not any(token in stop_ids for token in c.token_ids[:-1])
        assert c.finish_reason == ("stop" if c.token_ids[-1] in stop_ids else "length")
        assert c.finish_reason == "stop" or len(c.token_ids) == 6
        assert len(c.token_ids) == len(c.log_probs) == len(c.versions)
        assert set(c.versions) == {0}
    assert [len(c.token_ids) for c in generate(engine, requests(SamplingParams(1)))] == [1] * 10
    all_positions = [Request(0, [5] * 60, SamplingParams(4)), Request(1, [6], SamplingParams(4))]
    assert [len(c.token_ids) for c in generate(engine, all_positions)] == [4, 4]
    assert generate(engine, []) == []
    engine.step()
    assert engine.finished() == []


def test_stop_string_across_tokens_ends_a_sequence(build_rollout, tiny_model):
    plain, stopping = (requests(SamplingParams(12, stop_strings=stops), 8) for stops in ((), ("abba", "bab")))
    engine = build_rollout(tiny_model(), tokenizer=Letters())
    reasons = set()
    for whole, ended in zip(generate(engine, plain), generate(engine, stopping), strict=True):
        text = Letters().decode(whole.token_ids, skip_special_tokens=False)
        ends = [n for n in range(1, 13) if any(stop in text[:n] for stop in ("abba", "bab"))]
        assert ended.token_ids == whole.token_ids[: min([*ends, 12])]
        assert ended.finish_reason == ("stop" if ends else "length")
        reasons.add(ended.finish_reason)
    assert reasons == {"stop", "length"}
    with pytest.raises(RolloutError, match=r"request 0 has stop_strings=\('x',\), but the engine was built without"):
        build_rollout(tiny_model()).submit(Request(0, [5], SamplingParams(4, stop_strings=("x",))))


def test_stop_string_may_be_a_special_token():
    assert StopStrings(Letters()).end([4, 4, EOS], ["b"])
    assert not StopStrings(Letters()).end([4, 4, 4], ["b"])


def test_more_prompt_tokens_than_one_step_holds(build_rollout, tiny_model):
    wanted = [Request(i, [5 + i % 30] * 60, SamplingParams(2), noise_key=(0, i)) for i in range(150)]
    engine = build_rollout(tiny_model(), max_running_sequences=256)
    completions = generate(engine, wanted)
    assert [len(completion.token_ids) for completion in completions] == [2] * 150
    assert generate(engine, [wanted[149]])[0].token_ids == completions[149].token_ids


# ------------------------------------------------------------------------------------------ independence


def test_tokens_do_not_depend_on_other_requests(build_rollout, tiny_model):
    samplings = [
        SamplingParams(7, temperature=0.0),
        SamplingParams(4, temperature=1.3),
        SamplingParams(9, top_k=3, stop_token_ids=(EOS, 5, 6, 7)),
        SamplingParams(9, top_p=0.5, stop_token_ids=(EOS, 9)),
        SamplingParams(4, temperature=1.3),
    ]
    wanted = [replace(request, sampling=samplings[request.request_id]) for request in requests(samplings[0])]
    engine = build_rollout(tiny_model("qwen3"), "float32", max_running_sequences=6)
    alone = [completion for request in wanted for completion in generate(engine, [request])]
    together = generate(engine, wanted)
    assert generate(engine, wanted) == together
    admitted = serve(engine, wanted[:1], lambda step: engine.submit(wanted[step]) if 1 <= step < 5 else None)
    for done in (together, admitted):
        assert tokens_of(done) == tokens_of(alone)
        for ours, theirs in zip(done, alone, strict=True):
            assert ours.log_probs == pytest.approx(theirs.log_probs, rel=1e-4)


# ------------------------------------------------------------------------------------------ requests


def test_completions_of_a_step_come_once_in_order_of_submission(build_rollout, tiny_model):
    engine = build_rollout(tiny_model())
    for request_id, temperature in ((9, 0.5), (4, 1.0), (7, 0.5), (5, 1.0)):
        engine.submit(Request(request_id, [5, 6], SamplingParams(1, temperature=temperature), 2))
    assert engine.finished() == []
    engine.step()
    assert [(c.request_id, c.index) for c in engine.finished()] == [(r, i) for r in (9, 4, 7, 5) for i in (0, 1)]
    assert engine.finished() == []
    assert not engine.has_unfinished()


def test_requests_wait_until_there_is_room_for_their_group(build_rollout, tiny_model, has_step_in_flight):
    engine = build_rollout(tiny_model(), max_running_sequences=4)
    for request in requests(SamplingParams(2)):
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
        (Request(3, [-1, 5], SamplingParams(4)), r"token ids from -1 to 5; they must be in \[0, 40\)"),
        (Request(3, [5, 6], SamplingParams(4), resume_offset=-1), "resume_offset=-1 and first_index=0; they count"),
        (Request(3, [5, 6], SamplingParams(4), first_index=-2), "first_index=-2; they count"),
        *(
            (Request(3, [5], SamplingParams(4), noise_key=key), "request 3 has noise_key")
            for key in ((1.5,), ("a",), ())
        ),
    ],
)
def test_request_that_can_never_be_served_is_an_error(request_, message):
    with pytest.raises(RolloutError, match=message):
        require_servable(request_, max_running_sequences=8, max_len=64, vocabulary=40)


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


def test_invalid_requests_leave_the_engine_as_it_was(build_rollout, tiny_model):
    engine, wanted = build_rollout(tiny_model(), max_running_sequences=4), requests(SamplingParams(3))
    with pytest.raises(RolloutError, match=r"group_size=9 exceeds rollout\.max_running_sequences=4"):
        engine.submit(Request(3, [5], SamplingParams(4), 9))
    with pytest.raises(RolloutError, match="1 prompt tokens and 64 new ones exceed the model's 64 positions"):
        engine.submit(Request(3, [5], SamplingParams(64)))
    for bad in (Request(7, [5, 40], SamplingParams(4)), Request(0, [5], SamplingParams(4))):
        with pytest.raises(RolloutError, match=r"must be in \[0, 40\)|request 0 is waiting or running already"):
            generate(engine, [*wanted, bad])
        assert not engine.has_unfinished()
        assert engine.finished() == []
    for request_id in range(3):
        engine.submit(replace(wanted[0], request_id=request_id))
    engine.step()  # 0 and 1 run, 2 waits
    for request_id in (0, 2):
        with pytest.raises(RolloutError, match=f"request {request_id} is waiting or running already"):
            engine.submit(Request(request_id, [6], SamplingParams(2)))
    with pytest.raises(RolloutError, match="generate needs an idle engine"):
        generate(engine, [Request(9, [5], SamplingParams(2))])
    assert len(serve(engine)) == 6
    engine.submit(Request(0, [6], SamplingParams(2)))
    engine.step()
    engine.abort(0)
    assert {c.request_id for c in generate(engine, wanted[1:])} == {1, 2, 3, 4}  # not the aborted one
    with pytest.raises(RolloutError, match="request 1 is neither waiting nor running"):
        engine.abort(1)


# ------------------------------------------------------------------------------------------ kept sequences


def long_turn(num_requests: int = 3, length: int = 150) -> list[Request]:
    """Return requests to keep, with prompts longer than a block of vLLM's prefix cache."""
    prompts = [[5 + (i + 3 * j) % 30 for j in range(length + 7 * i)] for i in range(num_requests)]
    sampling = SamplingParams(9, temperature=0.0, stop_token_ids=(EOS,))
    return [Request(i, prompt, sampling, 1, (7, i), keep=True) for i, prompt in enumerate(prompts)]


def next_turn(turn: list[Request], done: list[Completion]) -> list[Request]:
    pairs = zip(turn, done, strict=True)
    return [replace(request, prompt_ids=[*request.prompt_ids, *c.token_ids, 7, 11]) for request, c in pairs]


def test_later_turns_reuse_kept_sequences_with_equal_results(build_rollout, tiny_model, tolerance):
    directory, turn = tiny_model(max_position_embeddings=512), long_turn()
    engine, other = build_rollout(directory), build_rollout(directory)
    for number in range(3):
        before = engine.reused_tokens
        done = generate(engine, turn)
        other.forget_kept()
        for found, expected in zip(done, generate(other, turn), strict=True):
            assert found.token_ids == expected.token_ids
            assert found.log_probs == pytest.approx(expected.log_probs, abs=tolerance)
        share = (engine.reused_tokens - before) / sum(len(request.prompt_ids) for request in turn)
        assert share > 0.7 if number else share == 0
        turn = next_turn(turn, done)


@pytest.mark.parametrize("forget", ["forget_kept", "sleep", "retract", "load", "abort", "another prompt"])
def test_forgotten_sequences_are_computed_again(build_rollout, tiny_model, forget):
    directory, turn = tiny_model(max_position_embeddings=512), long_turn(2)
    engine = build_rollout(directory)
    wanted = next_turn(turn, generate(engine, [replace(request, keep=False) for request in turn]))
    if forget == "abort":  # aborted sequences are not kept
        for request in turn:
            engine.submit(request)
        engine.step()
        for request in turn:
            engine.abort(request.request_id)
    else:
        assert next_turn(turn, generate(engine, turn)) == wanted
        if forget == "load":
            load_weights(engine, weights_of(tiny_model(max_position_embeddings=512, seed=1)).items(), version=1)
        elif forget == "another prompt":
            wanted = [replace(request, prompt_ids=[39, *request.prompt_ids[1:]]) for request in wanted]
        else:
            getattr(engine, forget)()
    before = engine.reused_tokens
    done = generate(engine, wanted)
    assert engine.reused_tokens == before
    other = build_rollout(tiny_model(max_position_embeddings=512, seed=int(forget == "load")))
    assert ids_of(done) == ids_of(generate(other, wanted))


# ------------------------------------------------------------------------------------------ abort


def test_aborted_requests_return_their_tokens_so_far(build_rollout, tiny_model):
    wanted = [*requests(SamplingParams(6)), Request(5, [6], SamplingParams(6), 2, (7, 0, 5))]
    engine = build_rollout(tiny_model(), max_running_sequences=10)
    expected = by_name(generate(engine, wanted))
    for request in wanted:
        engine.submit(request)
    for _ in range(2):
        engine.step()
    for request_id in (1, 3, 5):  # the last one has not started
        engine.abort(request_id)
    stopped = engine.finished()
    assert [(c.request_id, c.index) for c in stopped] == [(i, index) for i in (1, 3, 5) for index in (0, 1)]
    assert {c.finish_reason for c in stopped} == {"abort"}
    for c in stopped:
        num_tokens = 2 if c.request_id < 5 else 0
        assert c.token_ids == expected[c.request_id, c.index].token_ids[:num_tokens]
        assert len(c.log_probs) == len(c.versions) == num_tokens
    others = serve(engine)
    assert {c.request_id for c in others} == {0, 2, 4}
    assert all(c.token_ids == expected[c.request_id, c.index].token_ids for c in others)
    for request in wanted:
        engine.submit(request)
    engine.step()
    for request in wanted:
        engine.abort(request.request_id)
    assert not engine.has_unfinished()
    assert len(engine.finished()) == 12


def test_abort_keeps_finished_sequences_of_a_group(build_rollout, tiny_model):
    engine = build_rollout(tiny_model())
    stops = range(0, 40, 8)
    engine.submit(Request(0, [5, 6], SamplingParams(30, stop_token_ids=tuple(stops)), 8))
    while not (done := engine.finished()):
        engine.step()
    engine.abort(0)
    stopped = engine.finished()
    assert {c.finish_reason for c in done} == {"stop"}
    # An end that an engine would have reported in a later step is one.
    assert [c.finish_reason for c in stopped] == ["stop" if c.token_ids[-1] in stops else "abort" for c in stopped]
    assert "abort" in {c.finish_reason for c in stopped}
    assert sorted(c.index for c in done + stopped) == list(range(8))


# ------------------------------------------------------------------------------------------ weights


def with_new_weights(engine, wanted, weights, step, retract) -> dict[tuple[int, int], Completion]:
    """Serve the requests; load weights as version 1 after some steps, and retract."""

    def load(number):
        if number == step:
            load_weights(engine, weights.items(), version=1)
            if retract:
                engine.retract()

    return by_name(serve(engine, wanted, load))


def test_new_weights_and_their_version_are_used_from_the_next_step(build_rollout, tiny_model, has_step_in_flight):
    wanted, new = requests(SamplingParams(5, temperature=0.8)), weights_of(tiny_model(seed=1))
    engine, other = build_rollout(tiny_model()), build_rollout(tiny_model(seed=1))
    before = by_name(generate(engine, wanted))
    load_weights(other, new.items(), version=1)
    done = with_new_weights(engine, wanted, new, 2, retract=False)
    for name, completion in done.items():
        assert completion.versions == ([0, 0, 0, 1, 1] if has_step_in_flight else [0, 0, 1, 1, 1])
        num_old = completion.versions.count(0)
        assert completion.token_ids[:num_old] == before[name].token_ids[:num_old]
        assert completion.log_probs[:num_old] == pytest.approx(before[name].log_probs[:num_old], rel=1e-4)
        assert completion.log_probs[num_old] != pytest.approx(before[name].log_probs[num_old], rel=1e-4)
    assert any(done[name].token_ids != before[name].token_ids for name in done)
    assert ids_of(again := generate(engine, wanted)) == ids_of(generate(other, wanted))
    assert {version for c in again for version in c.versions} == {1}


def continued(engine, request: Request, old: list[int]) -> Completion:
    """Return what an engine generates after the prompt and the first tokens of a response."""
    left = replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - len(old))
    prompt = [*request.prompt_ids, *old]
    (done,) = generate(engine, [replace(request, prompt_ids=prompt, sampling=left, resume_offset=len(old))])
    return done


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_retracted_sequences_continue_as_in_an_engine_with_the_new_weights(
    build_rollout, is_vllm, tiny_model, temperature, tolerance
):
    if is_vllm and temperature:
        pytest.skip("vLLM's noise depends on the tokens before in the same engine")
    new = weights_of(tiny_model(seed=1))
    wanted = requests(SamplingParams(20, temperature=temperature, stop_token_ids=(EOS,)), group_size=1)
    wanted.append(replace(wanted[0], request_id=5, prompt_ids=[5 + j % 30 for j in range(40)]))
    engine, other = build_rollout(tiny_model()), build_rollout(tiny_model(seed=1))
    before = by_name(generate(engine, wanted))
    kept = with_new_weights(engine, wanted, new, 11, retract=False)
    load_weights(engine, weights_of(tiny_model()).items(), version=0)
    done = with_new_weights(engine, wanted, new, 11, retract=True)
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


@pytest.mark.parametrize("step", [0, 1, 3])
def test_weights_that_come_before_the_first_token_or_after_the_last(
    build_rollout, tiny_model, step, has_step_in_flight
):
    wanted, engine = requests(SamplingParams(3)), build_rollout(tiny_model(), max_running_sequences=4)  # others wait
    before = by_name(generate(engine, wanted))
    done = with_new_weights(engine, wanted, weights_of(tiny_model(seed=1)), step, retract=True)
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

    weights, engine = weights_of(tiny_model()), build_rollout(tiny_model(), tokenizer=Characters())
    request = Request(0, PROMPTS[0], SamplingParams(12), 1, (7, 0, 0))
    whole = generate(engine, [request])[0].token_ids
    text = Characters().decode(whole[4:7], skip_special_tokens=True)
    request = replace(request, sampling=SamplingParams(12, stop_strings=(text,)))
    done = with_new_weights(engine, [request], weights, 5, True)  # equal weights: the same tokens
    assert done[0, 0].token_ids == whole[:7]
    assert done[0, 0].finish_reason == "stop"
    assert sorted(set(done[0, 0].versions)) == [0, 1]


def test_log_probs_and_random_state_are_independent_of_running_sequences(build_rollout, tiny_model):
    wanted, probes = requests(SamplingParams(8, stop_token_ids=(EOS,))), [[3, 9, 4, 7, 20], [6, 5, 30]]
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    before = capture_random_state()
    engine = build_rollout(tiny_model())
    expected, log_probs = generate(engine, wanted), engine.log_probs(probes)
    found = []
    done = serve(engine, wanted, lambda step: found.append(engine.log_probs(probes)))
    assert tokens_of(done) == tokens_of(expected)
    assert len(found) >= 3
    for each in found:
        assert [*chain(*each)] == pytest.approx([*chain(*log_probs)], abs=1e-5)
    after = capture_random_state()
    assert torch.equal(before["torch"], after["torch"])
    assert torch.equal(before["python"]["words"], after["python"]["words"])
    assert torch.equal(before["numpy"]["key"], after["numpy"]["key"])
    assert before["numpy"]["position"] == after["numpy"]["position"]


SHAPES = {"a": torch.Size([2, 3]), "b": torch.Size([4])}


@pytest.mark.parametrize(
    ("announced", "message"),
    [
        ({"a": SHAPES["a"]}, "weights are missing: b; every parameter"),
        ({**SHAPES, "extra": torch.Size([2])}, "no weights called extra"),
        ({**SHAPES, "b": torch.Size([7])}, r"weight 'b' has shape \(7,\), in the rollout model \(4,\)"),
    ],
)
def test_weights_that_do_not_fit_are_an_error(announced, message):
    with pytest.raises(RolloutError, match=message):
        Loading(SHAPES, announced)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([("a", torch.zeros(2, 3)), ("a", torch.zeros(2, 3))], "weight 'a' came twice"),
        ([("c", torch.zeros(2))], "weight 'c' was not announced"),
        ([("b", torch.zeros(3))], r"weight 'b' has shape \(3,\), but \(4,\) was announced"),
        ([("b", torch.zeros(4).int())], r"weight 'b' has dtype torch\.int32; expected a floating-point"),
        ([("b", torch.zeros(4))], "weights did not come: a"),
    ],
)
def test_weights_that_were_not_announced_are_an_error(weights, message):
    loading = Loading(SHAPES, SHAPES)
    with pytest.raises(RolloutError, match=message):  # noqa: PT012
        list(loading.checked(weights))
        require_announced(loading).require_complete()
    with pytest.raises(RolloutError, match="no weights are announced: call start_loading first"):
        require_announced(None)


def test_rejected_weights_change_nothing_and_broken_loads_are_repeated(build_rollout, tiny_model):
    engine, wanted = build_rollout(tiny_model()), requests(SamplingParams(5))
    weights = weights_of(tiny_model(seed=1))
    before = generate(engine, wanted)
    assert engine.boxes_to_load() == {}  # one rank loads whole weights
    for wrong, message in (
        ({n: w for n, w in weights.items() if n != "model.norm.weight"}, r"weights are missing: model\.norm\.weight"),
        (weights | {"model.norm.weight": torch.zeros(7)}, r"shape \(7,\), in .* \(64,\)"),
    ):
        with pytest.raises(RolloutError, match=message):
            load_weights(engine, wrong.items(), version=1)
        assert generate(engine, wanted) == before
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
    items = list(weights.items())[::-1]  # in any order and in several calls
    engine.start_loading(shapes)
    for i in range(0, len(items), 3):
        engine.load(items[i : i + 3])
    engine.finish_loading(version=2)
    other = build_rollout(tiny_model(seed=1))
    load_weights(other, weights.items(), version=2)
    assert generate(engine, wanted) == generate(other, wanted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_weights_are_an_error_and_can_be_replaced(build_rollout, tiny_model, temperature):
    engine, wanted = build_rollout(tiny_model()), requests(SamplingParams(5, temperature=temperature))
    before, weights = generate(engine, wanted), weights_of(tiny_model())
    diverged = weights | {"model.norm.weight": torch.full((64,), torch.nan, dtype=torch.float64)}
    load_weights(engine, diverged.items(), version=1)
    with pytest.raises(RolloutError, match=r"request \d: the model's logits are not finite"):
        generate(engine, wanted)
    assert not engine.has_unfinished()
    load_weights(engine, weights.items(), version=0)
    assert generate(engine, wanted) == before


def test_a_memory_fault_between_two_steps_changes_no_token(build_rollout, tiny_model, tmp_path, monkeypatch):
    wanted, engine = requests(SamplingParams(6)), build_rollout(tiny_model())
    expected = generate(engine, wanted)
    fault = "1: memory rollout/0 in generate"
    monkeypatch.setenv(FAULTS_VARIABLE, plan_faults(tmp_path, [fault]))
    token = current_worker.set("rollout/0")
    try:
        fault_point("step", 1)
        for request in wanted:
            engine.submit(request)
        if not isinstance(engine, EmbeddedRollout):  # which goes on with fewer sequences
            with pytest.raises(OutOfMemoryError, match="out of memory in generation by vLLM"):
                serve(engine)
        found = sorted([*engine.finished(), *serve(engine)], key=lambda c: (c.request_id, c.index))
        assert tokens_of(found) == tokens_of(expected)
        for ours, theirs in zip(found, expected, strict=True):  # of fewer sequences at a time, which may round
            assert ours.log_probs == pytest.approx(theirs.log_probs, rel=1e-5)
        assert [row["fault"] for row in fired_faults(tmp_path)] == [fault]
    finally:
        current_worker.reset(token)
