"""Any operations on the embedded engine, faults in its steps included, give the tokens of sequences computed alone."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fixtures.families import write_family
from fixtures.recorded_steps import look_up_pages, record_steps
from fixtures.rollouts import Broken, breaks_at, require_as_computed, stock_model, weights_of
from hybridflow.models.kv_cache import KVCache
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.paged_kv_cache import PAGE_SIZE, PageTable
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, load_weights
from hybridflow.rollout.decoding_batch import DecodingBatch
from hybridflow.rollout.decoding_state import DecodingState, Emitted
from hybridflow.rollout.paged_decoding import PagedDecoding
from hybridflow.rollout.running_row import RunningRow

TOKEN_BYTES = {"plain": 2 * 2 * 32 * 8, "windows": 2 * 2 * 32 * 8, "states": 2 * 2 * 8 * 8}
"""Keys and values of 2 layers with one head of 32, or of 1 layer with two heads of 8, in float64."""

BREAKABLE = {
    False: [
        (EmbeddedRollout, "_finish"),
        *((DecodingBatch, name) for name in ("admit", "_logits_after", "_next_logits", "_require_finite", "_finish")),
        (DecodingBatch, "remove_finished"),
        *((KVCache, name) for name in ("append", "_grown", "keep")),
        *((torch.Tensor, name) for name in ("scatter_", "index_copy_")),
    ],
    True: [
        (EmbeddedRollout, "_finish"),
        *((PagedDecoding, name) for name in ("admit", "_read", "_remove", "_start", "_prefill", "_reserve")),
        *((PagedDecoding, name) for name in ("_extend_tables", "_end_rows")),
        *((DecodingState, name) for name in ("write", "write_pages", "move", "take")),
        (Emitted, "read"),
        *((PageTable, name) for name in ("take", "release")),
        (RunningRow, "extend"),
    ],
}
"""Functions of a step, without and with pages."""

SAMPLINGS = st.builds(
    SamplingParams,
    st.sampled_from([1, 2, 7, 8, 9, 33, 40]),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 9]),
    top_p=st.sampled_from([1.0, 0.8]),
    stop_token_ids=st.sampled_from([(), (1, 9), tuple(range(0, 40, 7))]),
)
PROMPTS = st.builds(
    lambda length, first: [2 + (first + 3 * i * i) % 38 for i in range(length)],
    st.sampled_from([1, 2, 31, 32, 33, 64, 65, 90]),
    st.integers(0, 37),
)
REQUESTS = st.builds(
    Request,
    st.just(0),
    PROMPTS,
    SAMPLINGS,
    group_size=st.integers(1, 3),
    noise_key=st.tuples(st.integers(-3, 3), st.integers(0, 2**64 - 1)),
    resume_offset=st.sampled_from([0, 4]),
    first_index=st.sampled_from([0, 2]),
    keep=st.booleans(),
    total_tokens=st.sampled_from([0, 200]),
)
SUBMIT = st.tuples(st.just("submit"), REQUESTS, st.integers(0, 200))
STEP = st.tuples(st.just("step"), st.integers(1, 12))
OTHERS = st.one_of(
    st.tuples(st.just("abort"), st.integers(0, 99)),
    st.tuples(st.just("break"), st.integers(0, 99), st.integers(0, 3)),
    st.tuples(st.sampled_from(["load", "retract", "forget_kept", "log_probs", "sleep", "move"])),
)
OPERATIONS = st.lists(st.one_of(SUBMIT, SUBMIT, STEP, STEP, OTHERS), min_size=12, max_size=25)


class Session:
    """An engine, what it was asked for, and what it has answered."""

    def __init__(self, engine: EmbeddedRollout, weights: list[dict[str, torch.Tensor]], paged: bool) -> None:
        self.engine, self.weights, self.paged = engine, weights, paged
        self.asked: dict[int, Request] = {}
        self.left: dict[int, set[int]] = {}
        self.done = []

    def submit(self, request: Request, number: int) -> None:
        """Submit a request; its prompt may go on where the `number`-th response has ended."""
        earlier = [c for c in self.done if len(self.asked[c.request_id].prompt_ids) + len(c.token_ids) < 140]
        if number < len(earlier):
            before = earlier[number]
            prompt = [*self.asked[before.request_id].prompt_ids, *before.token_ids, *request.prompt_ids[:33]]
            request = replace(request, prompt_ids=prompt)
        request = replace(request, request_id=len(self.asked))
        self.engine.submit(request)
        self.asked[request.request_id] = request
        self.left[request.request_id] = set(range(request.group_size))

    def take(self) -> None:
        """Take the finished completions: each was asked for and comes once."""
        finished = self.engine.finished()
        for completion in finished:
            self.left[completion.request_id].remove(completion.index)
        self.done += finished
        open_requests = {request_id for request_id, indices in self.left.items() if indices}
        assert self.engine.has_unfinished() == bool(open_requests)
        running = self.engine._running
        assert (running.num_running if running else 0) <= self.engine.max_running_sequences

    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.take()

    def abort(self, number: int) -> None:
        if open_requests := [request_id for request_id, indices in self.left.items() if indices]:
            request_id = open_requests[number % len(open_requests)]
            self.engine.abort(request_id)
            self.take()
            assert not self.left[request_id]

    def load(self) -> None:
        version = self.engine.version + 1
        weights = self.weights[version % len(self.weights)].items()
        load_weights(self.engine, ((name, weight.clone()) for name, weight in weights), version)
        self.engine.retract()

    def log_probs(self) -> None:
        self.engine.log_probs([[3, 9, 4, 7, 20], [6, 5]])

    def move(self) -> None:
        """Give the weights other memory, and destroy what was there."""
        for parameter in self.engine.model.parameters():
            old, parameter.data = parameter.data, parameter.data.clone()
            old.fill_(torch.nan)

    def break_(self, number: int, call: int) -> None:
        """Step until a function of the step has failed; all that is not finished starts again."""
        owner, name = BREAKABLE[self.paged][number % len(BREAKABLE[self.paged])]
        with mock.patch.object(owner, name, breaks_at(getattr(owner, name), call)):
            try:
                self.step(9)
            except Broken:
                assert len(self.engine._kept) == 0
        self.take()

    def run(self, operations: list[tuple]) -> None:
        for name, *arguments in operations:
            method = getattr(self, "break_" if name == "break" else name, None) or getattr(self.engine, name)
            method(*arguments)
            self.take()
        steps = 0
        while self.engine.has_unfinished():
            self.step(1)
            steps += 1
            assert steps < 3000, "the engine never becomes idle"
        self.engine.forget_kept()
        assert len(self.engine._kept) == 0
        assert self.engine._running is None


SHORT = Request(0, [2], SamplingParams(1, temperature=0.0))
TWO = Request(0, [2 + 3 * i * i % 38 for i in range(32)], SamplingParams(7, 0.7, stop_token_ids=(1, 9)), group_size=2)
TWO_KEPT = replace(TWO, noise_key=(0, 88), keep=True)
OUTLIVED = [("submit", SHORT, 0), ("submit", TWO_KEPT, 0), ("step", 1), ("load",), ("load",), ("break", 0, 0)]
OUTLIVED += [("break", 0, 0), ("submit", SHORT, 0), ("submit", SHORT, 0), ("break", 0, 0), ("load",)]
"""A sequence that ends before its request restarts, and with new weights would end last."""


WINDOW = {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1}
"""A window of no whole number of pages, in the second of two layers."""


@pytest.mark.parametrize("decoding", ["batches", "paged", "graphs"])
@pytest.mark.parametrize(
    ("layers", "num_examples"),
    [
        *(("plain", 12), ("windows", 3), ("states", 3)),
        *(pytest.param(layers, 500, marks=pytest.mark.exhaustive) for layers in TOKEN_BYTES),
    ],
)
def test_any_operations_give_the_tokens_of_sequences_alone(
    tiny_model, tmp_path, use_float64_throughout, decoding, layers, num_examples, monkeypatch
):
    paged = decoding != "batches"
    if decoding == "graphs":
        record_steps(monkeypatch)
        look_up_pages(monkeypatch)
    if layers == "states":  # with norms and rotary angles in float32
        paths = [write_family(tmp_path / f"{n}", "qwen3_5_text", seed=n, max_position_embeddings=256) for n in range(2)]
        use_float64, comparison = (lambda model: model), {"noise": False, "tolerance": 1e-3}
    else:
        sizes = {"max_position_embeddings": 256} | (WINDOW if layers == "windows" else {})
        paths = [tiny_model("qwen2", seed=seed, **sizes) for seed in range(2)]
        use_float64, comparison = use_float64_throughout, {}
    models = [use_float64(stock_model(path)) for path in paths]
    weights = [weights_of(path) for path in paths]

    @settings(max_examples=num_examples, deadline=None, derandomize=True, database=None)
    @given(OPERATIONS, st.sampled_from([3, 8, 1024]), st.booleans())
    @example(OUTLIVED, 3, False)
    def check(operations, max_running_sequences, is_small):
        num_pages = 33 + (32 if max_running_sequences > 8 else 1)
        engine = EmbeddedRollout(
            load_causal_lm(paths[0], torch.float64),
            paged=paged,
            max_running_sequences=max_running_sequences,
            kv_cache_bytes=num_pages * PAGE_SIZE * TOKEN_BYTES[layers] if is_small else 0,
        )
        use_float64(engine.model)
        session = Session(engine, weights, paged)
        session.run(operations)
        for completion in session.done:
            request = session.asked[completion.request_id]
            require_as_computed(lambda version: models[version % 2], request, completion, **comparison)

    check()
