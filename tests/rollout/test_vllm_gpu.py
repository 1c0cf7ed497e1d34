"""vLLM on a GPU: CUDA graphs, asynchronous scheduling, seeds, and the memory that a sleeping engine frees."""

import pytest
import torch

from fixtures.families import write_family
from hybridflow.config import LoRAConfig
from hybridflow.errors import RolloutConfigError
from hybridflow.models.loading import load_causal_lm
from hybridflow.rollout import Request, SamplingParams, generate, load_weights

pytestmark = pytest.mark.gpu

KV_CACHE_BYTES = 2**30
GRAPHS = pytest.mark.parametrize("enforce_eager", [True, False])


@pytest.fixture
def build(gpu):
    """Return a builder of engines without weights, and of the weights on the device. In a rehearsal all are eager."""
    pytest.importorskip("vllm")
    from hybridflow.rollout.vllm import VLLMRollout

    engines = []

    def started(path, *, enforce_eager=True, **options):
        is_eager = enforce_eager or gpu.type == "cpu"
        settings = {"dtype": "bfloat16", "enforce_eager": is_eager, "kv_cache_bytes": KV_CACHE_BYTES}
        engines.append(VLLMRollout(path, **(settings | options)))
        return engines[-1], {n: p.to(gpu) for n, p in load_causal_lm(path, torch.bfloat16).named_parameters()}

    yield started
    for engine in engines:
        engine.close()


def requests(sampling, group_size=2):
    return [Request(i, [5 + i, 6, 7], sampling, group_size, (0, i)) for i in range(4)]


@GRAPHS
def test_sleep_frees_gpu_memory_and_wake_restores_generation(tiny_model, build, gpu, enforce_eager):
    engine, weights = build(tiny_model("qwen2"), enforce_eager=enforce_eager, can_sleep=True)
    load_weights(engine, weights.items(), version=0)
    wanted = requests(SamplingParams(8))
    expected = generate(engine, wanted)
    on_gpu = gpu.type == "cuda"
    awake = torch.cuda.mem_get_info()[0] if on_gpu else 0
    engine.sleep()
    if on_gpu:
        assert engine.version is None
        assert torch.cuda.mem_get_info()[0] - awake > 0.9 * KV_CACHE_BYTES
    engine.wake("weights")
    if on_gpu:  # memory of keys and values is allocated after the weight sync
        assert torch.cuda.mem_get_info()[0] - awake > 0.8 * KV_CACHE_BYTES
    load_weights(engine, weights.items(), version=0)
    engine.wake("kv_cache")
    assert generate(engine, wanted) == expected


@GRAPHS
def test_adapters_are_the_same_after_sleep(tiny_model, build, gpu, enforce_eager):
    lora = LoRAConfig(rank=4, targets=("q_proj", "down_proj"))
    engine, _ = build(tiny_model("qwen2"), enforce_eager=enforce_eager, can_sleep=True, adapters=lora)
    found, wanted = [], requests(SamplingParams(8))
    for version in range(2):
        adapters = {n: torch.randn(shape, device=gpu, dtype=torch.bfloat16) for n, shape in engine._shapes.items()}
        load_weights(engine, adapters.items(), version)
        for _ in range(2):
            found.append(generate(engine, wanted))
            engine.sleep()
            engine.wake("weights")
            engine.wake("kv_cache")
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]


@pytest.mark.parametrize(
    "features",
    [
        {"quantization": "fp8"},
        {"speculative": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative": {"model": "", "num_speculative_tokens": 3}},
    ],
)
def test_sampled_log_probs_are_those_of_given_tokens(tiny_model, build, gpu, features):
    path = tiny_model("qwen2")
    if "speculative" in features and gpu.type == "cpu":
        pytest.skip("vLLM's build for CPUs verifies drafts at wrong temperatures")
    if "model" in features.get("speculative", {}):
        features["speculative"]["model"] = str(path)
    engine, weights = build(path, **features)
    load_weights(engine, weights.items(), version=0)
    wanted = requests(SamplingParams(20))
    for done in generate(engine, wanted):
        prompt = wanted[done.request_id].prompt_ids
        (given,) = engine.log_probs([[*prompt, *done.token_ids]])
        torch.testing.assert_close(done.log_probs, given[len(prompt) - 1 :], rtol=0, atol=0.3)


@GRAPHS
def test_engine_that_is_closed_asleep_leaves_its_memory_to_another(tiny_model, build, gpu, enforce_eager):
    found = []
    for _ in range(2):
        free = torch.cuda.mem_get_info()[0] if gpu.type == "cuda" else 0
        engine, weights = build(tiny_model("qwen2"), enforce_eager=enforce_eager, can_sleep=True)
        load_weights(engine, weights.items(), version=0)
        found.append(generate(engine, requests(SamplingParams(8))))
        engine.sleep()
        engine.close()
        if gpu.type == "cuda":
            assert free - torch.cuda.mem_get_info()[0] < 0.5 * KV_CACHE_BYTES
    assert found[0] == found[1]


@GRAPHS
def test_log_probs_of_decoding_equal_those_of_whole_sequences(tiny_model, build, gpu, enforce_eager):
    engine, weights = build(tiny_model("qwen2"), enforce_eager=enforce_eager, max_running_sequences=1024)
    load_weights(engine, weights.items(), version=0)
    wanted = requests(SamplingParams(24), group_size=200)  # more sequences than vLLM's own largest graph
    completions = generate(engine, wanted)
    if gpu.type == "cuda":
        compilation = engine._engine._engine.vllm_config.compilation_config
        assert engine._engine._is_asynchronous
        assert (compilation.cudagraph_mode.name == "NONE") is enforce_eager
        assert (max(compilation.cudagraph_capture_sizes, default=0) == 1024) is not enforce_eager
    chosen = completions[::50]
    whole = engine.log_probs([[*wanted[c.request_id].prompt_ids, *c.token_ids] for c in chosen])
    for completion, log_probs in zip(chosen, whole, strict=True):
        assert completion.log_probs == pytest.approx(log_probs[2:], abs=0.3)
    differences = [
        abs(a - b) for c, row in zip(chosen, whole, strict=True) for a, b in zip(c.log_probs, row[2:], strict=True)
    ]
    assert sum(differences) / len(differences) < 0.05


def test_sequence_with_a_seed_gets_the_same_tokens_alone_and_among_others(tiny_model, build, gpu):
    dtype = {"dtype": "float32"}  # in bfloat16 the size of a batch may change which of two tokens is more likely
    engine, weights = build(tiny_model("qwen2"), **dtype)
    load_weights(engine, weights.items(), version=0)
    wanted = requests(SamplingParams(12), group_size=8)
    together = [c.token_ids for c in generate(engine, wanted)]
    alone = [c.token_ids for request in wanted for c in generate(engine, [request])]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == len(together)


def test_calls_without_seeds_are_repeatable_and_keep_the_random_state(tiny_model, build, gpu):
    engine, weights = build(tiny_model("qwen2"), seed_requests=False)
    load_weights(engine, weights.items(), version=0)
    state = torch.cuda.get_rng_state() if gpu.type == "cuda" else torch.get_rng_state()
    wanted = requests(SamplingParams(12), group_size=8)
    first = generate(engine, wanted)
    assert generate(engine, wanted) == first
    assert len({tuple(c.token_ids) for c in first}) == len(first)
    assert torch.equal(torch.cuda.get_rng_state() if gpu.type == "cuda" else torch.get_rng_state(), state)


@GRAPHS
def test_routes_of_vllm_are_those_that_our_model_would_take(tmp_path, build, gpu, enforce_eager):
    path = write_family(tmp_path, "qwen3_moe", hidden_size=128, head_dim=64, moe_intermediate_size=64)
    if gpu.type == "cpu":
        with pytest.raises(RolloutConfigError, match="on a CPU, where vLLM returns no routes"):
            build(path, records_routes=True)
        return
    from hybridflow.rollout import EmbeddedRollout

    engine, weights = build(path, enforce_eager=enforce_eager, records_routes=True)
    load_weights(engine, weights.items(), version=0)
    ours = EmbeddedRollout(load_causal_lm(path, torch.bfloat16).to(gpu), records_routes=True)
    for theirs in generate(engine, requests(SamplingParams(8))):
        prompt = [*requests(None)[theirs.request_id].prompt_ids, *theirs.token_ids]
        (same,) = generate(ours, [Request(9, prompt, SamplingParams(1))])
        assert (theirs.routes.sort(-1).values == same.routes[:-1].sort(-1).values).float().mean() > 0.9
