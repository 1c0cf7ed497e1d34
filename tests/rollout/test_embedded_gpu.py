"""The embedded engine on a CUDA device: graphs equal eager steps, tokens equal the CPU's, memory follows lengths."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from fixtures.families import write_family
from fixtures.rollouts import serve
from hybridflow.errors import RolloutConfigError
from hybridflow.models.attention import PackedPlan
from hybridflow.models.fused_forward import FusedForward
from hybridflow.models.loading import load_causal_lm
from hybridflow.rollout import Completion, EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.rollout.sampling import uniform_after
from hybridflow.runtime.random_streams import uniform, uniform_state
from hybridflow.runtime.threads import set_deterministic

pytestmark = pytest.mark.gpu

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, before the first product on the device

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
}
SAMPLINGS = [
    SamplingParams(40, stop_token_ids=tuple(range(0, 1000, 60))),
    SamplingParams(70, temperature=0.7),
    SamplingParams(33, temperature=0.0),
    SamplingParams(50, temperature=1.2, top_k=50, top_p=0.9),
]


def requests() -> list[Request]:
    return [
        Request(i, [(7 * i + n) % 1000 for n in range(length)], SAMPLINGS[i % 4], 4, (3, i))
        for i, length in enumerate([1, 20, 33, 64, 100, 300, 5, 90])
    ]


def build(directory, device, dtype=torch.float32, **options) -> EmbeddedRollout:
    return EmbeddedRollout(load_causal_lm(directory, dtype).to(device), paged=True, **options)


@pytest.fixture
def full_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_noise_has_the_bits_of_the_host(gpu):
    keys = [(0,), (-1, 2**64 - 1), *((step, step * 977, 3) for step in range(500))]
    states = np.array([uniform_state(*key, 5) for key in keys]).view(np.int64)
    found = uniform_after(torch.from_numpy(states).to(gpu)[:, None], torch.arange(100, device=gpu))
    assert found.cpu().numpy().tobytes() == np.stack([uniform(*key, 5, np.arange(100)) for key in keys]).tobytes()


@torch.no_grad()
def three_generations(engine: EmbeddedRollout) -> tuple[list[list[Completion]], list[set[int]]]:
    """Return what an engine generates before and after a change of its weights in place, and its graphs after each."""
    results, graphs = [], []
    for factor in (1.0, 1.0, 1.25):
        for parameter in engine.model.parameters():
            parameter.mul_(factor)
        results.append(serve(engine, requests()[:4]))
        graphs.append({id(graph) for graph in engine._steps.graphs._graphs.values() if graph is not None})
    return results, graphs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_the_results_of_steps_without_graphs(tiny_model, gpu, dtype, monkeypatch):
    directory = tiny_model("qwen2", **SIZES)
    with_graphs, graphs = three_generations(build(directory, gpu, dtype))
    assert graphs[0] <= graphs[1] <= graphs[2]  # they survive
    assert bool(graphs[0]) == (gpu.type == "cuda")
    monkeypatch.setattr(FusedForward, "is_capturable", False)
    assert three_generations(build(directory, gpu, dtype)) == (with_graphs, [set(), set(), set()])


@torch.no_grad()
def cumulative_probabilities(model, ids: list[int]) -> np.ndarray:
    """Return the cumulative distribution of the token after `ids`, by the model's own code."""
    tokens, positions = torch.tensor([ids]), torch.arange(len(ids))[None]
    logits = model(tokens, position_ids=positions, attention_plan=PackedPlan.from_lengths([len(ids)])).logits
    return logits[0, -1].softmax(-1).cumsum(-1).numpy()


def test_tokens_equal_the_cpus_except_at_boundaries(tiny_model, gpu, full_precision):
    """Allow another token only where the draw is within rounding of the boundary between the two."""
    directory = tiny_model("qwen2", **SIZES)
    wanted = [Request(i, [5 + i, 9, 12], SamplingParams(60), 8, (7, i)) for i in range(8)]
    found = generate(build(directory, gpu), wanted)
    expected = generate(EmbeddedRollout(load_causal_lm(directory), paged=False), wanted)
    exact, num_different = load_causal_lm(directory, torch.float64), 0
    for ours, theirs in zip(found, expected, strict=True):
        pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=True))
        place = next((i for i, (a, b) in pairs if a != b), 0)
        request = wanted[ours.request_id]
        cumulative = cumulative_probabilities(exact, [*request.prompt_ids, *theirs.token_ids[:place]])
        number = float(uniform(*request.noise_key, ours.index, place))
        if ours.token_ids == theirs.token_ids:
            assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-3)
            assert ours.token_ids[0] == np.searchsorted(cumulative, number, side="right")
        else:
            num_different += 1
            assert np.abs(cumulative - number).min() < 1e-5
    assert num_different <= 3  # of 64 responses of 60 tokens


def test_later_turns_reuse_kept_pages(tiny_model, gpu, full_precision):
    engine = build(tiny_model("qwen2", **SIZES), gpu)
    turn = [replace(r, sampling=SamplingParams(40, temperature=0.0), group_size=1, keep=True) for r in requests()]
    for number in range(3):
        before = engine.reused_tokens
        done = serve(engine, turn)
        sequences = [[*r.prompt_ids, *c.token_ids] for r, c in zip(turn, done, strict=True)]
        for request, completion, log_probs in zip(turn, done, engine.log_probs(sequences), strict=True):
            assert completion.log_probs == pytest.approx(log_probs[len(request.prompt_ids) - 1 :], abs=1e-3)
        num_known = sum(len(request.prompt_ids) - 21 for request in turn) if number else 0
        assert engine.reused_tokens - before == num_known
        assert engine._running is not None
        assert bool(engine._steps.graphs.num_captured) == (gpu.type == "cuda")  # although no request was left
        turn = [replace(r, prompt_ids=[*tokens, *range(20)]) for r, tokens in zip(turn, sequences, strict=True)]
    engine.forget_kept()
    assert engine._running is None


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_5_text"])
def test_layers_with_a_window_or_a_state_decode_in_pages(tmp_path, gpu, full_precision, kind):
    engine = build(write_family(tmp_path, kind, max_position_embeddings=256), gpu, max_running_sequences=12)
    prompts = [[2 + (7 * i + n) % 38 for n in range(length)] for i, length in enumerate([1, 20, 33, 64, 100])]
    wanted = [Request(i, prompt, SamplingParams(20 + 9 * i), 3, (5, i)) for i, prompt in enumerate(prompts)]
    done = serve(engine, wanted)
    log_probs = engine.log_probs([[*prompts[each.request_id], *each.token_ids] for each in done])
    for each, exact in zip(done, log_probs, strict=True):
        assert each.log_probs == pytest.approx(exact[len(prompts[each.request_id]) - 1 :], abs=2e-3)


def test_memory_is_given_back(tiny_model, gpu):
    engine = build(tiny_model("qwen2", **SIZES), gpu, torch.bfloat16, kv_cache_bytes=2**26)
    serve(engine, requests())  # workspaces of libraries stay
    before = torch.cuda.memory_allocated() if gpu.type == "cuda" else 0
    serve(engine, [Request(0, [5] * 70, SamplingParams(60, temperature=2.0), 3, (0,))])
    assert engine._running is None
    if gpu.type == "cuda":
        assert torch.cuda.memory_allocated() <= before + 2**20


def test_new_weights_are_used_from_the_next_step_on(tiny_model, gpu):
    directories = [tiny_model("qwen2", seed=seed, **SIZES) for seed in (0, 1)]
    engine = build(directories[0], gpu)
    new = {name: weight.to(gpu) for name, weight in load_causal_lm(directories[1]).named_parameters()}

    def load(step):
        if step == 20:
            load_weights(engine, new.items(), version=1)

    request = Request(0, [5, 9, 12], SamplingParams(40, temperature=0.0), 2)
    (found, _) = serve(engine, [request], load)
    assert found.versions == [0] * 20 + [1] * 20
    (old,) = serve(build(directories[0], gpu), [Request(0, [5, 9, 12], SamplingParams(20, temperature=0.0))])
    assert found.token_ids[:20] == old.token_ids
    assert serve(engine, [request])[0].versions == [1] * 40


def test_lack_of_device_memory_is_an_error_that_names_the_keys(tiny_model, gpu):
    if gpu.type == "cpu":
        pytest.skip("a limit of memory per process needs a CUDA device")
    engine, wanted = build(tiny_model("qwen2", **SIZES), gpu), requests()
    generate(engine, wanted)  # workspaces of libraries, which stay, are not what the memory lacks
    torch.cuda.empty_cache()
    used = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(used / torch.cuda.get_device_properties(gpu).total_memory)
    try:
        with pytest.raises(RolloutConfigError, match=r"do not fit .* lower rollout\.kv_cache_bytes=0"):
            generate(engine, wanted)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(generate(engine, wanted)) == 32


def test_steps_run_with_deterministic_kernels_only(tiny_model, gpu):
    engine = build(tiny_model("qwen2", **SIZES), gpu, torch.bfloat16)
    set_deterministic(True)
    try:
        assert serve(engine, requests()) == serve(engine, requests())
    finally:
        set_deterministic(False)
