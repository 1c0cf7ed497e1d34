"""The vLLM engine beyond the contract: preemption, the state of the process, errors, asynchronous scheduling, seeds."""

import gc
import importlib.metadata
import logging
import re
from pathlib import Path
from weakref import ref

import pytest
import torch

from fixtures.families import write_family
from fixtures.rollouts import PROMPTS, Letters, requests, serve, tokens_of
from hybridflow.config import LoRAConfig
from hybridflow.errors import OutOfMemoryError, RolloutError
from hybridflow.models.loading import load_causal_lm
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate, load_weights

pytestmark = pytest.mark.vllm


def build(path, **options):
    from fixtures.vllm_engines import lend_engine

    return lend_engine(path, **options)


def test_bfloat16_log_probs_are_close_to_the_embedded_engine(tiny_model):
    path = tiny_model("qwen2")
    engines = (build(path, dtype="bfloat16"), EmbeddedRollout(load_causal_lm(path, torch.bfloat16)))
    theirs, ours = (engine.log_probs([[3, 9, 12, 7, 38, 22, 4], [8, 1, 30]]) for engine in engines)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0.3)


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "glm4_moe", "gemma2", pytest.param("phi3 longrope", marks=pytest.mark.exhaustive)]
)
def test_experts_buffers_and_windows_are_those_of_the_embedded_engine(tmp_path, kind):
    from fixtures.vllm_engines import close_engines

    close_engines()  # beside an engine without experts vLLM can start none with them
    write_family(tmp_path, kind, head_dim=32, **({"moe_intermediate_size": 32} if "moe" in kind else {}))
    engines = (build(tmp_path), EmbeddedRollout(load_causal_lm(tmp_path)))
    theirs, ours = (engine.log_probs([[3, 9, 12, 7, 38, 22, 4], [8, 1, 30]]) for engine in engines)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    close_engines()
    if kind == "qwen3_moe":
        with pytest.raises(
            RolloutError, match=r"not supported with a Qwen3MoeForCausalLM on a CPU: .* or set rollout\.m"
        ):
            build(tmp_path, adapters=LoRAConfig(rank=2, targets=("q_proj",)), weights=False)


def test_preempted_sequences_get_equal_tokens(tiny_model):
    path = tiny_model(max_position_embeddings=512)
    wanted = [Request(i, [5 + i] * 100, SamplingParams(300), 1, (0, i)) for i in range(6)]
    roomy, tight = build(path), build(path, kv_cache_bytes=12 * 128 * 2 * 2 * 32 * 4)  # 12 blocks of 128 tokens
    assert tokens_of(generate(tight, wanted)) == tokens_of(generate(roomy, wanted))


# ------------------------------------------------------------------------------------------ errors


def test_options_that_vllm_cannot_serve_are_errors_at_the_start(tiny_model, monkeypatch):
    from hybridflow.rollout.vllm import require_vllm

    small = tiny_model("qwen2", max_position_embeddings=128)
    for path, options, message in (
        (tiny_model(), {"dtype": "float64"}, r"vLLM computes in float32 or bfloat16, model\.dtype is 'float64'"),
        (tiny_model(head_dim=16), {}, "heads have 16 dimensions, but on a CPU vLLM computes heads of 32, 64"),
        (small, {"max_model_len": 4096}, r"rollout\.max_model_len=4096 exceeds the 128 positions"),
        (tiny_model(max_position_embeddings=4096), {"kv_cache_bytes": 2**16}, "vLLM could not be started for .* cache"),
    ):
        with pytest.raises(RolloutError, match=message):
            build(path, **options)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.33.0")
    with pytest.raises(RolloutError, match=r"vllm is 0.33.0, but hybridflow works with 0.32: `pip install 'vllm==0.32"):
        require_vllm()


def test_engine_without_weights_rejects_requests(tiny_model):
    engine = build(tiny_model(), weights=False)
    with pytest.raises(RolloutError, match="no complete set of weights: none were loaded"):
        engine.submit(Request(0, [5], SamplingParams(4)))
    with pytest.raises(RolloutError, match="no complete set of weights"):
        engine.log_probs([[5, 6]])


def test_requests_that_vllm_refuses_leave_the_engine_idle(tiny_model, monkeypatch):
    engine = build(tiny_model())
    plain = generate(engine, requests(SamplingParams(6)))
    for temperature in (0.005, 2.5):
        message = rf"temperature={temperature}, but vLLM samples at 0, or from 0.01 to 2.0"
        with pytest.raises(RolloutError, match=message):
            generate(engine, requests(SamplingParams(4, temperature=temperature)))
    add, count = engine._engine.add, iter(range(100))

    def refusing(name, *arguments, **options):
        if next(count) == 2:
            raise ValueError("not this one")
        add(name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(engine._engine, "add", refusing)
        with pytest.raises(RolloutError, match="vLLM refuses request 0: not this one"):
            generate(engine, [Request(0, PROMPTS[0], SamplingParams(4), 4)])
    assert not engine.has_unfinished()
    # Stop tokens outside the vocabulary are ignored.
    assert generate(engine, requests(SamplingParams(6, stop_token_ids=(-1, 10**9)))) == plain


def test_errors_in_log_probs_leave_the_engine_idle(tiny_model, monkeypatch):
    engine = build(tiny_model())
    expected = engine.log_probs([[1, 2, 3]])
    for sequence, message in (
        ([1, 2, 5000], r"sequence 1 has token ids outside of"),
        ([1] * 64, "has 64 tokens; log_probs needs"),
        ([3], "1 tok"),
    ):
        with pytest.raises(RolloutError, match=message):
            engine.log_probs([[1, 2, 3], sequence])
    inner = engine._engine._engine
    step = inner.step
    with monkeypatch.context() as patch:
        patch.setattr(inner, "step", lambda: (step(), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            engine.log_probs([[1, 2, 3], [4, 5, 6]])
    assert engine.log_probs([[1, 2, 3]]) == expected


@pytest.mark.exhaustive
def test_more_running_sequences_than_tokens_in_a_step(tiny_model):
    assert len(generate(build(tiny_model(), max_running_sequences=5000), requests(SamplingParams(4)))) == 10


@pytest.mark.parametrize(
    ("problem", "error", "message"),
    [
        (RuntimeError("no"), RolloutError, "vLLM failed in a step: no"),
        (torch.OutOfMemoryError("no"), OutOfMemoryError, "out of memory in generation by vLLM: no; .*; set a smaller"),
    ],
)
def test_after_an_error_in_a_step_requests_get_equal_tokens(tiny_model, monkeypatch, problem, error, message):
    engine, wanted = build(tiny_model()), requests(SamplingParams(6))
    expected = generate(engine, wanted)
    for request in wanted:
        engine.submit(request)
    engine.step()
    step = engine._engine.step

    def broken():
        step()
        raise problem

    with monkeypatch.context() as patch:
        patch.setattr(engine._engine, "step", broken)
        with pytest.raises(error, match=message):
            engine.step()
    assert tokens_of(serve(engine)) == tokens_of(expected)


# ------------------------------------------------------------------------------------------ the process


def test_program_of_the_documentation_runs(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs/rollout.md").read_text("utf-8")
    (program,) = re.findall(r"^```python vllm\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/rollout.md", "exec"), {"__name__": "docs_rollout"})
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_process_keeps_its_threads_and_joins_no_training_group(tiny_model):
    from hybridflow.engines.process_group import num_ranks
    from hybridflow.rollout.vllm import VLLMRollout
    from hybridflow.runtime.threads import set_num_threads

    def start():
        engine = VLLMRollout(tiny_model(), enforce_eager=True, kv_cache_bytes=2**26)
        load_weights(engine, load_causal_lm(tiny_model()).named_parameters(), version=0)
        return engine

    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as training with TF32
    try:
        engine = start()
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
    other = start()
    generate(other, requests(SamplingParams(2)))  # the first engine must not break the second
    with pytest.raises(RolloutError, match="built without can_sleep=True"):
        other.sleep()
    other.close()


def tensors_of(engine):
    """Return references to the weights, keys and values of an engine."""
    runner = engine._engine._engine.model_executor.driver_worker.worker.model_runner
    return [ref(tensor) for tensor in (*runner.model.parameters(), *runner.kv_caches)]


def test_closed_engine_frees_its_memory_and_keeps_the_training_group(tiny_model):
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    from fixtures.vllm_engines import close_engines

    close_engines()
    engines = [build(tiny_model()) for _ in range(2)]
    expected = [generate(engine, requests(SamplingParams(2))) for engine in engines]
    tensors = [tensors_of(engine) for engine in engines]
    assert gc.get_freeze_count()
    engines[0].submit(Request(0, [5], SamplingParams(4)))
    engines[0].start_loading(engines[0]._shapes)
    engines[0].close()
    assert ([tensor() for tensor in tensors[0]], gc.get_freeze_count()) == ([None] * len(tensors[0]), 0)
    assert generate(engines[1], requests(SamplingParams(2))) == expected[1]
    for use in (
        lambda e: e.submit(Request(0, [5], SamplingParams(4))),
        lambda e: e.log_probs([[5, 6]]),
        lambda e: e.sleep(),
    ):
        with pytest.raises(RolloutError, match="this vLLM engine was closed; build another VLLMRollout"):
            use(engines[0])
    assert not engines[0].has_unfinished()
    close_engines()
    assert [tensor() for tensor in tensors[1]] == [None] * len(tensors[1])
    assert not model_parallel_is_initialized()
    assert torch.distributed.is_initialized()
    assert generate(build(tiny_model()), requests(SamplingParams(2))) == expected[0]


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
    assert len(generate(engine, requests(SamplingParams(2)))) == 10


# ------------------------------------------------------------------------------------------ asynchronous scheduling

ALIKE = [
    SamplingParams(12, stop_token_ids=tuple(range(0, 40, 7))),
    SamplingParams(12, temperature=0.9, top_k=12, top_p=0.8),
    SamplingParams(12, stop_strings=("abba", "bab")),
]


def test_asynchronous_scheduling_gives_the_same_responses(tiny_model):
    options = {"max_running_sequences": 7, "tokenizer": Letters()}
    engines = [build(tiny_model(), asynchronous=asynchronous, **options) for asynchronous in (False, True)]
    for sampling in ALIKE:
        ours, expected = (generate(engine, requests(sampling, group_size=4)) for engine in engines)
        assert tokens_of(ours) == tokens_of(expected)
        for our, their in zip(ours, expected, strict=True):
            assert our.log_probs == pytest.approx(their.log_probs, abs=1e-4)


def test_no_step_is_in_flight_when_the_engine_is_idle(tiny_model, monkeypatch):
    engine = build(tiny_model(), asynchronous=True, tokenizer=Letters())
    vllm_engine = engine._engine

    def start() -> None:
        for request in requests(SamplingParams(6, stop_token_ids=tuple(range(0, 40, 3))), group_size=4):
            engine.submit(request)
        engine.step()
        assert vllm_engine._in_flight == 1

    start()
    serve(engine)
    assert vllm_engine._in_flight == 0
    start()
    for request_id in {sequence.request.request_id for sequence in engine._sequences.values()}:
        engine.abort(request_id)
    assert vllm_engine._in_flight == 0
    engine.log_probs([[3, 4, 5], [6, 7]])
    assert vllm_engine._in_flight == 0
    start()
    step = vllm_engine._engine.step
    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine._engine, "step", lambda: (step(), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert vllm_engine._in_flight == 0
    serve(engine)
    generate(engine, requests(SamplingParams(2, stop_strings=("a", "b"))))
    assert vllm_engine._in_flight == 0


def test_failed_step_in_flight_is_reported_once(tiny_model, monkeypatch):
    engine, wanted = build(tiny_model(), asynchronous=True), requests(SamplingParams(6))
    expected = generate(engine, wanted)
    for request in wanted:
        engine.submit(request)
    engine.step()
    ((future, *_),) = engine._engine._core.batch_queue
    monkeypatch.setattr(future, "result", lambda: (_ for _ in ()).throw(RuntimeError("device lost")))
    with pytest.raises(RolloutError, match="vLLM failed in a step: device lost"):
        engine.step()
    assert tokens_of(serve(engine)) == tokens_of(expected)


def test_graphs_are_captured_up_to_the_running_sequences():
    from hybridflow.rollout.vllm.arguments import EngineOptions, capture_sizes

    def sizes(max_running_sequences: int, **options) -> list[int] | None:
        return capture_sizes(EngineOptions("", max_running_sequences=max_running_sequences, **options))

    assert sizes(512) is None
    assert sizes(1024, enforce_eager=True) is None
    default, above = sizes(1024)[:-8], sizes(1024)[-8:]
    assert default == [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    assert above == [576, 640, 704, 768, 832, 896, 960, 1024]
    assert sizes(600)[-3:] == [512, 576, 600]
    assert sizes(128, speculative={"num_speculative_tokens": 3}) is None
    assert sizes(600, speculative={"num_speculative_tokens": 3}) == [4 * size for size in sizes(600)]
    assert sizes(200, speculative={"num_speculative_tokens": 3})[-2:] == [4 * 192, 4 * 200]


def test_ranks_that_see_their_own_gpu_only_can_share_an_engine(tiny_model, monkeypatch):
    from hybridflow.rollout.vllm.arguments import EngineOptions, engine_arguments

    build(tiny_model())  # sets the environment of vLLM
    from vllm import EngineArgs, envs
    from vllm.distributed.device_communicators.custom_all_reduce import _can_p2p
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(CpuPlatform, "device_control_env_var", "CUDA_VISIBLE_DEVICES")
    for answer in ("use_custom_allreduce", "is_sleep_mode_available"):  # as on a GPU
        monkeypatch.setattr(CpuPlatform, answer, lambda *_: True)
    with pytest.raises(IndexError):  # what vLLM's own all-reduce asks when it is built
        _can_p2p(0, 2)
    options = EngineOptions(str(tiny_model()), max_model_len=64, tensor_parallel=2, in_group=True, kv_cache_bytes=2**26)
    config = EngineArgs(**engine_arguments(options, on_gpu=True)).create_engine_config()
    assert config.parallel_config.disable_custom_all_reduce
    assert not config.compilation_config.pass_config.fuse_allreduce_rms
    assert (envs.VLLM_ALLREDUCE_USE_SYMM_MEM, envs.VLLM_ALLREDUCE_USE_FLASHINFER) == (False, False)


# ------------------------------------------------------------------------------------------ without seeds


def test_requests_without_seeds_are_reproducible_by_call(tiny_model, caplog):
    with caplog.at_level(logging.WARNING, "hybridflow"):
        engines = {seeded: build(tiny_model(), seed_requests=seeded, max_model_len=60) for seeded in (True, False)}
    (record,) = caplog.records
    assert "without a seed per response (trainer.deterministic=false)" in record.getMessage()
    for seeded, engine in engines.items():
        engine.submit(Request(0, [5, 6], SamplingParams(4), 2))
        seeds = [request.sampling_params.seed for request in engine._engine._core.scheduler.requests.values()]
        assert len(set(seeds)) == 2 if seeded else seeds == [None, None]
        engine.abort(0)
    engine, wanted = engines[False], requests(SamplingParams(8), group_size=3)
    state = torch.get_rng_state()
    first = generate(engine, wanted)
    assert torch.equal(torch.get_rng_state(), state)
    assert generate(engine, wanted) == first
    assert len({tuple(c.token_ids) for c in first}) == 15  # no sample twice
    other = [Request(r.request_id, r.prompt_ids, r.sampling, 3, (7, 1, r.request_id)) for r in wanted]
    assert tokens_of(generate(engine, other)) != tokens_of(first)
    load_weights(engine, load_causal_lm(tiny_model()).named_parameters(), version=1)
    assert tokens_of(generate(engine, wanted)) != tokens_of(first)
