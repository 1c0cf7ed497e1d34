"""Decoding in pages on the CPU, without graphs: equal tokens, memory by real lengths, and few reads of the device."""

import gc
import random
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from hybridflow.errors import RolloutConfigError, RolloutError
from hybridflow.models import forward_of, load_causal_lm
from hybridflow.models.kv_cache import PrefillPlan
from hybridflow.models.paged_kv_cache import PAGE_SIZE, PagedKVCache, PageTable
from hybridflow.rollout import Completion, EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.rollout.decoding_state import DecodingState, StepShape, decode_step
from hybridflow.rollout.paged_decoding import READ_EVERY, PagedDecoding, row_sizes
from hybridflow.rollout.row_sampling import SamplingKinds
from hybridflow.rollout.running_row import RunningRow, first_pages, most_pages, shared_pages

PAGE_BYTES = PAGE_SIZE * 2 * 2 * 32 * 8  # 2 layers of keys and values of one head of 32, in float64
SCRATCH = 32  # pages for the 1024 rows of an engine


def paged(directory, dtype=torch.float64, **options) -> EmbeddedRollout:
    return EmbeddedRollout(load_causal_lm(directory, dtype), paged=True, **options)


def long_model(tiny_model, **options):
    return tiny_model("qwen2", max_position_embeddings=256, **options)


def mixed_requests() -> list[Request]:
    """Return requests of many kinds, with prompts and responses of up to three pages."""
    chance = random.Random(0)
    samplings = [
        SamplingParams(1, stop_token_ids=(1, 5)),
        SamplingParams(1, temperature=0.7, top_k=9),
        SamplingParams(1, temperature=0.0),
        SamplingParams(1, top_p=0.8, stop_token_ids=(3,)),
    ]
    wanted = []
    for i in range(24):
        prompt = [chance.randrange(2, 40) for _ in range(chance.choice([1, 2, 31, 32, 33, 34, 64, 65, 90]))]
        sampling = replace(chance.choice(samplings), max_new_tokens=chance.choice([1, 7, 8, 9, 33, 70]))
        offset = chance.randrange(len(prompt)) if i % 5 == 0 else 0
        wanted.append(Request(i, prompt, sampling, chance.choice([1, 2, 5]), (7, i), offset))
    return wanted


def tokens_of(completions: list[Completion]) -> list[tuple]:
    return [(c.request_id, c.index, c.token_ids, c.finish_reason) for c in completions]


@pytest.mark.parametrize("max_running_sequences", [5, 24, 1024])
def test_tokens_equal_those_of_decoding_in_batches(tiny_model, max_running_sequences):
    wanted, directory = mixed_requests(), long_model(tiny_model)
    expected = generate(EmbeddedRollout(load_causal_lm(directory, torch.float64)), wanted)
    found = generate(paged(directory, max_running_sequences=max_running_sequences), wanted)
    assert tokens_of(found) == tokens_of(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.log_probs == pytest.approx(theirs.log_probs, rel=1e-10, abs=1e-12)


def test_families_without_a_fused_pass_decode_in_pages_without_graphs(tiny_model):
    directory = tiny_model("mistral", max_position_embeddings=256, sliding_window=None)
    engine, wanted = paged(directory), mixed_requests()[:6]
    assert not engine._forward.is_capturable
    expected = generate(EmbeddedRollout(load_causal_lm(directory, torch.float64)), wanted)
    assert tokens_of(generate(engine, wanted)) == tokens_of(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_in_low_precision_stay_close(tiny_model, dtype):
    engine, wanted = paged(long_model(tiny_model), dtype), mixed_requests()[:8]
    for completion in generate(engine, wanted):
        if (sampling := wanted[completion.request_id].sampling).temperature != 1 or sampling.top_p < 1:
            continue
        prompt = list(wanted[completion.request_id].prompt_ids)
        (log_probs,) = engine.log_probs([[*prompt, *completion.token_ids]])
        assert completion.log_probs == pytest.approx(
            log_probs[len(prompt) - 1 :], abs=2e-4 if dtype.itemsize == 4 else 0.3
        )


# ------------------------------------------------------------------------------------------ pages


class Recorded:
    """The pages in use after each step, the requests that waited again, and the shapes of the steps."""

    def __init__(self, engine: EmbeddedRollout) -> None:
        self.used: list[int] = []
        self.shapes: list[StepShape] = []
        self.num_restarts = 0
        self.engine = engine

    def serve(self, wanted: list[Request]) -> list[Completion]:
        done = []
        for request in wanted:
            self.engine.submit(request)
        while self.engine.has_unfinished():
            before = len(self.engine._waiting)
            self.engine.step()
            decoding = self.engine._running
            self.num_restarts += max(0, len(self.engine._waiting) - before)
            if decoding is not None:
                self.used.append(decoding._cache.table.count - decoding._cache.table.num_free)
                self.shapes.append(decoding._shape)
            done += self.engine.finished()
        return sorted(done, key=lambda c: (c.request_id, c.index))


def test_memory_follows_the_real_lengths(tiny_model):
    engine = paged(long_model(tiny_model))
    recorded = Recorded(engine)
    recorded.serve([Request(0, [5] * 70, SamplingParams(60, temperature=2.0), 3, (0,))])
    # 69 tokens are 2 shared pages and the third page of each row; the 28th new token begins a fourth one.
    pages_by_step = [2 + 3 * (-(-min(69 + 8 * (1 + step // 8), 129) // PAGE_SIZE) - 2) for step in range(59)]
    assert recorded.used == pages_by_step
    assert engine._running is None


def test_memory_is_freed_when_no_sequence_runs(tiny_model):
    engine = paged(long_model(tiny_model))
    engine.submit(Request(0, [5], SamplingParams(9), 3))
    engine.step()
    keys = weakref.ref(engine._running._cache.keys[0])
    gc.disable()  # no cycle may keep the memory
    try:
        while engine.has_unfinished():
            assert keys() is not None
            engine.step()
        assert keys() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("num_pages", [22, 30])
def test_request_that_lost_its_pages_restarts_with_equal_tokens(tiny_model, num_pages):
    directory = long_model(tiny_model)
    wanted = [Request(i, [5 + i] * 40, SamplingParams(80), 4, (0, i)) for i in range(4)]
    expected = generate(paged(directory), wanted)
    recorded = Recorded(paged(directory, kv_cache_bytes=(num_pages + SCRATCH) * PAGE_BYTES))
    assert tokens_of(recorded.serve(wanted)) == tokens_of(expected)
    assert max(recorded.used) <= num_pages
    assert recorded.num_restarts > 0


@pytest.mark.parametrize("loads", [{1: 1, 20: 2}, {0: 1, 1: 2}, {30: 1, 31: 2}, dict.fromkeys(range(1, 300, 7), 2)])
def test_every_token_has_the_log_prob_of_its_version_if_pages_run_out(tiny_model, loads):
    models = [load_causal_lm(long_model(tiny_model, seed=seed), torch.float64) for seed in range(3)]
    engine = paged(long_model(tiny_model), kv_cache_bytes=(22 + SCRATCH) * PAGE_BYTES)
    wanted = [Request(i, [5 + i] * 40, SamplingParams(80), 4, (0, i)) for i in range(4)]
    recorded, step = Recorded(engine), engine.step
    steps = 0

    def step_after_loads():
        nonlocal steps
        while steps in loads:  # two versions before the same step, or one
            version = loads[steps]
            load_weights(engine, models[version].named_parameters(), version=version)
            engine.retract()
            steps += 1
        steps += 1
        step()

    engine.step = step_after_loads
    done = recorded.serve(wanted)
    assert [(c.request_id, c.index) for c in done] == [(i, index) for i in range(4) for index in range(4)]
    assert recorded.num_restarts > 0
    assert {version for c in done for version in c.versions} >= {2}
    for c in done:
        assert c.versions == sorted(c.versions)
        for version in set(c.versions):
            prompt = list(wanted[c.request_id].prompt_ids)
            expected = EmbeddedRollout(models[version]).log_probs([[*prompt, *c.token_ids]])[0][len(prompt) - 1 :]
            for found, own, of_token in zip(c.log_probs, expected, c.versions, strict=True):
                assert of_token != version or found == pytest.approx(own, abs=1e-9)


def test_group_that_memory_never_holds_is_an_error(tiny_model):
    engine = paged(long_model(tiny_model), kv_cache_bytes=(12 + SCRATCH) * PAGE_BYTES)
    message = (
        r"request 3: 4 sequences of up to 119 tokens need 1474560 bytes of keys and values, but 1441792 are allowed; "
        r"raise rollout\.kv_cache_bytes=1441792"
    )
    with pytest.raises(RolloutConfigError, match=message):
        generate(engine, [Request(3, [5] * 40, SamplingParams(80), 4)])
    assert not engine.has_unfinished()
    assert len(generate(engine, [Request(3, [5] * 40, SamplingParams(56), 4)])) == 4


def test_lack_of_device_memory_is_an_error_and_leaves_the_engine_idle(tiny_model, monkeypatch):
    engine, wanted = paged(long_model(tiny_model), kv_cache_bytes=2**30), [Request(0, [5], SamplingParams(3))]

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("hybridflow.rollout.paged_decoding.PagedKVCache.__init__", fails)
        message = r"34603008 bytes of keys and values do not fit .* lower rollout\.kv_cache_bytes=1073741824"
        with pytest.raises(RolloutConfigError, match=message):
            generate(engine, wanted)
    assert not engine.has_unfinished()
    assert len(generate(engine, wanted)) == 1


def test_larger_request_gets_a_larger_cache_when_nothing_runs(tiny_model):
    engine, directory = paged(long_model(tiny_model), max_running_sequences=2), long_model(tiny_model)
    small, large = Request(0, [5], SamplingParams(3)), Request(1, [5] * 100, SamplingParams(90), 2)
    engine.submit(small)
    engine.step()
    assert engine._running._cache.table.count == 2
    engine.submit(large)
    done = []
    while engine.has_unfinished():
        engine.step()
        done += engine.finished()
    assert [(c.request_id, len(c.token_ids)) for c in done] == [(0, 3), (1, 90), (1, 90)]
    assert [c.token_ids for c in done[1:]] == [c.token_ids for c in generate(paged(directory), [large])]


@pytest.mark.parametrize(
    ("prompt_len", "new", "shared", "first", "most"),
    [(1, 1, 0, 1, 3), (33, 100, 1, 1, 1 + 3 * 4), (32, 1, 0, 1, 3), (32, 9, 0, 2, 6), (64, 64, 1, 2, 1 + 3 * 3)],
)
def test_pages_of_a_request(prompt_len, new, shared, first, most):
    request = Request(0, [5] * prompt_len, SamplingParams(new), 3)
    assert (shared_pages(request), first_pages(request, 8), most_pages(request)) == (shared, first, most)


# ------------------------------------------------------------------------------------------ steps


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (50, [1, 2, 4, 8, 16, 24, 32, 48, 50]),
        (64, [1, 2, 4, 8, 16, 24, 32, 48, 64]),
    ],
)
def test_numbers_of_rows_of_steps(largest, sizes):
    assert row_sizes(largest) == sizes


def test_steps_shrink_with_the_number_of_running_rows(tiny_model):
    engine = paged(long_model(tiny_model))
    recorded = Recorded(engine)
    wanted = [Request(i, [5, 6], SamplingParams(8 * (1 + i)), noise_key=(0, i)) for i in range(9)]
    expected = [c for r in wanted for c in generate(paged(long_model(tiny_model)), [r])]
    assert tokens_of(recorded.serve(wanted)) == tokens_of(expected)
    assert [shape.rows for shape in recorded.shapes[::8]] == [16, 8, 8, 8, 8, 4, 4, 2, 1]


def test_device_is_read_every_few_steps_and_at_limits(tiny_model, monkeypatch):
    reads: list[int] = []
    read = DecodingState.read

    def recording(self, num_steps, num_rows):
        reads.append(num_steps)
        return read(self, num_steps, num_rows)

    monkeypatch.setattr(DecodingState, "read", recording)
    generate(paged(long_model(tiny_model)), [Request(0, [5], SamplingParams(2 * READ_EVERY + 3), 4)])
    assert reads == [READ_EVERY, READ_EVERY, 3]


def test_rows_emit_nothing_after_their_ends(tiny_model):
    engine = paged(long_model(tiny_model))
    engine.submit(Request(0, [5], SamplingParams(40, stop_token_ids=tuple(range(2, 40, 2))), 8))
    for _ in range(READ_EVERY - 1):
        engine.step()
    emitted = engine._running._state.emitted[:, :8]
    lengths = (emitted >= 0).sum(0)
    assert 1 <= int(lengths.min()) < READ_EVERY - 1
    for row, length in enumerate(lengths.tolist()):
        assert bool((emitted[length:, row] == -1).all())
    assert engine._running._state.rows["lengths"][:8].tolist() == lengths.tolist()


UNFIT = {"_local_scalar_dense", "nonzero", "masked_select", "cumsum", "scatter", "scatter_", "put_", "index_add_"}
"""Operations that read a value on the host, or have no deterministic CUDA kernel."""

SORTING = {"index_copy", "index_copy_", "index_put", "index_put_"}
"""Operations whose deterministic CUDA kernel sorts the indices and launches a dozen kernels."""


class Operations(TorchDispatchMode):
    """Records the names of operations, and those that use a tensor of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.from_host: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.names.add(name)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(x.device.type == "cpu" for x in tensors):
            self.from_host.add(name)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_step_can_be_captured_as_a_deterministic_cuda_graph(monkeypatch):
    """Run a step on the meta device, which has no values to read, and record its operations."""
    meta = torch.device("meta")
    monkeypatch.setattr("hybridflow.models.paged_kv_cache.append_to_pages", lambda *_: None)  # on a GPU one kernel
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    with meta:
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    forward, like = forward_of(model), PrefillPlan([1])
    zero = torch.zeros(1, 1, dtype=torch.int64, device=meta)
    forward(zero, position_ids=zero, attention_plan=like)
    state = DecodingState(meta, 64, READ_EVERY, torch.float32)
    state.widen(stop_ids=3, tables=16)
    cache = PagedKVCache(like, 20, 2)
    with Operations() as operations:
        for kinds in (SamplingKinds(), SamplingKinds(greedy=True, restricted=True)):
            decode_step(forward, cache, state, StepShape(16, 8, kinds))
    assert operations.names & (UNFIT | SORTING) == set()
    assert operations.from_host == set()
    buffers = [*state.rows.values(), state.step, state.emitted, state.log_probs, *cache.keys, *cache.values]
    assert forward.is_capturable
    assert {x.device for x in buffers} == {meta}
    with Operations() as unfit, pytest.raises(RuntimeError):
        int(zero.double().cumsum(1))
    assert unfit.names & UNFIT == {"cumsum", "_local_scalar_dense"}


def test_stop_ids_of_a_later_request_widen_the_buffers(tiny_model):
    engine = paged(long_model(tiny_model))
    first = Request(0, [5], SamplingParams(30, stop_token_ids=(1,)), 2)
    later = Request(1, [6], SamplingParams(30, stop_token_ids=tuple(range(4, 40, 5))), 4, (3,))
    engine.submit(first)
    for _ in range(3):
        engine.step()
    engine.submit(later)
    done = []
    while engine.has_unfinished():
        engine.step()
        done += engine.finished()
    alone = [c for request in (first, later) for c in generate(paged(long_model(tiny_model)), [request])]
    assert sorted(tokens_of(done)) == sorted(tokens_of(alone))


# ------------------------------------------------------------------------------------------ errors


class Broken(RuntimeError):
    pass


def breaks_at(function, call):
    """Return `function`, which raises at its `call`-th call (from 0)."""
    calls = iter(range(call))

    def broken(*args, **kwargs):
        if next(calls, None) is None:
            raise Broken
        return function(*args, **kwargs)

    return broken


BREAKABLE = [
    *((EmbeddedRollout, name) for name in ("_admit", "_finish")),
    *(
        (PagedDecoding, name)
        for name in ("admit", "_read", "_remove", "_start", "_prefill", "_reserve", "_extend_tables")
    ),
    *((DecodingState, name) for name in ("write", "write_pages", "move", "read")),
    *((PageTable, name) for name in ("take", "release")),
    (RunningRow, "extend"),
]


@pytest.mark.slow
@pytest.mark.parametrize("place", BREAKABLE, ids=lambda place: f"{place[0].__name__}.{place[1]}")
@pytest.mark.parametrize("call", [0, 2])
@pytest.mark.parametrize("then", ["go on", "abort"])
def test_after_an_error_in_a_paged_step_requests_get_equal_tokens(tiny_model, monkeypatch, place, call, then):
    sampling = [SamplingParams(n, temperature=t) for n, t in ((2, 1.0), (25, 0.5), (40, 1.0), (70, 0.5), (3, 1.0))]
    wanted = [Request(i, [3 + i] * (1 + 12 * i), sampling[i], 2, (0, i)) for i in range(5)]
    directory = long_model(tiny_model)
    expected = {i: generate(paged(directory), [wanted[i]]) for i in range(5)}
    engine, done, errors = paged(directory), [], 0
    for request in wanted[:3]:
        engine.submit(request)
    engine.step()
    done += engine.finished()
    owner, name = place
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, breaks_at(getattr(owner, name), call))
        for request in wanted[3:]:
            engine.submit(request)
        while engine.has_unfinished() and not errors:
            try:
                engine.step()
            except Broken:
                errors += 1
            done += engine.finished()
    assert errors or call
    if then == "abort" and errors:
        engine.abort(3)
        done = [c for c in done + engine.finished() if c.request_id != 3]
        expected[3] = []
    while engine.has_unfinished():
        engine.step()
        done += engine.finished()
    done.sort(key=lambda c: (c.request_id, c.index))
    assert tokens_of(done) == tokens_of([c for group in expected.values() for c in group])


def test_non_finite_row_is_an_error_that_names_its_request(tiny_model):
    engine = paged(long_model(tiny_model))
    weights = {name: weight.detach().clone() for name, weight in engine.model.named_parameters()}
    weights["model.embed_tokens.weight"][7] = torch.nan  # of the second request's prompt only
    load_weights(engine, weights.items(), version=1)
    wanted = [Request(i, [token], SamplingParams(40, temperature=0.0)) for i, token in ((4, 5), (5, 7))]
    for request in wanted:
        engine.submit(request)
    for _ in range(READ_EVERY - 1):
        engine.step()
    with pytest.raises(RolloutError, match="request 5: the model's logits are not finite"):
        engine.step()
    engine.abort(5)
    assert engine.finished() == [Completion(5, 0, finish_reason="abort")]


def test_abort_of_a_non_finite_request_leaves_the_others_running(tiny_model):
    engine = paged(long_model(tiny_model))
    weights = {name: weight.detach().clone() for name, weight in engine.model.named_parameters()}
    weights["model.embed_tokens.weight"][7] = torch.nan
    load_weights(engine, weights.items(), version=1)
    for request_id, token in ((4, 5), (5, 7)):
        engine.submit(Request(request_id, [token], SamplingParams(20, temperature=0.0)))
    engine.step()
    engine.abort(5)
    assert [c.request_id for c in engine.finished()] == [5]
    while engine.has_unfinished():
        engine.step()
    assert [len(c.token_ids) for c in engine.finished()] == [20]


def test_paged_tokens_do_not_depend_on_the_read_interval(tiny_model):
    model, wanted = load_causal_lm(long_model(tiny_model), torch.float64), mixed_requests()[:6]
    engine = EmbeddedRollout(model, paged=True)
    expected = generate(engine, wanted)
    for read_every in (1, 3, 50):
        engine._new_decoding = lambda n=read_every: PagedDecoding(
            engine._forward,
            model,
            max_running_sequences=1024,
            stop_strings=engine._stop_strings,
            kept=engine._kept,
            read_every=n,
        )
        found = generate(engine, wanted)
        assert tokens_of(found) == tokens_of(expected)
        assert np.allclose(*([x for c in done for x in c.log_probs] for done in (found, expected)), rtol=1e-10)
