"""Kept keys and values on the embedded engine: what is reused, and when it is dropped."""

import itertools
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.rollouts import Letters, require_equal, serve, weights_of
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.paged_kv_cache import PAGE_SIZE
from hybridflow.rollout import Completion, EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.rollout.kept_sequences import KeptSequences

LENGTHS = [1, 2, 31, 32, 33, 64, 65]
SAMPLING = SamplingParams(20, stop_token_ids=(1, 9))
ANSWER = [7, 11, 3]


@pytest.fixture(params=[False, True], ids=["batches", "paged"])
def build(request, tiny_model):
    """Return a builder of engines in float64, for both ways to decode."""
    directory = tiny_model("qwen2", max_position_embeddings=256)
    return lambda **options: EmbeddedRollout(load_causal_lm(directory, torch.float64), paged=request.param, **options)


def first_turn(**options) -> list[Request]:
    prompts = [[2 + (7 * i + 3 * j * j) % 38 for j in range(length)] for i, length in enumerate(LENGTHS)]
    options = {"keep": True} | options
    return [Request(i, prompt, SAMPLING, noise_key=(4, i), **options) for i, prompt in enumerate(prompts)]


def next_turn(turn: list[Request], completions: list[Completion], answer=ANSWER, **changes) -> list[Request]:
    """Return requests that continue each completion with the answer of an environment."""
    prompts = {request.request_id: request for request in turn}
    return [
        replace(
            prompts[c.request_id],
            prompt_ids=[*prompts[c.request_id].prompt_ids, *c.token_ids, *answer],
            noise_key=(5, c.request_id, c.index),
            request_id=7 * c.request_id + c.index,
            **{"group_size": 1} | changes,
        )
        for c in completions
    ]


def reused(engine, requests: list[Request]) -> tuple[list[Completion], int]:
    """Serve the requests; return the completions and the number of prompt tokens that were not computed."""
    before = engine.reused_tokens
    return generate(engine, requests), engine.reused_tokens - before


def known(turn: list[Request], num_new: int = len(ANSWER) + 1) -> int:
    """Return the number of prompt tokens of a turn whose keys and values were computed in the turn before."""
    return sum(len(request.prompt_ids) - num_new for request in turn)


@pytest.mark.parametrize("max_running_sequences", [4, 1024])
def test_turns_equal_those_of_an_engine_without_reuse(build, max_running_sequences):
    engine, turn = build(max_running_sequences=max_running_sequences), first_turn()
    for number in range(3):
        num_prompt = engine.prompt_tokens
        done, count = reused(engine, turn)
        require_equal(done, generate(build(), turn))
        assert count == (known(turn) if number else 0)
        assert engine.prompt_tokens - num_prompt == sum(len(request.prompt_ids) for request in turn)
        assert len(engine._kept) == len(turn)
        turn = next_turn(turn, done)
    engine.forget_kept()
    assert engine._running is None


def test_a_turn_reuses_while_other_requests_run(build):
    engine, turn = build(), first_turn()
    wanted = next_turn(turn, generate(engine, turn))
    other = Request(500, [8, 9], SamplingParams(60), 3, (9,))

    def submit(step):
        for request in wanted[3:] if step == 3 else ():
            engine.submit(request)

    require_equal(serve(engine, [other, *wanted[:3]], submit), generate(build(), [*wanted, other]))
    assert engine.reused_tokens == known(wanted)


@pytest.mark.parametrize(("num_new", "group_size"), [(32, 1), (1, 3)])
def test_groups_continue_each_response_of_a_group(build, num_new, group_size):
    engine, turn = build(), first_turn(group_size=2)
    options = {"group_size": group_size, "first_index": 2, "resume_offset": 5}
    wanted = next_turn(turn, generate(engine, turn), [5] * num_new, **options)
    done, count = reused(engine, wanted)
    require_equal(done, generate(build(), wanted))
    assert count == known(wanted, num_new + 1)
    later = next_turn(wanted, done)
    assert reused(engine, later)[1] == known(later)


def test_a_sequence_that_ends_by_a_stop_string_is_continued(build):
    engine = build(tokenizer=Letters())
    turn = [replace(r, sampling=SamplingParams(30, stop_strings=("abba", "bab"))) for r in first_turn()]
    done = generate(engine, turn)
    assert "stop" in {c.finish_reason for c in done}
    wanted = next_turn(turn, done)
    done, count = reused(engine, wanted)
    require_equal(done, generate(build(tokenizer=Letters()), wanted))
    assert count == known(wanted)


def test_only_a_longer_prompt_with_equal_tokens_continues_and_once(build):
    engine = build()
    turn = [replace(request, keep=request.request_id % 2 == 0) for request in first_turn()]
    done = generate(engine, turn)
    wanted = [replace(request, keep=False) for request in next_turn(turn, done)]
    changed = [replace(r, prompt_ids=[1 + r.prompt_ids[0] % 39, *r.prompt_ids[1:]]) for r in wanted]
    shortened = [replace(r, prompt_ids=r.prompt_ids[: -len(ANSWER) - 1]) for r in wanted]
    counts = (0, 0, known(wanted[::2]), 0)
    for prompts, expected in zip((changed, shortened, wanted, wanted), counts, strict=True):
        found, count = reused(engine, prompts)
        require_equal(found, generate(build(), prompts))
        assert count == expected
    assert engine._running is None


def test_kept_sequences_are_dropped_when_weights_are_announced(build):
    engine = build()
    generate(engine, first_turn()[:2])
    engine.start_loading({name: p.shape for name, p in engine.model.named_parameters()})
    assert len(engine._kept) == 0
    engine.abandon_loading()


def test_an_idle_engine_with_kept_sequences_packs_weights_again_if_they_moved(tiny_model):
    model = load_causal_lm(tiny_model("qwen2", max_position_embeddings=256))
    engine, turn = EmbeddedRollout(model, paged=False), first_turn()
    wanted = next_turn(turn, generate(engine, turn))
    packed = engine._forward._decoder
    assert packed is not None
    generate(engine, wanted[:1])
    assert engine._forward._decoder is packed
    for weight in model.parameters():
        weight.data = weight.data * 1.1
    other = [replace(request, request_id=99, prompt_ids=[5, 6, 7], keep=False) for request in wanted[:1]]
    require_equal(generate(engine, other), generate(EmbeddedRollout(model, paged=False), other))
    assert engine._forward._decoder is not packed


def test_forgotten_sequences_let_weights_change_in_place(tiny_model):
    model = load_causal_lm(tiny_model("qwen2", max_position_embeddings=256))
    engine, turn = EmbeddedRollout(model, paged=False), first_turn()
    wanted = next_turn(turn, generate(engine, turn), keep=False)
    for request in wanted:
        engine.submit(request)
    engine.forget_kept()
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 1.1
    expected = generate(EmbeddedRollout(model, paged=False), wanted)
    require_equal(serve(engine), sorted(expected, key=attrgetter("request_id")))


@pytest.mark.parametrize("retract", [False, True])
def test_a_sequence_with_keys_of_older_weights_is_kept_only_if_retracted(build, tiny_model, retract):
    new = weights_of(tiny_model("qwen2", max_position_embeddings=256, seed=1))
    engine, other = build(), build()
    load_weights(other, new.items(), version=1)
    turn = [replace(request, sampling=SamplingParams(12)) for request in first_turn()]

    def load(step):
        if step == 5:
            load_weights(engine, new.items(), version=1)
            if retract:
                engine.retract()
            engine.submit(turn[-1])

    done = serve(engine, turn[:-1], load)
    assert done[0].versions == [0] * 5 + [1] * 7
    wanted = next_turn(turn, done)
    found, count = reused(engine, wanted)
    assert count == known(wanted if retract else wanted[-1:])
    require_equal(found, generate(other, wanted))


@pytest.mark.parametrize("num_tokens", [384, 2048])
def test_kept_sequences_give_way_to_rows_oldest_first(build, num_tokens):
    token_bytes = 2 * 2 * 32 * 8  # 2 layers of keys and values of one head of 32, in float64
    engine = build(max_running_sequences=4, kv_cache_bytes=(num_tokens + PAGE_SIZE) * token_bytes)
    turn, done, ended = first_turn(), [], []
    for request in turn:
        engine.submit(request)
    for step in itertools.count():
        if not engine.has_unfinished():
            break
        engine.step()
        done += engine.finished()
        ended += [step] * (len(done) - len(ended))
    wanted = next_turn(turn, done)
    is_kept = [engine._kept.find(request.prompt_ids) is not None for request in wanted]
    assert is_kept[-1]
    assert all(is_kept) == (num_tokens == 2048)
    dropped = [step for step, kept in zip(ended, is_kept, strict=True) if not kept]
    assert max(dropped, default=0) <= min(step for step, kept in zip(ended, is_kept, strict=True) if kept)
    found, count = reused(engine, wanted)
    require_equal(found, generate(build(), wanted))
    assert 0 < count < known(wanted) or num_tokens == 2048
    assert count == known(wanted) or num_tokens == 384


@pytest.mark.parametrize("runs", [False, True])
def test_a_larger_group_than_the_halved_limit_runs_after_kept_sequences(build, runs):
    engine, turn = build(max_running_sequences=16), first_turn()
    engine._limit = 2
    generate(engine, turn)
    wanted = [Request(1, [9], SAMPLING, noise_key=(4,)), Request(2, [5, 6], SAMPLING, 8, (3,))]
    if runs:
        engine.submit(wanted[0])
        engine.step()
    found = serve(engine, wanted[runs:])
    require_equal(found, generate(build(), wanted))


# ------------------------------------------------------------------------------------------ the parts alone

TOKENS = st.lists(st.integers(0, 2), max_size=6)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.one_of(st.tuples(st.just("add"), TOKENS), st.tuples(st.sampled_from(["take", "drop"]), TOKENS))))
def test_the_longest_and_oldest_beginning_of_a_prompt_is_found(operations):
    kept, lists, freed = KeptSequences[int](), dict[int, list[int]](), list[int]()
    counts = [0, 0]
    for number, (operation, tokens) in enumerate(operations):
        if operation == "add":
            kept.add(tokens, number, lambda number=number: freed.append(number))
            lists[number] = tokens
            continue
        prompt = [*tokens, 1]  # its last token must be computed
        beginnings = [key for key, each in lists.items() if each == tokens[: len(each)]]
        longest = max(beginnings, key=lambda key: (len(lists[key]), -key), default=None)
        found = kept.find(prompt)
        assert (None if found is None else found.storage) == longest
        if operation == "take":
            counts[0] += len(prompt)
            counts[1] += len(lists.pop(longest)) if longest is not None else 0
            assert kept.take(prompt) is found
        else:
            others = [key for key in lists if key != longest]
            assert kept.drop_oldest(but=found) == bool(others)
            if others:
                assert freed.pop() == others[0]
                del lists[others[0]]
        assert (kept.prompt_tokens, kept.reused_tokens) == tuple(counts)
        assert (kept.storages, len(kept)) == (list(lists), len(lists))
    kept.clear()
    assert freed == list(lists)
