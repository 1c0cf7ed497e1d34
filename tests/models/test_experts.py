"""Mixtures of experts: products that any dtype and size have, and the tokens of each expert in an update."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from fixtures.families import small_config, write_family
from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine
from hybridflow.errors import ModelConfigError
from hybridflow.models.expert_parallel import require_expert_parallel
from hybridflow.models.experts import ExpertLoad, experts_of
from hybridflow.models.loading import build_without_weights, load_causal_lm


@pytest.mark.parametrize(
    ("dtype", "width", "wanted"),
    [(torch.float32, 16, "grouped_mm"), (torch.float64, 16, "eager"), (torch.float32, 18, "eager")],
)
def test_experts_have_products_in_each_dtype_and_size(tmp_path, dtype, width, wanted):
    path = write_family(tmp_path, "qwen3_moe", moe_intermediate_size=width)
    model = load_causal_lm(path, dtype)
    assert model.config._experts_implementation == wanted
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager")
    for ours, other in zip(experts_of(model), experts_of(theirs), strict=True):
        hidden, weights = torch.randn(12, 32, dtype=dtype), torch.rand(12, 2, dtype=dtype)
        chosen = torch.arange(12)[:, None] % torch.tensor([[4, 3]])
        hidden.requires_grad_()
        results = []
        for experts in (ours, other):
            out = experts(hidden, chosen, weights)
            results.append([out, *torch.autograd.grad(out.square().sum(), [hidden, *experts.parameters()])])
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", ["mixtral", "phimoe"])
def test_routers_add_no_noise_where_activations_are_recomputed(tmp_path, kind, rollout_rows):
    path, rows, losses = write_family(tmp_path, kind, router_jitter_noise=0.3), rollout_rows([3, 1], [4, 2]), []
    for recomputes in (False, True):
        engine = TorchEngine(
            str(path),
            "policy",
            model=ModelConfig(path=str(path), gradient_checkpointing=recomputes),
            memory=MemoryConfig(),
            optimizer=OptimizerConfig(),
        )
        losses.append(engine.update(rows, lambda outputs, part: (outputs["log_probs"].sum(), {})))
    assert losses[0] == losses[1]


def test_expert_parallel_needs_experts_that_its_size_divides(tiny_model):
    for family, size, problem in (
        ("qwen2", 2, "not supported for qwen2 models, which have no experts"),
        ("qwen2_moe", 3, "parallel.expert=3 does not divide the 4 experts of this model"),
    ):
        model = build_without_weights(tiny_model(family), "policy", torch.float32)
        with pytest.raises(ModelConfigError, match=problem):
            require_expert_parallel(model.config, size, model)
        require_expert_parallel(model.config, 1)
    require_expert_parallel(model.config, 4, model)


def test_load_counts_real_tokens_and_no_pass_outside_of_its_context():
    model = AutoModelForCausalLM.from_config(small_config("qwen3_moe"))
    load = ExpertLoad.of(model, torch.device("cpu"))
    of_layer = experts_of(model)
    hidden, weights = torch.zeros(4, 32), torch.ones(4, 2)
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1], [3, 2]])
    with load.counting(torch.tensor([[True, True], [True, False]])):
        of_layer[0](hidden, chosen, weights)
    with load.counting(None):
        of_layer[1](hidden, chosen, weights)
    of_layer[1](hidden, chosen, weights)
    # tokens 3, 2, 1, 0 of experts in the first layer, 3, 2, 2, 1 in the second
    assert load.figures(lambda counts: counts) == {"expert_load_max": 3 / 1.5, "idle_experts": 1.0}
    assert load.figures(lambda counts: [count + 1 for count in counts])["idle_experts"] == 0
    load.reset()
    assert load.figures(lambda counts: counts) == {"expert_load_max": 0.0, "idle_experts": 8.0}
