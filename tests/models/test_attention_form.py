"""Every form of attention, in every plan, equals a dense computation in float64, one query at a time."""

import pytest
import torch

from fixtures.dense_attention import errors, random_layer, results, seen_keys
from hybridflow.models import attention_form
from hybridflow.models.attention import PackedPlan, PaddedPlan
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.continued_prefill import ContinuedPlan
from hybridflow.models.kv_cache import DecodePlan, KVCache, PrefillPlan
from hybridflow.models.shared_prompts import SharedPromptPlan

CPU = torch.device("cpu")
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
FORMS = [
    AttentionForm(0.4, window=3),
    AttentionForm(0.4, softcap=0.7),
    AttentionForm(0.4, sinks=SINKS),
    AttentionForm(0.4, window=5, softcap=0.7, sinks=SINKS),
]


def dense(families, form):
    """Return a function of query, key and value; places in a sequence are those after its trunk."""
    seen = seen_keys(families)

    def attend(query, key, value):
        outputs = []
        for head in range(query.shape[1]):
            of_head = head * key.shape[1] // query.shape[1]
            for place, q in enumerate(query[0, head]):
                keys = seen[place].nonzero().flatten()[-(form.window or len(seen)) :]
                scores = key[0, of_head, keys] @ q * form.scaling
                scores = scores if form.softcap is None else form.softcap * (scores / form.softcap).tanh()
                weights = scores.exp()
                sink = 0.0 if form.sinks is None else form.sinks[head].exp()
                outputs.append((weights / (weights.sum() + sink)) @ value[0, of_head, keys])
        return torch.stack(outputs).unflatten(0, query.shape[1:3]).transpose(0, 1)[None]

    return attend


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block", [2, 512])
def test_outputs_and_gradients_of_packed_and_shared_rows(monkeypatch, form, block):
    monkeypatch.setattr(attention_form, "BLOCK", block)
    for plan, families in (
        (PackedPlan.from_lengths([7, 7, 1, 9]), ((7,), (7,), (1,), (9,))),
        (SharedPromptPlan(((6, 3, 1, 5), (2,))), ((6, 3, 1, 5), (2,))),
        (PaddedPlan(), ((11,),)),
    ):
        layer = random_layer(sum(map(sum, families)), 4, 2, 5, torch.float64, value_dim=3)
        ours = results(lambda *tensors, plan=plan: plan.attend(0, *tensors, form), layer, CPU)
        assert max(errors(ours, results(dense(families, form), layer, CPU))) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_new_tokens_see_what_their_form_allows_of_a_cache(form):
    """Prompts, then two tokens at once, then one: places of the cache that were never written hold NaN."""
    lengths, more = [5, 2, 8], 3
    wholes = [random_layer(length + more, 4, 2, 4, torch.float64, seed=i) for i, length in enumerate(lengths)]
    wholes = [[x.detach() for x in whole] for whole in wholes]
    cache = KVCache(CPU)

    def part(start, stop):
        return [
            torch.cat([x[:, :, at(n, start) : at(n, stop)] for n, x in zip(lengths, tensors, strict=True)], dim=2)
            for tensors in zip(*wholes, strict=True)
        ]

    def at(length, place):
        return 0 if place is None else length + place

    source = torch.arange(3)
    prompts = PrefillPlan(lengths)
    found = [prompts.attend(0, *part(None, 0), form)[0].split(lengths)]
    cache.append(prompts, source, 16)
    for storage in (cache.keys[0], cache.values[0]):
        for row, length in enumerate(lengths):
            storage[row, :, length:] = torch.nan
    cache.extend(0, [length + 2 for length in lengths], 16)
    plan = ContinuedPlan(cache, 0, source, [length + 2 for length in lengths], lengths)
    found.append(plan.attend(0, *part(0, 2), form)[0].split(2))
    tokens = [x[0].transpose(0, 1)[:, :, None] for x in part(2, 3)]
    found.append(DecodePlan(cache, 3).attend(0, *tokens, form))
    for parts, whole in zip(zip(*found, strict=True), wholes, strict=True):
        exact = dense(((whole[0].shape[2],),), form)(*whole)[0]
        torch.testing.assert_close(torch.cat(parts), exact, rtol=0, atol=1e-12)


def test_a_window_as_long_as_the_sequence_is_no_window():
    form = AttentionForm(1.0, window=8)
    assert form.within(8).is_plain
    assert form.within(9).window == 8
