"""Decoding in pages on the CPU, without graphs: memory by real lengths, and few reads of the device."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from fixtures.recorded_steps import look_up_pages, record_steps
from fixtures.rollouts import require_equal, serve, tokens_of
from fixtures.simulated_device import META, SimulatedDevice
from hybridflow.errors import RolloutConfigError, RolloutError
from hybridflow.models.forward_of import forward_of
from hybridflow.models.kv_cache import PrefillPlan
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.paged_kv_cache import PAGE_SIZE, PagedKVCache
from hybridflow.rollout import Completion, EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.rollout.decoding_state import DecodingState, Emitted, StepShape, decode_step, row_sizes
from hybridflow.rollout.paged_decoding import READ_EVERY
from hybridflow.rollout.sampling import SamplingKinds
from hybridflow.rollout.step_graphs import DecodingSteps

PAGE_BYTES = PAGE_SIZE * 2 * 2 * 32 * 8  # 2 layers of keys and values of one head of 32, in float64
SCRATCH = 32  # pages for the 1024 rows of an engine


def paged(directory, dtype=torch.float64, **options) -> EmbeddedRollout:
    return EmbeddedRollout(load_causal_lm(directory, dtype), paged=True, **options)


@pytest.fixture
def directory(tiny_model):
    return tiny_model("qwen2", max_position_embeddings=256)


def mixed_requests() -> list[Request]:
    """Return requests of several kinds, with prompts and responses of up to three pages."""
    kinds = [
        (33, SamplingParams(33, stop_token_ids=(1, 5)), 2),
        (1, SamplingParams(70, temperature=0.7, top_k=9), 1),
        (64, SamplingParams(7, temperature=0.0), 1),
        (90, SamplingParams(9, top_p=0.8, stop_token_ids=(3,)), 5),
    ]
    return [
        Request(i, [2 + (5 * i + 3 * j * j) % 38 for j in range(length)], sampling, size, (7, i))
        for i, (length, sampling, size) in enumerate(kinds)
    ]


def test_families_without_a_fused_pass_decode_in_pages_without_graphs(tiny_model):
    directory = tiny_model("mistral", max_position_embeddings=256, sliding_window=None)
    engine, wanted = paged(directory), mixed_requests()
    assert not engine._forward.is_capturable
    expected = generate(EmbeddedRollout(load_causal_lm(directory, torch.float64)), wanted)
    require_equal(generate(engine, wanted), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_in_low_precision_stay_close(directory, dtype):
    engine, wanted = paged(directory, dtype), mixed_requests()[:1]
    for completion in generate(engine, wanted):
        prompt = list(wanted[completion.request_id].prompt_ids)
        (log_probs,) = engine.log_probs([[*prompt, *completion.token_ids]])
        tolerance = 2e-4 if dtype.itemsize == 4 else 0.3
        assert completion.log_probs == pytest.approx(log_probs[len(prompt) - 1 :], abs=tolerance)


# ------------------------------------------------------------------------------------------ pages


class Recorded:
    """The pages in use after each step, the requests that waited again, and the shapes of the steps."""

    def __init__(self, engine: EmbeddedRollout) -> None:
        self.used: list[int] = []
        self.shapes: list[StepShape] = []
        self.num_restarts = 0
        self.engine = engine

    def serve(self, wanted: list[Request]) -> list[Completion]:
        step = self.engine.step

        def recorded():
            before = len(self.engine._waiting)
            step()
            decoding = self.engine._running
            self.num_restarts += max(0, len(self.engine._waiting) - before)
            if decoding is not None:
                self.used.append(decoding._cache.table.count - decoding._cache.table.num_free)
                self.shapes.append(decoding._shape)

        self.engine.step = recorded
        return serve(self.engine, wanted)


def test_memory_follows_the_real_lengths(directory):
    engine = paged(directory)
    recorded = Recorded(engine)
    recorded.serve([Request(0, [5] * 70, SamplingParams(60, temperature=2.0), 3, (0,))])
    # 69 tokens are 2 shared pages and the third page of each row; the 28th new token begins a fourth one.
    pages_by_step = [2 + 3 * (-(-min(69 + 8 * (1 + step // 8), 129) // PAGE_SIZE) - 2) for step in range(59)]
    assert recorded.used == pages_by_step
    assert engine._running is None


def test_memory_is_freed_when_no_sequence_runs(directory):
    engine = paged(directory)
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


def test_request_that_lost_its_pages_restarts_with_equal_tokens(directory):
    wanted = [Request(i, [5 + i] * 40, SamplingParams(80), 4, (0, i)) for i in range(3)]
    expected = generate(paged(directory), wanted)
    recorded = Recorded(paged(directory, kv_cache_bytes=(22 + SCRATCH) * PAGE_BYTES))
    assert tokens_of(recorded.serve(wanted)) == tokens_of(expected)
    assert max(recorded.used) <= 22
    assert recorded.num_restarts > 0


def test_group_that_memory_never_holds_is_an_error(directory, monkeypatch):
    engine = paged(directory, kv_cache_bytes=(12 + SCRATCH) * PAGE_BYTES)
    message = (
        r"request 3: 4 sequences of up to 119 tokens need 1474560 bytes of keys and values, but 1441792 are allowed; "
        r"raise rollout\.kv_cache_bytes=1441792"
    )
    with pytest.raises(RolloutConfigError, match=message):
        generate(engine, [Request(3, [5] * 40, SamplingParams(80), 4)])
    assert not engine.has_unfinished()
    assert len(generate(engine, [Request(3, [5] * 40, SamplingParams(56), 4)])) == 4

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine, wanted = paged(directory, kv_cache_bytes=2**30), [Request(0, [5], SamplingParams(3))]
    with monkeypatch.context() as patch:
        patch.setattr("hybridflow.rollout.paged_decoding.PagedKVCache.__init__", fails)
        message = r"34603008 bytes of keys and values do not fit .* lower rollout\.kv_cache_bytes=1073741824"
        with pytest.raises(RolloutConfigError, match=message):
            generate(engine, wanted)
    assert not engine.has_unfinished()
    assert len(generate(engine, wanted)) == 1


# ------------------------------------------------------------------------------------------ steps


def test_steps_shrink_with_the_number_of_running_rows(directory):
    sizes = [row_sizes(largest) for largest in (1, 3, 8, 64)]
    assert sizes == [[1], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 16, 24, 32, 48, 64]]
    assert row_sizes(50)[-3:] == [32, 48, 50]
    recorded = Recorded(paged(directory))
    recorded.serve([Request(i, [5, 6], SamplingParams(8 * (1 + i)), noise_key=(0, i)) for i in range(9)])
    assert [shape.rows for shape in recorded.shapes[::8]] == [16, 8, 8, 8, 8, 4, 4, 2, 1]


def clones(engine: EmbeddedRollout, factor: float) -> dict[str, torch.Tensor]:
    return {name: factor * weight.detach() for name, weight in engine.model.named_parameters()}


def rest(engine: EmbeddedRollout) -> None:
    engine.sleep()


def change_in_place(engine: EmbeddedRollout) -> None:
    for parameter in engine.model.parameters():
        parameter.data *= 1.25


def change_and_move(engine: EmbeddedRollout) -> None:
    for parameter in engine.model.parameters():
        parameter.data = 1.25 * parameter.data


def offload_and_change(engine: EmbeddedRollout) -> None:
    """Free the storage of the weights, as an idle trainer does, and fill it with others later."""
    weights, storages = clones(engine, 1.25), [x.untyped_storage() for x in engine.model.parameters()]
    sizes = [storage.nbytes() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    engine.sleep()
    assert engine._steps.graphs.num_captured == 0  # their memory is free
    for storage, size in zip(storages, sizes, strict=True):
        storage.resize_(size)
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            parameter.copy_(weights[name])


@pytest.mark.parametrize(
    ("change", "looks_up", "survive"),
    [
        (rest, True, True),
        (change_in_place, True, True),
        (lambda engine: load_weights(engine, clones(engine, 1.25).items(), 1), True, False),
        (change_and_move, True, False),
        (offload_and_change, True, False),
        (change_in_place, False, False),  # the pages of the second generation are elsewhere
    ],
)
def test_graphs_survive_while_their_memory_stays(directory, monkeypatch, change, looks_up, survive):
    wanted = [Request(i, [5 + i] * 40, SamplingParams(9 + 9 * i, top_p=0.9), 2, (i,)) for i in range(2)]
    expected = paged(directory)
    first = generate(expected, wanted)
    if change is not rest:
        change_in_place(expected)
    second = generate(expected, wanted)
    pool = record_steps(monkeypatch)
    if looks_up:
        look_up_pages(monkeypatch)
    engine = paged(directory)
    for _ in range(2):
        require_equal(generate(engine, wanted), first)
    assert (captured := pool.captured) >= 2
    change(engine)
    require_equal(generate(engine, wanted), second)
    assert (pool.captured == captured) == survive


def test_loads_into_an_own_copy_that_is_awake_keep_the_graphs(directory, monkeypatch):
    wanted, expected = [Request(0, [5] * 40, SamplingParams(9), 2, (3,))], paged(directory)
    versions = [clones(expected, 1 + version / 4) for version in range(3)]
    results = []
    for number, version in enumerate((0, 1, 2, 0)):
        load_weights(expected, versions[version].items(), number)
        results.append(generate(expected, wanted))
    pool = record_steps(monkeypatch)
    look_up_pages(monkeypatch)
    engine = EmbeddedRollout(load_causal_lm(directory, torch.float64), paged=True, shares_model=False)
    captured = []
    for number, version in enumerate((0, 1, 2, 0)):  # which also shows that the given weights do not change
        load_weights(engine, versions[version].items(), number)
        for _ in range(2):
            require_equal(generate(engine, wanted), results[number])
        captured.append(pool.captured)
    assert 0 < captured[0] < captured[1] == captured[2] == captured[3]  # the second version is the first own copy


def test_a_window_is_read_while_the_next_one_runs_and_at_limits(directory, monkeypatch):
    events: list[str] = []

    def recording(owner, name, event):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (events.append(event), function(*args))[1])

    recording(DecodingSteps, "run", "s")
    recording(Emitted, "read", "r")
    generate(paged(directory), [Request(0, [5], SamplingParams(3 * READ_EVERY + 3), 4)])
    window = "s" * READ_EVERY
    assert "".join(events) == f"{window}{window}r{window}rsssrr"


def test_host_waits_for_the_windows_alone(directory):
    model, wanted = (
        load_causal_lm(directory, torch.float64),
        [Request(0, [5] * 40, SamplingParams(3 * READ_EVERY + 3), 4)],
    )
    expected = generate(EmbeddedRollout(model, paged=True), wanted)
    with SimulatedDevice() as simulated:
        model.to(META)
        engine = EmbeddedRollout(model)
        simulated.waits.clear()
        require_equal(generate(engine, wanted), expected)
    simulated.waits.pop("aten.index_put_.default")  # of Boolean values, not of a mask
    assert simulated.waits == {"aten._to_copy.default": 2 * 4}  # tokens and log-probs of four windows


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


@pytest.mark.parametrize("aborts_first", [False, True])
def test_non_finite_row_is_an_error_that_names_its_request(directory, aborts_first):
    engine = paged(directory)
    weights = {name: weight.detach().clone() for name, weight in engine.model.named_parameters()}
    weights["model.embed_tokens.weight"][7] = torch.nan  # of the second request's prompt only
    load_weights(engine, weights.items(), version=1)
    for request_id, token in ((4, 5), (5, 7)):
        engine.submit(Request(request_id, [token], SamplingParams(20, temperature=0.0)))
    engine.step()
    if not aborts_first:
        for _ in range(2 * READ_EVERY - 2):
            engine.step()
        with pytest.raises(RolloutError, match="request 5: the model's logits are not finite"):
            engine.step()
    engine.abort(5)
    (aborted,) = engine.finished()
    assert (aborted.request_id, aborted.finish_reason) == (5, "abort")
    assert aborts_first or aborted.token_ids == []
    assert [len(c.token_ids) for c in serve(engine)] == [20]
