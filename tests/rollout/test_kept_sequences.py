"""Kept keys and values on the embedded engine: what is reused, with which results, and when it is dropped."""

from dataclasses import replace
from operator import attrgetter

import pytest
import torch

from hybridflow.models import load_causal_lm
from hybridflow.models.paged_kv_cache import PAGE_SIZE
from hybridflow.rollout import Completion, EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.rollout.kept_sequences import KeptSequences

LENGTHS = [1, 2, 30, 31, 32, 33, 40, 63, 64, 65, 90]
SAMPLING = SamplingParams(20, stop_token_ids=(1, 9))
ANSWER = [7, 11, 3]


@pytest.fixture(params=[False, True], ids=["batches", "paged"])
def build(request, tiny_model):
    """Return a builder of engines in float64, for both ways to decode."""
    directory = tiny_model("qwen2", max_position_embeddings=256)
    return lambda **options: EmbeddedRollout(load_causal_lm(directory, torch.float64), paged=request.param, **options)


def first_turn(**options) -> list[Request]:
    return [
        Request(
            i, [2 + (7 * i + 3 * j * j) % 38 for j in range(length)], SAMPLING, noise_key=(4, i), keep=True, **options
        )
        for i, length in enumerate(LENGTHS)
    ]


def next_turn(turn: list[Request], completions: list[Completion], answer=ANSWER, **changes) -> list[Request]:
    """Return requests that continue each completion with the answer of an environment, under the same ids."""
    prompts = {request.request_id: request for request in turn}
    return [
        replace(
            prompts[c.request_id],
            prompt_ids=[*prompts[c.request_id].prompt_ids, *c.token_ids, *answer],
            noise_key=(5, c.request_id, c.index),
            request_id=1000 * c.index + c.request_id,
            **{"group_size": 1} | changes,
        )
        for c in completions
    ]


def require_equal(found: list[Completion], expected: list[Completion]) -> None:
    assert [(c.request_id, c.index, c.token_ids, c.finish_reason) for c in found] == [
        (c.request_id, c.index, c.token_ids, c.finish_reason) for c in expected
    ]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-9)


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
    for number in range(4):
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
    expected = generate(build(), [other]), generate(build(), wanted)
    for request in (other, *wanted[:3]):
        engine.submit(request)
    done = []
    for step in range(200):
        engine.step()
        if step == 2:
            for request in wanted[3:]:
                engine.submit(request)
        done += engine.finished()
        if not engine.has_unfinished():
            break
    require_equal(sorted((c for c in done if c.request_id == 500), key=lambda c: c.index), expected[0])
    require_equal(sorted((c for c in done if c.request_id != 500), key=lambda c: c.request_id), expected[1])
    assert engine.reused_tokens == known(wanted)


@pytest.mark.parametrize("group_size", [1, 3])
def test_a_group_continues_each_response_of_a_group(build, group_size):
    engine, turn = build(), first_turn(group_size=3)
    wanted = next_turn(turn, generate(engine, turn), group_size=group_size, first_index=2, resume_offset=5)
    done, count = reused(engine, wanted)
    require_equal(done, generate(build(), wanted))
    assert count == known(wanted)


@pytest.mark.parametrize("num_new", [1, 2, 31, 32, 33, 40])
def test_groups_that_continue_share_pages_with_any_number_of_new_tokens(build, num_new):
    engine, turn = build(), first_turn()
    wanted = next_turn(turn, generate(engine, turn), [5] * num_new, group_size=3)
    done, count = reused(engine, wanted)
    require_equal(done, generate(build(), wanted))
    assert count == known(wanted, num_new + 1)
    later = next_turn(wanted, done)
    done, count = reused(engine, later)
    require_equal(done, generate(build(), later))
    assert count == known(later)


def test_a_sequence_that_ends_by_a_stop_string_is_continued(build):
    class Letters:
        def decode(self, token_ids, *, skip_special_tokens):
            return "".join("ab"[token % 2] for token in token_ids)

    sampling = SamplingParams(30, stop_strings=("abba", "bab"))
    engine = build(tokenizer=Letters())
    turn = [replace(request, sampling=sampling) for request in first_turn()]
    done = generate(engine, turn)
    assert "stop" in {c.finish_reason for c in done}
    wanted = next_turn(turn, done)
    done, count = reused(engine, wanted)
    require_equal(done, generate(build(tokenizer=Letters()), wanted))
    assert count == known(wanted)


def test_a_prompt_with_other_tokens_reuses_nothing(build):
    engine, turn = build(), first_turn()
    done = generate(engine, turn)
    changed = [
        replace(request, prompt_ids=[1 + request.prompt_ids[0] % 39, *request.prompt_ids[1:]])
        for request in next_turn(turn, done)
    ]
    shortened = [replace(r, prompt_ids=r.prompt_ids[: -len(ANSWER) - 1]) for r in next_turn(turn, done)]
    for wanted in (changed, shortened, turn):
        found, count = reused(engine, [replace(request, keep=False) for request in wanted])
        require_equal(found, generate(build(), wanted))
        assert count == 0
    wanted = next_turn(turn, done)
    assert reused(engine, wanted)[1] == known(wanted)


def test_a_kept_sequence_is_continued_once_and_only_with_keep(build):
    engine, turn = build(), [replace(request, keep=request.request_id % 2 == 0) for request in first_turn()]
    wanted = [replace(request, keep=False) for request in next_turn(turn, generate(engine, turn))]
    expected = generate(build(), wanted)
    for count in (known(wanted[::2]), 0):
        done, found = reused(engine, wanted)
        require_equal(done, expected)
        assert found == count
    assert engine._running is None


def drop_by_loading(engine):
    load_weights(engine, [(n, p.detach().clone()) for n, p in engine.model.named_parameters()], version=1)


@pytest.mark.parametrize(
    "drop",
    [
        drop_by_loading,
        EmbeddedRollout.retract,
        EmbeddedRollout.sleep,
        EmbeddedRollout.forget_kept,
        lambda engine: (engine._kept.clear(), engine._free()),
    ],
)
def test_kept_sequences_are_dropped_and_memory_is_freed(build, drop):
    engine, turn = build(), first_turn()
    wanted = next_turn(turn, generate(engine, turn))
    assert len(engine._kept) == len(turn)
    drop(engine)
    assert len(engine._kept) == 0
    assert engine._running is None
    done, count = reused(engine, wanted)
    assert count == 0
    assert [c.token_ids for c in done] == [c.token_ids for c in generate(build(), wanted)]


def test_kept_sequences_survive_until_weights_are_announced(build):
    engine, turn = build(), first_turn()
    generate(engine, turn)
    engine.log_probs([[5, 6]])
    engine.step()
    assert len(engine._kept) == len(turn)
    engine.start_loading({name: p.shape for name, p in engine.model.named_parameters()})
    assert len(engine._kept) == 0
    engine.abandon_loading()


def test_an_idle_engine_with_kept_sequences_repacks_weights_only_if_they_moved(tiny_model):
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
    while engine.has_unfinished():
        engine.step()
    found, expected = engine.finished(), generate(EmbeddedRollout(model, paged=False), wanted)
    require_equal(*(sorted(each, key=attrgetter("request_id")) for each in (found, expected)))


def test_an_error_in_a_step_drops_kept_sequences(build, monkeypatch):
    engine, turn = build(), first_turn()
    wanted = next_turn(turn, generate(engine, turn))
    monkeypatch.setattr(engine._forward, "decode", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(engine, wanted)
    assert len(engine._kept) == 0
    monkeypatch.undo()
    require_equal(generate(engine, wanted), generate(build(), wanted))


@pytest.mark.parametrize("retract", [False, True])
def test_a_sequence_with_keys_of_older_weights_is_kept_only_if_retracted(build, tiny_model, retract):
    new = dict(
        load_causal_lm(tiny_model("qwen2", max_position_embeddings=256, seed=1), torch.float64).named_parameters()
    )
    engine, other = build(), build()
    load_weights(other, new.items(), version=1)
    sampling = SamplingParams(12)
    turn = [replace(request, sampling=sampling) for request in first_turn()]
    for request in turn[:-1]:
        engine.submit(request)
    done = []
    for step in range(100):
        if step == 5:
            load_weights(engine, new.items(), version=1)
            if retract:
                engine.retract()
            engine.submit(turn[-1])
        engine.step()
        done += engine.finished()
        if not engine.has_unfinished():
            break
    done = sorted(done, key=lambda c: c.request_id)
    assert done[0].versions == [0] * 5 + [1] * 7
    wanted = next_turn(turn, done)
    found, count = reused(engine, wanted)
    assert count == known(wanted if retract else wanted[-1:])
    require_equal([replace(c, versions=[]) for c in found], [replace(c, versions=[]) for c in generate(other, wanted)])


@pytest.mark.parametrize("num_tokens", [512, 2048])
def test_kept_sequences_give_way_to_rows_oldest_first(build, num_tokens):
    token_bytes = 2 * 2 * 32 * 8  # 2 layers of keys and values of one head of 32, in float64
    engine = build(max_running_sequences=4, kv_cache_bytes=(num_tokens + PAGE_SIZE) * token_bytes)
    turn, done = first_turn(), []
    for request in turn:
        engine.submit(request)
    while engine.has_unfinished():
        engine.step()
        done += engine.finished()
    wanted = next_turn(turn, done)
    is_kept = [engine._kept.find(request.prompt_ids) is not None for request in wanted]
    assert is_kept == sorted(is_kept)  # the ones that finished last
    assert is_kept[-1]
    assert is_kept[0] == (num_tokens == 2048)
    found, count = reused(engine, wanted)
    require_equal(found, generate(build(), wanted))
    assert 0 < count < known(wanted) or num_tokens == 2048
    assert count == known(wanted) or num_tokens == 512


def test_a_larger_group_than_the_halved_limit_runs_after_kept_sequences(build):
    engine, turn = build(max_running_sequences=16), first_turn()
    engine._limit = 2
    generate(engine, turn)
    wanted = [Request(0, [5, 6], SAMPLING, 8, (3,))]
    require_equal(generate(engine, wanted), generate(build(), wanted))


def test_the_longest_prefix_is_found_and_equal_ones_in_order():
    kept, freed = KeptSequences[str](), []
    for name, tokens in (("a", [5]), ("b", [5, 6, 7]), ("c", [5, 6]), ("d", [5, 6, 7]), ("e", [5, 6, 8])):
        kept.add(tokens, name, lambda name=name: freed.append(name))
    assert kept.storages == ["a", "b", "c", "d", "e"]
    assert [kept.take([5, 6, 7, 9]).storage for _ in range(4)] == ["b", "d", "c", "a"]
    assert kept.take([5, 6, 7, 9]) is None
    assert kept.find([5, 6, 8]) is None  # its last token must be computed
    assert (kept.prompt_tokens, kept.reused_tokens) == (20, 9)
    own = kept.find([5, 6, 8, 1])
    assert not kept.drop_oldest(but=own)
    kept.clear()
    assert freed == ["e"]
    assert not kept


def test_the_longest_beginning_of_a_prompt_is_found_among_many():
    generator, found = torch.Generator().manual_seed(0), 0
    kept = KeptSequences[int]()
    lists = [
        torch.randint(0, 3, (int(length),), generator=generator).tolist()
        for length in torch.randint(0, 9, (400,), generator=generator)
    ]
    for number, tokens in enumerate(lists):
        kept.add(tokens, number)
    for number in range(0, 400, 7):  # some leave, in another order than they came
        taken = kept.take([*lists[number], 5])
        lists[taken.storage] = None
    for prompt in torch.randint(0, 3, (300, 8), generator=generator).tolist():
        beginnings = [tokens for tokens in lists if tokens is not None and tokens == prompt[: min(len(tokens), 7)]]
        longest = max(beginnings, key=len, default=None)
        match = kept.find(prompt)
        assert (match and lists[match.storage]) == longest
        assert match is None or match.storage == lists.index(longest)  # the oldest
        found += match is not None and len(match) > 2
    assert found > 100
