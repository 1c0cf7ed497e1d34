"""The embedded engine beyond the contract: shared weights, prompts computed once, removal of rows, lack of memory."""

import pytest
import torch

from fixtures.rollouts import Broken, breaks_at, requests, serve
from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine
from hybridflow.errors import RolloutConfigError, RolloutError
from hybridflow.models.fused_forward import FusedForward
from hybridflow.models.loading import load_causal_lm
from hybridflow.protocol import DataProto
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.rollout.decoding_batch import DecodingBatch
from hybridflow.workers.generating import rollout_batch


def ids_of(completions) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def as_rows(wanted: list[Request], completions) -> DataProto:
    """Return prompts and responses as a batch for the train engine."""
    prompts = [list(request.prompt_ids) for request in wanted for _ in range(request.group_size)]
    padding = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * left + prompt for left, prompt in zip(padding, prompts, strict=True)])
    mask = torch.arange(ids.shape[1]) >= torch.tensor(padding)[:, None]
    return DataProto.from_dict(rollout_batch(ids, mask, completions, pad_token_id=0))


def raise_log_probs(outputs, part):
    return -outputs["log_probs"].sum() / 100, {}


@pytest.mark.parametrize(
    ("dtype", "temperature"), [("float64", 0.0), ("float64", 0.7), ("float64", 1.0), ("bfloat16", 0.7)]
)
def test_log_probs_equal_those_of_the_train_engine(tiny_model, use_float64_throughout, dtype, temperature):
    engine = TorchEngine(
        str(tiny_model("qwen2")),
        "policy",
        model=ModelConfig(dtype=dtype),
        memory=MemoryConfig(max_tokens_per_micro_batch=64),
        optimizer=OptimizerConfig(lr=0.05),
    )
    if dtype == "float64":
        use_float64_throughout(engine.model)
    rollout = EmbeddedRollout(engine.model)
    pointers = [parameter.data_ptr() for parameter in engine.model.parameters()]
    wanted = requests(SamplingParams(9, temperature=temperature, stop_token_ids=(1, 5, 6, 7)))
    for version in range(2):  # before and after an update
        load_weights(rollout, engine.weights(), version=version)
        completions = generate(rollout, wanted)
        rows = as_rows(wanted, completions)
        log_probs = engine.forward(rows, temperature=temperature)["log_probs"]
        for row, completion in zip(log_probs.double(), completions, strict=True):
            difference = row[: len(completion.log_probs)] - torch.tensor(completion.log_probs, dtype=torch.float64)
            assert float(difference.abs().mean()) < (1e-9 if dtype == "float64" else 0.1)
            assert set(completion.versions) == {version}
        engine.update(rows, raise_log_probs, temperature=temperature)  # loading leaves the parameters trainable
    assert [parameter.data_ptr() for parameter in engine.model.parameters()] == pointers
    assert ids_of(generate(rollout, wanted)) != ids_of(completions) or temperature


def test_weights_of_another_dtype_are_cast(tiny_model):
    rollout = EmbeddedRollout(load_causal_lm(tiny_model(), torch.bfloat16))
    load_weights(rollout, load_causal_lm(tiny_model(seed=1)).named_parameters(), version=1)
    assert {parameter.dtype for parameter in rollout.model.parameters()} == {torch.bfloat16}
    assert len(generate(rollout, requests(SamplingParams(3)))) == 10


def decoded_rows(engine: EmbeddedRollout) -> list[int]:
    """Return a list to which each decoding step appends its number of rows."""
    rows, decode = [], engine._forward.decode

    def recording(tokens, plan):
        rows.append(len(tokens))
        return decode(tokens, plan)

    engine._forward.decode = recording
    return rows


@pytest.mark.parametrize("compiled", [True, False])
def test_prompt_is_computed_once_and_finished_rows_are_removed(tiny_model, compiled):
    engine = EmbeddedRollout(load_causal_lm(tiny_model()), pack_weights=compiled)
    prompts: list[tuple[int, ...]] = []
    engine.model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: prompts.append(tuple(inputs[0].shape)))
    rows = decoded_rows(engine)
    sampling = SamplingParams(12, temperature=2.0, stop_token_ids=tuple(range(0, 40, 4)))
    completions = generate(engine, requests(sampling, group_size=16))
    assert prompts[0] == (4 + 1 + 3 + 7 + 2,)
    assert prompts[1:] == ([] if compiled else [(count,) for count in rows])
    assert rows == sorted(rows, reverse=True)
    lengths = [len(c.token_ids) for c in completions]
    running = [sum(length > step for length in lengths) for step in range(1, len(rows) + 1)]
    assert len(rows) == max(lengths) - 1 > 3
    assert all(alive <= count < max(alive / 0.9, alive + 1) + 1 for alive, count in zip(running, rows, strict=True))


def test_many_prompt_tokens_are_computed_in_several_passes(tiny_model, monkeypatch):
    wanted = requests(SamplingParams(5))
    expected = generate(EmbeddedRollout(load_causal_lm(tiny_model(), torch.float64)), wanted)
    monkeypatch.setattr("hybridflow.rollout.decoding_batch.PREFILL_TOKENS", 5)
    model = load_causal_lm(tiny_model(), torch.float64)
    lengths: list[int] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[-1]))
    completions = generate(EmbeddedRollout(model), wanted)
    assert lengths[:4] == [7, 4, 5, 1]
    assert ids_of(completions) == ids_of(expected)


def test_max_running_sequences_of_zero_is_an_error(tiny_model):
    with pytest.raises(RolloutError, match="max_running_sequences=0 is invalid: it must be at least 1"):
        EmbeddedRollout(load_causal_lm(tiny_model()), max_running_sequences=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_change_no_token_and_exist_while_sequences_run(tiny_model, dtype):
    wanted = requests(SamplingParams(6))
    packed, plain = (
        EmbeddedRollout(load_causal_lm(tiny_model(), dtype), pack_weights=pack_weights)
        for pack_weights in (True, False)
    )
    assert ids_of(generate(packed, wanted)) == ids_of(generate(plain, wanted))
    for engine, is_packed in ((packed, True), (plain, False)):
        engine.submit(wanted[0])
        engine.step()
        assert (engine._forward._decoder is not None) == is_packed
        engine.abort(wanted[0].request_id)
        assert engine._forward._decoder is None


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("paged", [False, True])
def test_repeated_sequence_ends_with_its_request_after_new_weights(tiny_model, paged):
    engine, other = (EmbeddedRollout(load_causal_lm(tiny_model(seed=seed)), paged=paged) for seed in (0, 1))
    sampling = SamplingParams(50, stop_token_ids=tuple(range(0, 40, 8)))
    for key in range(1000):  # the first response ends first with the old weights, and last with the new ones
        request = Request(0, [5, 6], sampling, 2, (key,))
        before, after = ([len(c.token_ids) for c in generate(e, [request])] for e in (engine, other))
        if before[0] + 8 < before[1] and after[1] + 16 < after[0]:
            break
    engine.submit(Request(1, [7], SamplingParams(60)))  # the older one keeps its pages
    engine.submit(request)
    while not (done := engine.finished()):
        engine.step()
    assert [(c.request_id, c.index) for c in done] == [(0, 0)]
    engine._running.advance = breaks_at(engine._running.advance, 0)
    with pytest.raises(Broken):
        engine.step()
    load_weights(engine, other.model.named_parameters(), version=1)
    while not (done := engine.finished()):
        engine.step()
    assert [(c.request_id, c.index) for c in done] == [(0, 1)]
    assert engine._running.num_running == 1  # not (0, 0), which would go on
    engine.submit(Request(2, [7], SamplingParams(60)))
    assert sorted((c.request_id, c.index) for c in serve(engine)) == [(1, 0), (2, 0)]
    again = [Request(0, [9], SamplingParams(4), 2, (7,))]
    assert ids_of(generate(engine, again)) == ids_of(generate(other, again))


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("qwen2", torch.bfloat16)])
def test_compiled_generation_is_independent_of_batch_and_threads(tiny_model, family, dtype):
    engine = EmbeddedRollout(load_causal_lm(tiny_model(family), dtype))
    wanted = requests(SamplingParams(9, stop_token_ids=(1, 5)), group_size=3)
    together, threads = generate(engine, wanted), torch.get_num_threads()
    assert [completion for request in wanted for completion in generate(engine, [request])] == together
    narrow = EmbeddedRollout(engine.model, max_running_sequences=4)
    try:
        torch.set_num_threads(1)
        assert generate(narrow, wanted) == together
    finally:
        torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------ memory

TOKEN_BYTES = 2 * 2 * 1 * 32 * 4
"""Keys and values, 2 layers, 1 head of 32 dimensions, float32."""


def most_running(engine, wanted) -> int:
    """Return the largest number of sequences that ran in a step of the requests' generation."""
    most = 0

    def count(step):
        nonlocal most
        most = max(most, engine._running.num_running if engine._running else 0)

    serve(engine, wanted, count)
    return most


def test_sequences_wait_until_their_keys_and_values_fit(tiny_model):
    model, sampling = load_causal_lm(tiny_model()), SamplingParams(12, stop_token_ids=(0, 1, 2))
    wanted = [Request(i, [5 + i, 9, 12, 7], sampling, 2, (7, i)) for i in range(6)]  # 2 * 16 tokens each
    unlimited, limited, wider, small = (
        EmbeddedRollout(model, kv_cache_bytes=n) for n in (0, 64 * TOKEN_BYTES, 96 * TOKEN_BYTES, 32 * TOKEN_BYTES - 1)
    )
    assert ids_of(generate(limited, wanted)) == ids_of(generate(unlimited, wanted))
    assert 4 < most_running(unlimited, wanted) <= 12
    assert most_running(limited, wanted) <= 4
    greedy = Request(9, [5, 9, 12, 7], SamplingParams(12, temperature=0.0), 1, (7, 9))  # rows of another batch count
    assert most_running(wider, [*wanted[:2], greedy]) == 5
    assert most_running(limited, [*wanted[:2], greedy]) <= 4
    message = rf"request 0: its 2 sequences need {32 * TOKEN_BYTES} bytes .* raise rollout\.kv_cache_bytes=16383 "
    with pytest.raises(RolloutConfigError, match=message):
        generate(small, wanted)
    assert not small.has_unfinished()


@pytest.mark.parametrize(
    ("owner", "method"),
    [(DecodingBatch, "advance"), (EmbeddedRollout, "_new_decoding"), (FusedForward, "pack_weights")],
)
def test_out_of_memory_in_generation_keeps_the_requests(tiny_model, monkeypatch, owner, method):
    def lacks_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    rollout = EmbeddedRollout(load_causal_lm(tiny_model(), torch.float32))
    rollout.submit(Request(0, [5, 6], SamplingParams(4), 2, (0, 0)))
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, lacks_memory)
        message = r"out of memory in generation: CUDA .*; set a smaller rollout\.max_running_sequences"
        with pytest.raises(RolloutError, match=message):
            rollout.step()
    assert len(serve(rollout)) == 2


@pytest.fixture
def memory_for(monkeypatch):
    """Return a function that sets how many rows a decoding step has memory for; it returns a list of those that fit."""

    def limit(most: int) -> list[int]:
        rows_of_steps: list[int] = []
        advance = DecodingBatch.advance

        def limited(batch, version):
            if batch.num_rows > most:
                raise torch.OutOfMemoryError(f"no room for {batch.num_rows} rows")
            rows_of_steps.append(batch.num_rows)
            return advance(batch, version)

        monkeypatch.setattr(DecodingBatch, "advance", limited)
        return rows_of_steps

    return limit


def test_sequences_that_memory_does_not_hold_start_again_in_smaller_parts(tiny_model, memory_for, caplog):
    wanted = [Request(i, [5, 9], SamplingParams(6), 2, (7, i)) for i in range(32)]
    rollout, expected = (EmbeddedRollout(load_causal_lm(tiny_model(), dtype="float32")) for _ in range(2))
    expected = generate(expected, wanted)
    fitting = memory_for(20)
    for warnings in (2, 0):  # 64 -> 32 -> 16, which is kept
        caplog.clear()
        assert ids_of(generate(rollout, wanted)) == ids_of(expected)
        assert caplog.text.count("generation ran out of memory with") == warnings
    assert max(fitting) == 16
    larger = [Request(0, [5], SamplingParams(6), 18, (7, 0))]  # than memory has held: it is tried
    assert len(generate(rollout, larger)) == 18
    with pytest.raises(RolloutError, match=r"out of memory in generation: no room for 24 rows.*max_running_sequences"):
        generate(rollout, [Request(i, [5], SamplingParams(6), 24, (7, i)) for i in range(3)])
