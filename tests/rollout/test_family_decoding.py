"""Families with windows, caps, sinks or states generate what transformers computes, in both ways to decode."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from fixtures.families import write_family
from fixtures.recorded_steps import record_steps
from hybridflow.models.loading import load_causal_lm
from hybridflow.rollout.base import Request, SamplingParams
from hybridflow.rollout.embedded import EmbeddedRollout

PROMPTS = [[5, 9, 33, 36, 7, 2, 8], [8, 2, 2], [30, 21, 22], [3, 11, 4, 4, 19, 20, 21, 22, 39, 6], [7]]
"""More sequences than run at once: a prompt of one token, which is not computed in advance, takes a used row."""


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Return a function from a family to the reference and our model."""
    loaded = {}

    def load(kind):
        if kind not in loaded:
            directory = write_family(tmp_path_factory.mktemp(kind), kind)
            reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
            loaded[kind] = reference.float().eval(), load_causal_lm(directory)
        return loaded[kind]

    return load


def generate(engine, requests, after_step=lambda: None):
    for request in requests:
        engine.submit(request)
    done = []
    while engine.has_unfinished():
        engine.step()
        done += engine.finished()
        after_step()
    return done


def request(number, prompt, **options):
    sampling = SamplingParams(max_new_tokens=5 + 3 * number)  # rows end one after another
    return Request(number, prompt, sampling, noise_key=(number,), **options)


@torch.no_grad()
def require_equal(reference, prompts, done):
    for each in done:
        prompt, tokens = prompts[each.request_id], torch.tensor(each.token_ids)
        sequence = torch.cat([torch.tensor(prompt), tokens])
        wanted = reference(sequence[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = wanted[torch.arange(len(tokens)), tokens]
        torch.testing.assert_close(torch.tensor(each.log_probs), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "qwen3_5_text", "lfm2", "granitemoehybrid"])
@pytest.mark.parametrize("decoding", ["batches", "paged", "graphs"])
def test_groups_generate_what_transformers_computes_also_if_retracted(families, kind, decoding, monkeypatch):
    reference, model = families(kind)
    pool = record_steps(monkeypatch) if decoding == "graphs" else None
    engine = EmbeddedRollout(model, paged=decoding != "batches", max_running_sequences=6)
    requests = [request(i, prompt, group_size=1 + i % 2) for i, prompt in enumerate(PROMPTS)]
    first = generate(engine, requests)
    assert len(first) == 7
    require_equal(reference, PROMPTS, first)
    retracted = generate(engine, requests, after_step=engine.retract)
    require_equal(reference, PROMPTS, retracted)
    assert pool is None or pool.captured > 2


@pytest.mark.parametrize(("kind", "is_kept"), [("gemma2", True), ("gpt_oss", True), ("qwen3_5_text", False)])
@pytest.mark.parametrize("paged", [False, True])
def test_a_later_turn_continues_what_is_kept_but_states_are_computed_anew(families, kind, is_kept, paged):
    reference, model = families(kind)
    engine = EmbeddedRollout(model, paged=paged)
    done = generate(engine, [request(i, prompt, keep=True) for i, prompt in enumerate(PROMPTS)])
    sequences = {each.request_id: [*PROMPTS[each.request_id], *each.token_ids, 7, 8] for each in done}
    later = generate(engine, [request(i, sequence, group_size=2) for i, sequence in sorted(sequences.items())])
    require_equal(reference, sequences, later)
    assert (engine.reused_tokens > 0) is is_kept


@pytest.mark.parametrize(("paged", "num_bytes"), [(False, 40_000), (True, 80_000)])
def test_states_count_as_memory_of_the_cache(families, paged, num_bytes):
    """One sequence is longer, so that pages alone would suffice for more rows."""
    reference, model = families("qwen3_5_text")
    engine = EmbeddedRollout(model, paged=paged, max_running_sequences=40, kv_cache_bytes=num_bytes)
    for i in range(12):
        engine.submit(Request(i, [5, 6, 7], SamplingParams(8 if i else 40), noise_key=(i,)))
    engine.step()
    cache = engine._running._cache if paged else engine._running._batches[0]._cache
    tensors = [*cache.keys, *cache.values, *(x for states in cache.states.values() for x in states.tensors.values())]
    assert sum(x.nbytes for x in tensors) <= num_bytes
    assert 12 > engine._running.num_running == len(cache.states[0].tensors["conv", 0]) > 1
    require_equal(reference, [[5, 6, 7]] * 12, generate(engine, []))
