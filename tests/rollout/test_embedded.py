"""The embedded engine beyond the contract: shared weights, prompts computed once, removal of finished rows."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine
from hybridflow.errors import RolloutError
from hybridflow.models import FusedForward, load_causal_lm
from hybridflow.models.kv_cache import KVCache
from hybridflow.protocol import DataProto
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.rollout.decoding_batch import DecodingBatch, _uniforms
from hybridflow.runtime import uniform

PROMPTS = [[5, 9, 12, 7], [8], [3, 30, 22], [11, 4, 6, 17, 25, 39, 10]]


def requests(sampling: SamplingParams, group_size: int = 2) -> list[Request]:
    return [Request(i, prompt, sampling, group_size, (7, i)) for i, prompt in enumerate(PROMPTS)]


def as_rows(wanted: list[Request], completions) -> DataProto:
    """Return prompts and responses as a batch for the train engine."""
    prompts = [list(request.prompt_ids) for request in wanted for _ in range(request.group_size)]
    prompt_len = max(map(len, prompts))
    response_len = max(len(c.token_ids) for c in completions)
    ids, mask, response_mask = [], [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        left, right = prompt_len - len(prompt), response_len - len(completion.token_ids)
        ids.append([0] * left + prompt + completion.token_ids + [0] * right)
        mask.append([0] * left + [1] * (len(prompt) + len(completion.token_ids)) + [0] * right)
        response_mask.append([True] * len(completion.token_ids) + [False] * right)
    columns = {"input_ids": ids, "attention_mask": mask, "response_mask": response_mask}
    return DataProto.from_dict({name: torch.tensor(column) for name, column in columns.items()})


def train_engine(directory, dtype, **model) -> TorchEngine:
    return TorchEngine(
        str(directory),
        "policy",
        model=ModelConfig(dtype=dtype, **model),
        memory=MemoryConfig(max_tokens_per_micro_batch=64),
        optimizer=OptimizerConfig(lr=0.05),
    )


def raise_log_probs(outputs, part):
    return -outputs["log_probs"].sum() / 100, {}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probs_equal_those_of_the_train_engine(tiny_model, use_float64_throughout, temperature):
    engine = train_engine(tiny_model("qwen2"), "float64")
    use_float64_throughout(engine.model)
    wanted = requests(SamplingParams(9, temperature=temperature, stop_token_ids=(1, 5, 6, 7)))
    for _ in range(2):  # before and after an update
        completions = generate(EmbeddedRollout(engine.model), wanted)
        rows = as_rows(wanted, completions)
        log_probs = engine.forward(rows, temperature=temperature)["log_probs"]
        for row, completion in zip(log_probs, completions, strict=True):
            assert completion.log_probs == pytest.approx(row[: len(completion.log_probs)].tolist(), rel=1e-10)
        engine.update(rows, raise_log_probs, temperature=temperature)


def test_weights_are_shared_with_the_train_engine(tiny_model):
    engine = train_engine(tiny_model(), "float32")
    rollout = EmbeddedRollout(engine.model)
    pointers = [parameter.data_ptr() for parameter in engine.model.parameters()]
    wanted = requests(SamplingParams(6, temperature=0.0))
    before = generate(rollout, wanted)
    engine.update(as_rows(wanted, before), lambda outputs, part: (outputs["log_probs"].sum() / 100, {}))
    load_weights(rollout, engine.weights(), version=engine.num_updates)
    after = generate(rollout, wanted)
    assert [parameter.data_ptr() for parameter in engine.model.parameters()] == pointers
    assert [c.token_ids for c in before] != [c.token_ids for c in after]
    assert {version for c in after for version in c.versions} == {1}
    # Loading leaves the parameters trainable.
    engine.update(as_rows(wanted, after), raise_log_probs)
    assert engine.num_updates == 2


def test_weights_of_another_dtype_are_cast(tiny_model):
    rollout = EmbeddedRollout(load_causal_lm(tiny_model(), torch.bfloat16))
    load_weights(rollout, load_causal_lm(tiny_model(seed=1)).named_parameters(), version=1)
    assert {parameter.dtype for parameter in rollout.model.parameters()} == {torch.bfloat16}
    assert len(generate(rollout, requests(SamplingParams(3)))) == 8


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_bfloat16_log_probs_stay_close_to_the_train_engine(tiny_model, temperature):
    engine = train_engine(tiny_model(), "bfloat16")
    rollout = EmbeddedRollout(engine.model)
    wanted = requests(SamplingParams(9, temperature=temperature))
    for version in range(3):
        load_weights(rollout, engine.weights(), version=version)
        completions = generate(rollout, wanted)
        rows = as_rows(wanted, completions)
        mismatch = engine.forward(rows, temperature=temperature)["log_probs"] - torch.tensor(
            [c.log_probs for c in completions]
        )
        assert float(mismatch.abs().mean()) < 0.03
        engine.update(rows, raise_log_probs, temperature=temperature)


def test_gradient_checkpointing_changes_no_token(tiny_model):
    wanted = requests(SamplingParams(6))
    plain = generate(EmbeddedRollout(train_engine(tiny_model(), "float32").model), wanted)
    checkpointing = train_engine(tiny_model(), "float32", gradient_checkpointing=True)
    assert generate(EmbeddedRollout(checkpointing.model), wanted) == plain


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
    assert prompts[0] == (4 + 1 + 3 + 7,)
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
    assert lengths[:3] == [7, 4, 4]
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]


def test_max_running_sequences_of_zero_is_an_error(tiny_model):
    with pytest.raises(RolloutError, match="max_running_sequences=0 is invalid: it must be at least 1"):
        EmbeddedRollout(load_causal_lm(tiny_model()), max_running_sequences=0)


def test_requests_of_different_length_decode_together(tiny_model):
    model = load_causal_lm(tiny_model())
    engine = EmbeddedRollout(model)
    rows = decoded_rows(engine)
    wanted = [Request(i, [5, 6 + i], SamplingParams(3 + 4 * i), noise_key=(0, i)) for i in range(3)]
    completions = generate(engine, wanted)
    assert [len(c.token_ids) for c in completions] == [3, 7, 11]
    assert rows == [3, 3, 2, 2, 2, 2, 1, 1, 1, 1]
    alone = [generate(EmbeddedRollout(model), [request])[0].token_ids for request in wanted]
    assert [c.token_ids for c in completions] == alone


def test_changed_weights_are_used_in_the_next_step(tiny_model):
    model = load_causal_lm(tiny_model())
    engine, request = EmbeddedRollout(model), Request(0, [5, 6], SamplingParams(6, temperature=0))
    before = generate(engine, [request])[0].token_ids
    assert before[1:] != [0] * 5
    zeroed = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    zeroed["lm_head.weight"].zero_()  # all logits are 0, so that token 0 is the largest
    engine.submit(request)
    engine.step()
    load_weights(engine, zeroed.items(), version=1)
    while engine.has_unfinished():
        engine.step()
    assert engine.finished()[0].token_ids == [before[0], 0, 0, 0, 0, 0]
    with torch.no_grad():
        model.lm_head.weight.copy_(load_causal_lm(tiny_model()).lm_head.weight)  # in place, as a trainer does
    assert generate(engine, [request])[0].token_ids == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_change_no_token_and_exist_while_sequences_run(tiny_model, dtype):
    wanted = requests(SamplingParams(6), group_size=2)
    packed, plain = (
        EmbeddedRollout(load_causal_lm(tiny_model(), dtype), pack_weights=pack_weights)
        for pack_weights in (True, False)
    )
    assert [c.token_ids for c in generate(packed, wanted)] == [c.token_ids for c in generate(plain, wanted)]
    for engine, is_packed in ((packed, True), (plain, False)):
        engine.submit(wanted[0])
        engine.step()
        assert (engine._forward._decoder is not None) == is_packed
        engine.abort(wanted[0].request_id)
        assert engine._forward._decoder is None


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
        (DecodingBatch, name)
        for name in ("admit", "_logits_after", "_next_logits", "_require_finite", "_finish", "remove_finished")
    ),
    *((KVCache, name) for name in ("append", "_grown", "keep")),
    (torch.Tensor, "scatter_"),
    (torch.Tensor, "index_copy_"),
]


@pytest.mark.slow
@pytest.mark.parametrize("place", BREAKABLE, ids=lambda place: f"{place[0].__name__}.{place[1]}")
@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize("then", ["go on", "abort"])
def test_after_an_error_in_a_step_requests_get_equal_tokens(tiny_model, monkeypatch, place, call, then):
    monkeypatch.setattr("hybridflow.rollout.decoding_batch.PREFILL_TOKENS", 4)
    sampling = [SamplingParams(n, temperature=t) for n, t in ((2, 1.0), (5, 0.5), (4, 1.0), (7, 0.5), (3, 1.0))]
    wanted = [Request(i, [3 + i] * (1 + i), sampling[i], 2, (0, i)) for i in range(5)]
    expected = {i: generate(EmbeddedRollout(load_causal_lm(tiny_model())), [wanted[i]]) for i in range(5)}
    engine, done, errors = EmbeddedRollout(load_causal_lm(tiny_model())), [], 0
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
    if then == "abort" and errors:
        engine.abort(3)
        done += engine.finished()
        assert [(c.index, c.finish_reason) for c in done if c.request_id == 3 and c.finish_reason == "abort"]
        done, expected[3] = [c for c in done if c.request_id != 3], []
    while engine.has_unfinished():
        engine.step()
        done += engine.finished()
    assert errors or call
    done.sort(key=lambda c: (c.request_id, c.index))
    assert [c.token_ids for c in done] == [c.token_ids for group in expected.values() for c in group]


def test_regenerated_tokens_carry_the_new_version(tiny_model):
    engine, other = (EmbeddedRollout(load_causal_lm(tiny_model(seed=seed))) for seed in (0, 1))
    request = Request(0, [5, 6], SamplingParams(4))
    expected = generate(other, [request])[0]
    engine.submit(request)
    advance = DecodingBatch.advance
    try:
        DecodingBatch.advance = breaks_at(advance, 0)
        with pytest.raises(Broken):
            engine.step()
    finally:
        DecodingBatch.advance = advance
    load_weights(engine, other.model.named_parameters(), version=7)
    while engine.has_unfinished():
        engine.step()
    (completion,) = engine.finished()
    assert (completion.token_ids, completion.versions) == (expected.token_ids, [7] * 4)


@pytest.mark.parametrize("paged", [False, True])
def test_repeated_sequence_may_outlive_its_request_after_new_weights(tiny_model, paged):
    engine, other = (EmbeddedRollout(load_causal_lm(tiny_model(seed=seed)), paged=paged) for seed in (0, 1))
    sampling = SamplingParams(50, stop_token_ids=tuple(range(0, 40, 8)))
    for key in range(1000):  # the first response ends first with the old weights, and last with the new ones
        request = Request(0, [5, 6], sampling, 2, (key,))
        before, after = ([len(c.token_ids) for c in generate(e, [request])] for e in (engine, other))
        if before[0] + 8 < before[1] and after[1] + 8 < after[0]:
            break
    engine.submit(request)
    while not (done := engine.finished()):
        engine.step()
    assert [c.index for c in done] == [0]
    engine._running.advance = breaks_at(engine._running.advance, 0)
    with pytest.raises(Broken):
        engine.step()
    load_weights(engine, other.model.named_parameters(), version=1)
    engine.submit(Request(1, [7], SamplingParams(60)))
    while engine.has_unfinished():
        engine.step()
    assert sorted((c.request_id, c.index) for c in engine.finished()) == [(0, 1), (1, 0)]


def test_repeated_sequence_that_loses_its_pages_is_not_served_later(tiny_model):
    engine, other = (EmbeddedRollout(load_causal_lm(tiny_model(seed=seed)), paged=True) for seed in (0, 1))
    sampling = SamplingParams(50, stop_token_ids=tuple(range(0, 40, 8)))
    for key in range(1000):
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
    while not engine.finished():
        engine.step()
    table = engine._running._cache.table
    assert engine._running.num_running == 2  # (0, 0) runs again, although its request is complete
    table.take(table.num_free)
    while engine.has_unfinished():
        engine.step()
    engine.finished()
    again = [Request(0, [9], SamplingParams(4), 2, (7,))]
    assert [c.token_ids for c in generate(engine, again)] == [c.token_ids for c in generate(other, again)]


@pytest.mark.parametrize("key", [(1.5,), ("a",), (None,), ()])
def test_invalid_noise_key_is_an_error_on_submission(tiny_model, key):
    engine = EmbeddedRollout(load_causal_lm(tiny_model()))
    with pytest.raises(RolloutError, match="request 1 has noise_key"):
        engine.submit(Request(1, [5], SamplingParams(2), noise_key=key))
    assert not engine.has_unfinished()


def test_failed_generate_leaves_the_engine_idle(tiny_model):
    engine = EmbeddedRollout(load_causal_lm(tiny_model()))
    wanted = requests(SamplingParams(6))
    expected = generate(engine, wanted)
    decode = engine._forward.decode
    engine._forward.decode = breaks_at(decode, 2)
    with pytest.raises(Broken):
        generate(engine, wanted)
    assert not engine.has_unfinished()
    engine._forward.decode = decode
    assert generate(engine, wanted) == expected


def test_tokens_are_equal_after_non_finite_weights_are_replaced(tiny_model):
    model = load_causal_lm(tiny_model())
    engine, request = EmbeddedRollout(model), Request(0, [5, 6], SamplingParams(6))
    expected = generate(engine, [request])[0].token_ids
    good = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    bad = {name: torch.full_like(weight, torch.nan) for name, weight in good.items()}
    engine.submit(request)
    engine.step()
    load_weights(engine, bad.items(), version=1)
    with pytest.raises(RolloutError, match="not finite"):
        engine.step()
    load_weights(engine, good.items(), version=2)
    while engine.has_unfinished():
        engine.step()
    assert engine.finished()[0].token_ids == expected


def test_non_contiguous_weights_give_equal_tokens(tiny_model):
    model = load_causal_lm(tiny_model())
    request = Request(0, [5, 6], SamplingParams(8, temperature=0))
    expected = generate(EmbeddedRollout(model), [request])[0]
    strided = {name: x.detach().T.contiguous().T if x.dim() == 2 else x for name, x in model.named_parameters()}
    engine = EmbeddedRollout(load_causal_lm(tiny_model(seed=1)))
    load_weights(engine, strided.items(), version=0)
    completion = generate(engine, [request])[0]
    assert completion.token_ids == expected.token_ids
    assert completion.log_probs == pytest.approx(expected.log_probs, abs=1e-5)


def test_noise_depends_on_each_requests_key():
    keys = [(3, 0, 1), (3, 0, 2), (7,), (-1, 2**64 - 5), (2, 5)]
    wanted = [Request(i, [5], SamplingParams(4), 1 + i % 3, key) for i, key in enumerate(keys)]
    expected = [uniform(*r.noise_key, np.arange(r.group_size)[:, None], np.arange(6)[None]) for r in wanted]
    assert np.array_equal(_uniforms(wanted, 6), np.concatenate(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_compiled_generation_is_independent_of_batch_and_threads(tiny_model, family, dtype):
    engine = EmbeddedRollout(load_causal_lm(tiny_model(family), dtype))
    wanted = requests(SamplingParams(9, stop_token_ids=(1, 5)), group_size=3)
    together, threads = generate(engine, wanted), torch.get_num_threads()
    alone = [completion for request in wanted for completion in generate(engine, [request])]
    assert alone == together
    narrow = EmbeddedRollout(engine.model, max_running_sequences=4)
    try:
        torch.set_num_threads(1)
        assert generate(narrow, wanted) == together
    finally:
        torch.set_num_threads(threads)


def test_resumed_response_equals_an_uninterrupted_one(tiny_model):
    engine = EmbeddedRollout(load_causal_lm(tiny_model(), torch.float64))
    (whole,) = generate(engine, [Request(0, [5, 9], SamplingParams(9), noise_key=(7, 1))])
    resumed = Request(0, [5, 9, *whole.token_ids[:4]], SamplingParams(5), noise_key=(7, 1), resume_offset=4)
    assert generate(engine, [resumed])[0].token_ids == whole.token_ids[4:]


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
    while rollout.has_unfinished():
        rollout.step()
    assert len(rollout.finished()) == 2


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
    expected = generate(EmbeddedRollout(load_causal_lm(tiny_model(), dtype="float32")), wanted)
    rollout = EmbeddedRollout(load_causal_lm(tiny_model(), dtype="float32"))
    fitting = memory_for(20)
    for warnings in (2, 0):  # 64 -> 32 -> 16, which is kept
        caplog.clear()
        found = generate(rollout, wanted)
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        assert caplog.text.count("generation ran out of memory with") == warnings
    assert max(fitting) == 16


def test_a_larger_group_than_memory_has_held_is_tried(tiny_model, memory_for):
    rollout = EmbeddedRollout(load_causal_lm(tiny_model(), dtype="float32"))
    memory_for(7)
    generate(rollout, [Request(i, [5], SamplingParams(6), 2, (7, i)) for i in range(8)])
    assert len(generate(rollout, [Request(0, [5], SamplingParams(6), 6, (7, 0))])) == 6


def test_a_group_that_memory_does_not_hold_is_an_error(tiny_model, memory_for):
    rollout = EmbeddedRollout(load_causal_lm(tiny_model(), dtype="float32"))
    memory_for(3)
    with pytest.raises(RolloutError, match=r"out of memory in generation: no room for 4 rows.*max_running_sequences"):
        generate(rollout, [Request(i, [5], SamplingParams(6), 4, (7, i)) for i in range(8)])


LIMITED = """
import resource, sys
from hybridflow.models import load_causal_lm
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate

rollout = EmbeddedRollout(load_causal_lm(sys.argv[1], dtype="float32"))
wanted = [Request(i, [5] * 40, SamplingParams(8), 1, (7, i)) for i in range(256)]
few = generate(rollout, wanted[:8])
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]),) * 2)
found = generate(rollout, wanted)
assert [c.token_ids for c in found[:8]] == [c.token_ids for c in few]
print(rollout._limit, len(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the address space")
def test_generation_under_a_real_limit_of_memory_goes_on_with_fewer_sequences(tiny_model):
    model = tiny_model("qwen2", hidden_size=256, intermediate_size=2048, num_hidden_layers=2)
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(model), str(80 * 2**20)], capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr[-3000:]
    limit, found = map(int, run.stdout.split())
    assert found == 256
    assert 8 <= limit < 256
    assert "generation ran out of memory with 256 sequences at a time" in run.stderr
