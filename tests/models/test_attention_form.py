"""Every form of attention, in every plan, equals a dense computation in float64, one query at a time."""

from dataclasses import replace

import pytest
import torch

from fixtures.dense_attention import errors, random_layer, results, seen_keys
from hybridflow.models import attention_form
from hybridflow.models.attention import PackedPlan, PaddedPlan
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.continued_prefill import ContinuedPlan
from hybridflow.models.kv_cache import DecodePlan, KVCache, PrefillPlan
from hybridflow.models.paged_kv_cache import PAGE_SIZE, PagedDecodePlan, PagedKVCache
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
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_new_tokens_see_what_their_form_allows_of_a_cache(form, dtype):
    """Prompts, then single tokens and several at once, in rows that grow, are copied and move.

    Places of the cache that were never written hold NaN. A window has no more places than tokens.
    """
    lengths, source = [5, 2, 8, 2], torch.arange(4)
    wholes = [random_layer(length + 20, 4, 2, 16, dtype, seed=i) for i, length in enumerate(lengths)]
    wholes = [[x.detach() for x in whole] for whole in wholes]
    form = form if form.sinks is None else replace(form, sinks=form.sinks.to(dtype))
    cache, found, done = KVCache(CPU), [[] for _ in lengths], [0] * 4

    def tokens(count, rows):
        """Return the next tokens of these rows, (rows, heads, count, dim) each."""
        ends = [done[i] + count for i in rows]
        parts = [[x[0, :, end - count : end] for x in wholes[i]] for i, end in zip(rows, ends, strict=True)]
        return [torch.stack(part) for part in zip(*parts, strict=True)]

    def note(outputs, rows):
        for i, out in zip(rows, outputs, strict=True):
            found[i].append(out)
            done[i] += len(out)

    def decode(rows):
        note(DecodePlan(cache, len(rows)).attend(0, *tokens(1, rows), form), rows)
        cache.lengths += 1

    def go_on(count, rows, first=0):
        starts = [done[i] for i in rows]
        plan = ContinuedPlan(cache, first, source[: len(rows)], [start + count for start in starts], starts)
        packed = [x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in tokens(count, rows)]
        note(plan.attend(0, *packed, form)[0].split(count), rows)

    def forget_unwritten():
        for storage in (*cache.keys, *cache.values):
            for row, length in enumerate(cache.lengths):
                storage[row, :, length:] = torch.nan

    prompts = PrefillPlan(lengths)
    packed = [
        torch.cat([x[:, :, :n] for x, n in zip(part, lengths, strict=True)], 2) for part in zip(*wholes, strict=True)
    ]
    note(prompts.attend(0, *packed, form)[0].split(lengths), range(4))
    cache.append(prompts, source, 9)
    forget_unwritten()
    decode(range(4))
    cache.extend(0, [n + 3 for n in done], 16)
    go_on(3, range(4))
    forget_unwritten()
    decode(range(4))
    for count in (1, 7):
        known, lengths = [cache.row(i, done[i]) for i in range(4)], [n + count for n in done]
        cache = KVCache(CPU)
        cache.append_known(known, lengths, source, 30)
        go_on(count, range(4))
        decode(range(4))
    cache.keep([3, 1])
    decode([3, 1])
    cache.extend(0, [done[3] + 2, done[1] + 2], 30)
    go_on(2, [3, 1])
    for _ in range(2):
        decode([3, 1])
    assert {x.shape[2] for x in (*cache.keys, *cache.values)} == {form.window or 30}
    for parts, whole in zip(found, wholes, strict=True):
        exact = dense(((whole[0].shape[2],),), form)(*(x.double() for x in whole))[0]
        out = torch.cat(parts)
        torch.testing.assert_close(out.double(), exact[: len(out)], rtol=0, atol=1e-12 if dtype.itemsize > 4 else 1e-5)


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 34, 65])
def test_a_step_in_pages_reads_those_of_its_window(window):
    """Pages of which the window sees nothing, and places that were never written, hold NaN."""
    form, lengths, width = AttentionForm(0.4, window, sinks=SINKS), [1, 31, 32, 33, 64, 65, 97, 98, 150, 256], 8
    like, generator = PrefillPlan([1]), torch.Generator().manual_seed(0)
    like.attend(0, *random_layer(1, 4, 2, 16, torch.float64), form)
    cache = PagedKVCache(like, width * len(lengths), len(lengths))
    tables = len(lengths) + torch.randperm(width * len(lengths), generator=generator).view(-1, width)
    wholes = [[x.detach() for x in random_layer(n, 4, 2, 16, torch.float64, seed=n)] for n in lengths]
    for row, n in enumerate(lengths):
        for pages, x in ((cache.keys[0], wholes[row][1]), (cache.values[0], wholes[row][2])):
            places = torch.arange((n - 1 - min(n - 1, window - 1)) // PAGE_SIZE * PAGE_SIZE, n - 1)
            pages[tables[row]] = torch.nan
            pages[tables[row][places // PAGE_SIZE], places % PAGE_SIZE] = x[0].transpose(0, 1)[places]
    running = torch.ones(len(lengths), dtype=torch.bool)
    plan = PagedDecodePlan(cache, tables.to(torch.int32), torch.tensor(lengths) - 1, running)
    last = [torch.cat([x[:, :, -1:] for x in part]) for part in zip(*wholes, strict=True)]
    for out, n, whole in zip(plan.attend(0, *last, form), lengths, wholes, strict=True):
        torch.testing.assert_close(out, dense(((n,),), form)(*whole)[0, -1:], rtol=0, atol=1e-12)


def test_a_window_as_long_as_the_sequence_is_no_window():
    form = AttentionForm(1.0, window=8)
    assert form.within(8).is_plain
    assert form.within(9).window == 8
