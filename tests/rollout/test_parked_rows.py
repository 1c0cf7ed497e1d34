"""Rows of kept sequences among rows that run: they move, are given up and go on, and results stay the same."""

from dataclasses import replace

import pytest
import torch

from hybridflow.models import load_causal_lm
from hybridflow.models.kv_cache import KeysValues, KVCache
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate
from hybridflow.rollout.parked_rows import ParkedRows, in_places


def test_rows_that_are_in_their_places_stay_there():
    assert in_places([0, 1, 2], 0) == [0, 1, 2]
    assert in_places([0, 3, 5], 0) == [0, 3, 5]
    assert in_places([4, 1, 2], 1) == [1, 2, 4]
    assert in_places([7, 5, 2], 5) == [5, 2, 7]
    assert in_places([], 3) == []


def cache_of(values):
    cache = KVCache(torch.device("cpu"))
    tokens = [torch.full((1, 1, 1), float(value)) for value in values]
    cache.append_known([KeysValues([x], [x]) for x in tokens], [2] * len(values), torch.arange(len(values)), capacity=3)
    return cache


def test_parked_rows_follow_the_front_and_keep_their_tokens():
    cache = cache_of(range(6))
    parked = ParkedRows(cache)
    first, second, third = (parked.add(row, 1) for row in (1, 4, 5))
    third.release()
    parked.move_after([3, 0])
    assert cache.keys[0][:, 0, 0, 0].tolist() == [3, 0, 1, 4]
    assert [each.copy().keys[0].item() for each in (first, second)] == [1, 4]
    assert (len(parked), parked.num_below(3)) == (2, 1)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kv_cache_bytes", [0, 4_000_000])
def test_turns_that_begin_while_others_run_have_the_tokens_of_turns_alone(tiny_model, seed, kv_cache_bytes):
    directory = tiny_model("qwen2", max_position_embeddings=256)

    def build(**options):
        return EmbeddedRollout(load_causal_lm(directory, torch.float64), paged=False, **options)

    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    engine = build(max_running_sequences=7, kv_cache_bytes=kv_cache_bytes)
    waiting = [
        Request(
            number,
            [2 + draw(0, 38) for _ in range(draw(1, 40))],
            SamplingParams(draw(3, 12), stop_token_ids=(1, 9)),
            group_size=draw(1, 3),
            noise_key=(5, number),
            keep=True,
            total_tokens=200 * (number % 2),
        )
        for number in range(20)
    ]
    running, ids, asked, found = {}, iter(range(100, 1000)), [], {}
    while waiting or engine.has_unfinished():
        for _ in range(draw(0, 4)):
            if waiting:
                request = waiting.pop(0)
                running[request.request_id] = request
                asked.append(request)
                engine.submit(request)
        if engine.has_unfinished():
            engine.step()
        for done in engine.finished():
            request = running[done.request_id]
            found[done.request_id, done.index] = done
            if draw(0, 4) and len(request.noise_key) < 5:  # another turn, now or later
                prompt = [*request.prompt_ids, *done.token_ids, *[2 + draw(0, 38) for _ in range(draw(1, 6))]]
                key = (*request.noise_key, done.index)
                later = replace(request, request_id=next(ids), prompt_ids=prompt, noise_key=key, group_size=draw(1, 3))
                waiting.insert(draw(0, len(waiting) + 1), later)
    assert engine.reused_tokens > (100 if kv_cache_bytes else 300)
    alone = build()
    for request in asked:
        for done in generate(alone, [replace(request, keep=False)]):
            assert done.token_ids == found[done.request_id, done.index].token_ids
            assert done.log_probs == pytest.approx(found[done.request_id, done.index].log_probs, abs=1e-10)
    engine.forget_kept()
    assert engine._running is None
