"""Families in vLLM: the names of weights that are sent, and what it computes with them; or an error that names them."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fixtures.families import write_family
from hybridflow.config import LoRAConfig
from hybridflow.errors import RolloutConfigError, RolloutError
from hybridflow.models.loading import load_causal_lm
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.rollout.vllm.arguments import EngineOptions, engine_arguments
from hybridflow.rollout.vllm.versions import Progress

REQUIRED = (
    *("qwen3_5_text", "qwen3_next", "gemma2", "gemma3_text", "gpt_oss", "mistral", "phi3", "glm4", "olmo2", "olmo3"),
    *("smollm3", "qwen3_moe", "qwen2_moe", "deepseek_v2", "cohere2", "lfm2"),
)
PROMPTS = [[5, 9, 33, 36, 7, 2, 8], [8, 2, 2], [30, 21, 22, 4, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
SIZES = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 32}
"""Sizes that vLLM computes on a CPU."""
LATENT = {"head_dim": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_group": 1}
OWN = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "lfm2": {"conv_dim": 128, "block_dim": 128},
    "qwen3_next": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
}


def write(directory, kind, **changes):
    return write_family(directory, kind, **(SIZES | OWN.get(kind, {}) | changes))


def build(path, **options):
    from fixtures.vllm_engines import close_engines, lend_engine

    close_engines()  # beside an engine without experts vLLM can start none with them
    return lend_engine(path, weights=False, **options)


class StandIn:
    """In place of vLLM's engine: keeps the shapes of what is sent; a step ends a sequence, with the next `routes`."""

    def __init__(self, options):
        self.shapes, self.waiting, self.routes = {}, {}, []

    def nothing(self, *_):
        return []

    require_steps = start_loading = finish_loading = finish_step_in_flight = forget_prompts = seed = abort = nothing

    def load(self, weights):
        self.shapes |= {name: tensor.shape for name, tensor in weights}

    def add(self, name, prompt_ids, sampling, *, seed, cache_salt):
        self.waiting[name] = sampling.max_new_tokens

    def step(self):
        name, count = self.waiting.popitem()
        return [Progress(name, [7] * count, [-1.0] * count, "length", routes=self.routes.pop(0))]


@pytest.fixture
def stand_in(monkeypatch):
    """Return a builder of engines without vLLM, with the weights of a directory."""
    from hybridflow.rollout.vllm import VLLMRollout, engine

    monkeypatch.setattr(engine, "VLLMEngine", StandIn)

    def built(path, **options):
        receiver = VLLMRollout(path, **options)
        load_weights(receiver, load_causal_lm(path).named_parameters(), version=0)
        return receiver

    return built


@pytest.mark.parametrize("in_files", ["as_published", "as_in_memory"])
def test_sent_weights_have_the_names_and_shapes_of_published_files(tmp_path, stand_in, in_files):
    for kind in REQUIRED if in_files == "as_published" else ("glm4_moe", "minimax_m2"):
        published = write_family(tmp_path / kind, kind)
        path = published
        if in_files == "as_in_memory":
            path = write_family(tmp_path / in_files / kind, kind, save_original_format=False)
        stored = load_file(published / "model.safetensors")
        assert stand_in(path)._engine.shapes == {name: tensor.shape for name, tensor in stored.items()}, kind


def test_routes_from_vllm_are_those_of_layers_with_experts_or_refused(tmp_path, stand_in):
    path = write_family(tmp_path, "deepseek_v2", num_hidden_layers=3)  # the first layer has no experts
    engine = stand_in(path, records_routes=True)
    right = np.array([[[0, 0], [i % 4, (i + 1) % 4], [(i + 3) % 4, i % 4]] for i in range(5)], dtype=np.uint8)
    twice, beyond = right.copy(), right.copy()
    twice[4, 2], beyond[0, 1, 1] = 3, 4
    bad = {
        "none": None,
        r"shape \(4, 3, 2\)": right[:4],
        r"shape \(5, 2, 2\)": right[:, 1:],
        r"shape \(5, 3, 1\)": right[..., :1],
        "experts from 0 to 3, for some token one twice": twice,
        "experts from 0 to 4": beyond,
    }
    for found, routes in bad.items():
        engine._engine.routes = [routes, right]
        engine.submit(Request(0, [5, 6, 7], SamplingParams(3)))
        with pytest.raises(RolloutError, match=f"cannot be replayed: {found}.* of 5 tokens in 3 layers, 2 different"):
            engine.step()
        engine.step()  # after an error a sequence starts again
        (done,) = engine.finished()
        assert done.routes.dtype == torch.int16
        assert done.routes.tolist() == right[:, 1:].tolist()
    assert engine.routes_shape == (2, 2)


def test_routes_of_vllm_on_a_cpu_are_an_error_before_it_starts(tmp_path):
    options = EngineOptions(str(write_family(tmp_path, "qwen3_moe")), records_routes=True)
    with pytest.raises(RolloutConfigError, match=r"actor\.router_replay=true is not supp.* on a CPU.* 'embedded'"):
        engine_arguments(options, on_gpu=False)
    assert engine_arguments(options, on_gpu=True)["enable_return_routed_experts"]


@pytest.mark.vllm
@pytest.mark.parametrize(
    "kind",
    [
        *("qwen3_moe", "smollm3", "deepseek_v2", "lfm2"),
        *(
            pytest.param(kind, marks=pytest.mark.exhaustive)
            for kind in (*REQUIRED, "glm4_moe", "deepseek_v3", "glm", "olmo", "starcoder2", "seed_oss", "phi3 longrope")
            if kind not in ("qwen3_moe", "smollm3", "deepseek_v2", "lfm2", "qwen3_5_text", "gpt_oss")
        ),
    ],
)
def test_other_weights_that_are_sent_generate_as_in_the_embedded_engine(tmp_path, kind):
    path = write(tmp_path, kind)
    dtype = torch.bfloat16 if kind == "qwen3_next" else torch.float32  # the only one for its kernel on a CPU
    before = load_causal_lm(path, dtype)
    engine, model = build(path, dtype=str(dtype).removeprefix("torch.")), load_causal_lm(path, dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.rand_like(parameter) / 2).add_(torch.randn_like(parameter) / 20)
    load_weights(engine, model.named_parameters(), version=1)
    requests = [Request(i, prompt, SamplingParams(12, temperature=0.0)) for i, prompt in enumerate(PROMPTS)]
    done, ours = generate(engine, requests), EmbeddedRollout(model)
    tolerance = {"rtol": 0, "atol": 0.3 if kind == "qwen3_next" else 5e-5}
    for prompt, each in zip(PROMPTS, done, strict=True):
        (wanted,) = ours.log_probs([[*prompt, *each.token_ids]])
        torch.testing.assert_close(each.log_probs, wanted[len(prompt) - 1 :], **tolerance)
    torch.testing.assert_close(engine.log_probs(PROMPTS), ours.log_probs(PROMPTS), **tolerance)
    if kind not in ("qwen3_next", "lfm2"):  # in vLLM's environment transformers gives its layers no plan
        assert [each.token_ids for each in done] == [each.token_ids for each in generate(ours, requests)]
    EmbeddedRollout(before).log_probs(PROMPTS)  # vLLM has not changed the code of models in the process
    if kind == "qwen3_moe":
        with pytest.raises(RolloutError, match=r"not supported with a Qwen3MoeForC.* on a CPU: .* or set rollout\.m"):
            build(path, adapters=LoRAConfig(rank=2, targets=("q_proj",)))


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gpt_oss", "No Unquantized MoE backend"),
        pytest.param("qwen2_moe windows", "ignores its sliding windows; .*len = 4", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", "requires BF16", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_5_text", "No module named 'torchvision'", marks=pytest.mark.exhaustive),
    ],
)
def test_family_that_vllm_does_not_compute_is_an_error_at_the_start(tmp_path, kind, reason):
    with pytest.raises(
        RolloutError, match=rf"a {kind.split()[0]} model: .*{reason}.* use rollout\.backend = 'embedded'"
    ):
        build(write(tmp_path, kind))
