"""The vLLM engine beyond the contract: greedy tokens, ranks that share an engine, preemption, process state, errors."""

import gc
import importlib.metadata
import json
import logging
import math
import re
from pathlib import Path

import pytest
import torch

from hybridflow.errors import OutOfMemoryError, RolloutError
from hybridflow.models import load_causal_lm
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate, load_weights

pytestmark = pytest.mark.vllm

RANK_PROGRAM = Path(__file__).parent / "vllm_rank.py"
PROMPTS = [[5, 9, 12, 7], [8], [3, 30, 22], [11, 4, 6, 17, 25, 39, 10]]


def build(path, *, weights: bool = True, **options):
    """Return a shared engine with weights, or a new one without."""
    from fixtures.vllm_engines import lend_engine
    from hybridflow.rollout.vllm import VLLMRollout

    return lend_engine(path, **options) if weights else VLLMRollout(path, enforce_eager=True, kv_cache_bytes=2**26)


class Letters:
    """A tokenizer of two letters."""

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join("ab"[token % 2] for token in token_ids)


def build_unshared(path):
    engine = build(path, weights=False)
    load_weights(engine, load_causal_lm(path).named_parameters(), version=0)
    return engine


def requests(sampling: SamplingParams, group_size: int = 1) -> list[Request]:
    return [Request(i, prompt, sampling, group_size, (7, 0, i)) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_greedy_tokens_equal_those_of_the_embedded_engine(tiny_model, family, tied):
    path = tiny_model(family, tie_word_embeddings=tied)
    wanted = requests(SamplingParams(40, temperature=0.0, stop_token_ids=(1,)))
    theirs, ours = (generate(engine, wanted) for engine in (build(path), EmbeddedRollout(load_causal_lm(path))))
    for their, our in zip(theirs, ours, strict=True):
        assert their.token_ids == our.token_ids
        assert their.log_probs == pytest.approx(our.log_probs, abs=1e-4)
        assert their.finish_reason == our.finish_reason


def test_bfloat16_log_probs_are_close_to_the_embedded_engine(tiny_model):
    path = tiny_model("qwen2")
    engine = build(path, dtype="bfloat16")
    embedded = EmbeddedRollout(load_causal_lm(path, torch.bfloat16))
    sequences = [[3, 9, 12, 7, 38, 22, 4], [8, 1, 30]]
    for theirs, ours in zip(engine.log_probs(sequences), embedded.log_probs(sequences), strict=True):
        assert theirs == pytest.approx(ours, abs=0.3)


@pytest.mark.parametrize(("tensor", "seed_requests"), [(1, True), (2, True), (2, False)])
@pytest.mark.slow
@pytest.mark.xdist_group("tests/integration/test_vllm_runs.py")  # whose runs use /dev/shm too
def test_ranks_that_share_an_engine_equal_one_rank(tiny_model, run_world, tmp_path, tensor, seed_requests):
    path = tiny_model("qwen2", num_key_value_heads=2)
    run_world(RANK_PROGRAM, 2, path, tensor, tmp_path, int(seed_requests))
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert results[0]["left in shared memory"] == results[1]["left in shared memory"] == []
    engine = build(path, max_model_len=64, seed_requests=seed_requests)
    weights = dict(load_causal_lm(path).named_parameters())
    expected = []
    for version in range(2):
        load_weights(engine, weights.items(), version)
        wanted = [Request(i, [5 + i, 6, 7], SamplingParams(8, temperature=version), 2, (0, i)) for i in range(3)]
        expected += generate(engine, wanted)
    for result in results:
        for (token_ids, log_probs), alone in zip(result["completions"], expected, strict=True):
            assert token_ids == alone.token_ids
            assert log_probs == pytest.approx(alone.log_probs, abs=1e-4)


def test_preempted_sequences_get_equal_tokens(tiny_model):
    path = tiny_model(max_position_embeddings=512)
    wanted = [Request(i, [5 + i] * 100, SamplingParams(300), 1, (0, i)) for i in range(6)]
    roomy, tight = build(path), build(path, kv_cache_bytes=12 * 128 * 2 * 2 * 32 * 4)  # 12 blocks of 128 tokens
    assert [c.token_ids for c in generate(tight, wanted)] == [c.token_ids for c in generate(roomy, wanted)]


def test_too_small_kv_cache_is_an_error_at_the_start(tiny_model):
    with pytest.raises(RolloutError, match=r"vLLM could not be started for .* cache"):
        build(tiny_model(max_position_embeddings=4096), kv_cache_bytes=2**16)


def test_engine_without_weights_rejects_requests(tiny_model):
    engine = build(tiny_model(), weights=False)
    with pytest.raises(RolloutError, match="no complete set of weights: none were loaded"):
        engine.submit(Request(0, [5], SamplingParams(4)))
    with pytest.raises(RolloutError, match="no complete set of weights"):
        engine.log_probs([[5, 6]])


def test_new_weights_do_not_reuse_cached_prompts(tiny_model):
    # If keys and values of the old weights were reused, the log-probs would differ.
    path, other = tiny_model(), tiny_model(seed=1)
    engine, prompt = build(path, max_model_len=64), [5, 9, 12, 7] * 10
    old = Request(0, prompt, SamplingParams(12, temperature=0.0))
    new = Request(1, prompt, SamplingParams(6, temperature=0.0))
    engine.submit(old)
    for _ in range(4):
        engine.step()
    load_weights(engine, load_causal_lm(other).named_parameters(), version=1)
    engine.submit(new)  # the old request, with an equal prompt, still has keys and values
    done = []
    while engine.has_unfinished():
        engine.step()
        done += engine.finished()
    completion = next(c for c in done if c.request_id == 1)
    (expected,) = generate(build(other, max_model_len=64), [new])
    assert completion.token_ids == expected.token_ids
    assert completion.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
    assert next(c for c in done if c.request_id == 0).versions == [0] * 4 + [1] * 8


def test_unsupported_dtype_and_head_size_are_errors(tiny_model):
    with pytest.raises(RolloutError, match=r"vLLM computes in float32 or bfloat16, model\.dtype is 'float64'"):
        build(tiny_model(), dtype="float64")
    with pytest.raises(RolloutError, match="heads have 16 dimensions, but on a CPU vLLM computes heads of 32, 64"):
        build(tiny_model(head_dim=16))


def docs_program() -> str:
    text = (Path(__file__).parents[2] / "docs/rollout.md").read_text("utf-8")
    (program,) = re.findall(r"^```python vllm\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return program


def test_program_of_the_documentation_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(docs_program(), "docs/rollout.md", "exec"), {"__name__": "docs_rollout"})
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_unsupported_temperature_is_an_error_and_the_engine_stays_usable(tiny_model, temperature):
    engine = build(tiny_model("qwen2"))
    with pytest.raises(RolloutError, match=rf"temperature={temperature}, but vLLM samples at 0, or from 0.01 to 2.0"):
        generate(engine, requests(SamplingParams(4, temperature=temperature)))
    assert len(generate(engine, requests(SamplingParams(4)))) == len(PROMPTS)


def test_request_that_vllm_rejects_leaves_the_engine_idle(tiny_model, monkeypatch):
    engine = build(tiny_model("qwen2"))
    add, count = engine._engine.add, iter(range(100))

    def refusing(name, *arguments, **options):
        if next(count) == 2:
            raise ValueError("not this one")
        add(name, *arguments, **options)

    monkeypatch.setattr(engine._engine, "add", refusing)
    with pytest.raises(RolloutError, match="vLLM refuses request 0: not this one"):
        generate(engine, [Request(0, PROMPTS[0], SamplingParams(4), 4)])
    assert not engine.has_unfinished()
    assert len(generate(engine, requests(SamplingParams(4)))) == len(PROMPTS)


def test_stop_tokens_outside_the_vocabulary_are_ignored(tiny_model):
    engine = build(tiny_model("qwen2"))
    plain = generate(engine, requests(SamplingParams(6)))
    assert generate(engine, requests(SamplingParams(6, stop_token_ids=(-1, 10**9)))) == plain


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ([1, 2, 5000], r"sequence 1 has token ids outside of"),
        ([1] * 128, "has 128 tokens; log_probs needs"),
        ([3], "1 tok"),
    ],
)
def test_log_probs_of_invalid_sequences_are_an_error(tiny_model, sequence, message):
    engine = build(tiny_model("qwen2", max_position_embeddings=128))
    expected = engine.log_probs([[1, 2, 3]])
    with pytest.raises(RolloutError, match=message):
        engine.log_probs([[1, 2, 3], sequence])
    assert engine.log_probs([[1, 2, 3]]) == expected


def test_error_in_log_probs_leaves_the_engine_idle(tiny_model, monkeypatch):
    engine = build(tiny_model("qwen2"))
    expected = engine.log_probs([[1, 2, 3]])
    inner = engine._engine._engine
    step = inner.step
    monkeypatch.setattr(inner, "step", lambda: (step(), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        engine.log_probs([[1, 2, 3], [4, 5, 6]])
    monkeypatch.setattr(inner, "step", step)
    assert engine.log_probs([[1, 2, 3]]) == expected


def test_max_model_len_above_the_models_positions_is_an_error(tiny_model):
    with pytest.raises(RolloutError, match=r"rollout\.max_model_len=4096 exceeds the 128 positions"):
        build(tiny_model("qwen2", max_position_embeddings=128), max_model_len=4096)


def test_more_running_sequences_than_tokens_in_a_step(tiny_model):
    engine = build(tiny_model("qwen2"), max_running_sequences=5000)
    assert len(generate(engine, requests(SamplingParams(4)))) == len(PROMPTS)


def test_other_version_of_vllm_is_an_error(monkeypatch):
    from hybridflow.rollout.vllm import require_vllm

    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.33.0")
    with pytest.raises(RolloutError, match=r"vllm is 0.33.0, but hybridflow works with 0.32: `pip install 'vllm==0.32"):
        require_vllm()


@pytest.mark.parametrize(
    ("problem", "error", "message"),
    [
        (RuntimeError("no"), RolloutError, "vLLM failed in a step: no"),
        (torch.OutOfMemoryError("no"), OutOfMemoryError, "out of memory in generation by vLLM: no; .*; set a smaller"),
    ],
)
def test_after_an_error_in_a_step_requests_get_equal_tokens(tiny_model, monkeypatch, problem, error, message):
    engine, wanted = build(tiny_model()), requests(SamplingParams(6), group_size=2)
    expected = {(c.request_id, c.index): c.token_ids for c in generate(engine, wanted)}
    for request in wanted:
        engine.submit(request)
    engine.step()
    step = engine._engine.step

    def broken():
        step()
        raise problem

    monkeypatch.setattr(engine._engine, "step", broken)
    with pytest.raises(error, match=message):
        engine.step()
    monkeypatch.undo()
    done = []
    while engine.has_unfinished():
        engine.step()
        done += engine.finished()
    assert {(c.request_id, c.index): c.token_ids for c in done} == expected


def test_process_keeps_its_threads_and_joins_no_training_group(tiny_model):
    from hybridflow.engines.process_group import num_ranks
    from hybridflow.runtime import set_num_threads

    threads, path = torch.get_num_threads(), tiny_model()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as training with TF32
    try:
        engine = build_unshared(path)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(precision)
    assert torch.get_num_threads() == threads
    assert set_num_threads(2) == 2
    set_num_threads(threads)
    assert num_ranks() == 1
    generate(engine, requests(SamplingParams(2)))
    del engine
    gc.collect()
    generate(build_unshared(path), requests(SamplingParams(2)))  # the first engine must not break the second


def test_busy_engine_cannot_sleep_and_a_cpu_engine_keeps_its_weights(tiny_model):
    engine = build(tiny_model())
    engine.submit(Request(0, [5], SamplingParams(4)))
    with pytest.raises(RolloutError, match="an engine at work cannot sleep"):
        engine.sleep()
    engine.abort(0)
    engine.sleep()
    engine.wake("weights")
    engine.wake("kv_cache")
    assert engine.version == 0
    assert len(generate(engine, requests(SamplingParams(2)))) == 4


# ------------------------------------------------------------------------------------------ asynchronous scheduling


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(12, stop_token_ids=tuple(range(0, 40, 7))),
        SamplingParams(12, temperature=0.9, top_k=12, top_p=0.8),
        SamplingParams(12, stop_strings=("abba", "bab")),
    ],
)
def test_asynchronous_scheduling_gives_the_same_responses(tiny_model, sampling):
    wanted = requests(sampling, group_size=4)
    results = []
    for asynchronous in (False, True):
        engine = build(tiny_model(), asynchronous=asynchronous, max_running_sequences=7, tokenizer=Letters())
        results.append(generate(engine, wanted))
    for ours, expected in zip(*results, strict=True):
        assert (ours.token_ids, ours.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert ours.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


def test_no_step_is_in_flight_when_the_engine_is_idle(tiny_model, monkeypatch):
    engine = build(tiny_model(), asynchronous=True, tokenizer=Letters())
    vllm_engine = engine._engine

    def start() -> None:
        for request in requests(SamplingParams(6, stop_token_ids=tuple(range(0, 40, 3))), group_size=4):
            engine.submit(request)
        engine.step()
        assert vllm_engine._in_flight == 1

    start()
    while engine.has_unfinished():
        engine.step()
    assert vllm_engine._in_flight == 0
    start()
    for request_id in {sequence.request.request_id for sequence in engine._sequences.values()}:
        engine.abort(request_id)
    assert vllm_engine._in_flight == 0
    engine.log_probs([[3, 4, 5], [6, 7]])
    assert vllm_engine._in_flight == 0
    start()
    step = vllm_engine._engine.step
    monkeypatch.setattr(vllm_engine._engine, "step", lambda: (step(), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    assert vllm_engine._in_flight == 0
    while engine.has_unfinished():
        engine.step()
    generate(engine, requests(SamplingParams(2, stop_strings=("a", "b"))))
    assert vllm_engine._in_flight == 0


def test_failed_step_in_flight_is_reported_once(tiny_model, monkeypatch):
    engine, wanted = build(tiny_model(), asynchronous=True), requests(SamplingParams(6), group_size=2)
    expected = generate(engine, wanted)
    for request in wanted:
        engine.submit(request)
    engine.step()
    ((future, *_),) = engine._engine._core.batch_queue
    monkeypatch.setattr(future, "result", lambda: (_ for _ in ()).throw(RuntimeError("device lost")))
    with pytest.raises(RolloutError, match="vLLM failed in a step: device lost"):
        engine.step()
    done = []
    while engine.has_unfinished():
        engine.step()
        done += engine.finished()
    again = sorted(done, key=lambda c: (c.request_id, c.index))
    assert [c.token_ids for c in again] == [c.token_ids for c in expected]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stop_string_in_a_step_before_new_weights_ends_the_response(tiny_model, asynchronous):
    engine = build(tiny_model(), asynchronous=asynchronous, tokenizer=Letters())
    wanted = requests(SamplingParams(12, stop_strings=("abba", "bab")), group_size=4)
    expected = {(c.request_id, c.index): c for c in generate(engine, wanted)}
    weights = list(load_causal_lm(tiny_model()).named_parameters())
    for request in wanted:
        engine.submit(request)
    done = []
    while engine.has_unfinished():
        engine.step()
        load_weights(engine, weights, version=0)  # the same weights
        done += engine.finished()
    assert {(c.request_id, c.index): c.token_ids for c in done} == {n: c.token_ids for n, c in expected.items()}
    assert all(c.finish_reason == expected[c.request_id, c.index].finish_reason for c in done)


def test_graphs_are_captured_up_to_the_running_sequences(tiny_model):
    from hybridflow.rollout.vllm.versions import EngineOptions, capture_sizes

    def sizes(max_running_sequences: int, *, enforce_eager: bool = False) -> list[int] | None:
        options = EngineOptions("", "float32", 64, max_running_sequences, 1, False, 0.5, 0, enforce_eager)
        return capture_sizes(options)

    assert sizes(512) is None
    assert sizes(1024, enforce_eager=True) is None
    default, above = sizes(1024)[:-8], sizes(1024)[-8:]
    assert default == [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    assert above == [576, 640, 704, 768, 832, 896, 960, 1024]
    assert sizes(600)[-3:] == [512, 576, 600]


# ------------------------------------------------------------------------------------------ without seeds


def test_requests_without_seeds_are_reproducible_by_call(tiny_model):
    engine = build(tiny_model(), seed_requests=False)
    wanted = requests(SamplingParams(8), group_size=3)
    first = generate(engine, wanted)
    assert generate(engine, wanted) == first
    assert len({tuple(c.token_ids) for c in first}) == 12  # no sample twice
    other = [Request(r.request_id, r.prompt_ids, r.sampling, 3, (7, 1, r.request_id)) for r in wanted]
    assert [c.token_ids for c in generate(engine, other)] != [c.token_ids for c in first]
    load_weights(engine, load_causal_lm(tiny_model()).named_parameters(), version=1)
    assert [c.token_ids for c in generate(engine, wanted)] != [c.token_ids for c in first]


def test_requests_without_seeds_have_none_in_vllm(tiny_model, caplog):
    from hybridflow.rollout.vllm import VLLMRollout

    seeds = {}
    for seed_requests in (True, False):
        with caplog.at_level(logging.WARNING, "hybridflow"):
            engine = VLLMRollout(tiny_model(), enforce_eager=True, kv_cache_bytes=2**26, seed_requests=seed_requests)
        load_weights(engine, load_causal_lm(tiny_model()).named_parameters(), version=0)
        engine.submit(Request(0, [5, 6], SamplingParams(4), 2))
        scheduled = engine._engine._core.scheduler.requests.values()
        seeds[seed_requests] = [request.sampling_params.seed for request in scheduled]
        assert ("without a seed per response (trainer.deterministic=false)" in caplog.text) is not seed_requests
        assert len(caplog.records) == (0 if seed_requests else 1)
    assert seeds[False] == [None, None]
    assert len(set(seeds[True])) == 2


def test_requests_without_seeds_follow_the_distribution(tiny_model):
    path, prompt, count = tiny_model(), [5, 9, 12], 4000
    engine = build(path, seed_requests=False)
    ids = range(40)
    rows = engine.log_probs([[*prompt, token] for token in ids])
    expected = [math.exp(row[-1]) for row in rows]
    wanted = [Request(i, prompt, SamplingParams(1), 8, (0, i)) for i in range(count // 8)]
    drawn = [c.token_ids[0] for c in generate(engine, wanted)]
    for token, probability in enumerate(expected):
        sigma = (count * probability * (1 - probability)) ** 0.5
        assert abs(drawn.count(token) - count * probability) <= 4.5 * sigma


def test_requests_without_seeds_keep_the_random_state_of_the_process(tiny_model):
    import numpy as np

    torch.manual_seed(3), np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    generate(build(tiny_model(), seed_requests=False), requests(SamplingParams(4)))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
