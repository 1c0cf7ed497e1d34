"""Routes of experts: recorded as routers choose them, replayed with the weights of the present scores."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from fixtures.families import small_config, write_family
from hybridflow.errors import BatchError
from hybridflow.models.attention import PackedPlan
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.routes import (
    NOT_RECORDED,
    RecordingForward,
    ReplayedRoutes,
    Routers,
    why_not_replayable,
)

MORE = (
    *(
        "mixtral",
        "deepseek_v2",
        "glm4_moe",
        "gpt_oss",
        "granitemoe",
        "granitemoeshared",
        "ernie4_5_moe",
        "aria_text",
        "dots1",
    ),
    *(
        "exaone_moe",
        "flex_olmo",
        "glm4_moe_lite",
        "hunyuan_v1_moe",
        "hy_v3",
        "llama4_text",
        "olmoe",
        "qwen3_next",
        "solar_open",
    ),
)
WEIGHTS = {
    "qwen3_moe": lambda logits, routes: normed(logits.softmax(-1).gather(-1, routes)),
    "gpt_oss": lambda logits, routes: logits.gather(-1, routes).softmax(-1),
    "deepseek_v3": lambda logits, routes: 2.5 * normed(logits.sigmoid().gather(-1, routes)),
    "deepseek_v2": lambda logits, routes: logits.softmax(-1).gather(-1, routes),
}
"""The weights of chosen experts, as the families define them."""
OWN = {
    "qwen3_moe": {"norm_topk_prob": True},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.0},
}


def normed(scores):
    return scores / scores.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "kind",
    [
        *("qwen3_moe", "qwen2_moe", "deepseek_v3", "minimax_m2"),
        *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in MORE),
    ],
)
def test_a_model_that_replays_its_own_routes_computes_the_same_bits(tmp_path, kind):
    directory = write_family(tmp_path, kind)
    assert why_not_replayable(directory) is None
    forward, tokens = RecordingForward(load_causal_lm(directory)), torch.arange(3, 12)[None]
    routers = Routers.of(forward.model)

    @torch.no_grad()
    def logits_with(routes):
        replayed = ReplayedRoutes(routes)
        with routers.using(replayed):
            kwargs = {"attention_plan": PackedPlan.from_lengths([9]), "use_cache": False}
            return forward.model(tokens, position_ids=torch.arange(9)[None], **kwargs).logits, replayed.changed()

    with torch.no_grad():
        plain = forward(tokens, position_ids=torch.arange(9)[None], attention_plan=PackedPlan.from_lengths([9]))
    routes = forward.routes
    assert routes.shape == (9, *routers.shape)
    same, changed = logits_with(routes)
    assert torch.equal(same, plain)
    assert not changed.any()
    others = torch.where(torch.arange(9)[:, None, None] < 6, NOT_RECORDED, (routes + 1) % routers.num_experts)
    partly, changed = logits_with(others)
    torch.testing.assert_close(partly[:, :6], plain[:, :6], rtol=0, atol=1e-5)
    assert (partly[:, 6:] - plain[:, 6:]).abs().max() > 1e-3
    assert changed[:6].sum() == 0 < changed[6:].sum()


@pytest.mark.parametrize("kind", WEIGHTS)
def test_replayed_experts_have_the_weights_of_the_present_router(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(kind, **OWN.get(kind, {})))
    router = next(module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter"))
    torch.nn.init.normal_(router.weight)
    hidden, routes = torch.randn(5, 32), torch.tensor([[0, 3], [2, 1], [3, 2], [1, 0], [3, 0]])
    routers = Routers.of(model)
    with routers.using(ReplayedRoutes(routes[:, None].expand(-1, *routers.shape).to(torch.int16))):
        _, weights, experts = router(hidden)
    logits = hidden @ router.weight.T + getattr(router, "bias", 0)
    expected = WEIGHTS[kind](logits, routes)
    assert torch.equal(experts, routes)
    torch.testing.assert_close(weights, expected)
    got, wanted = (
        torch.autograd.grad((x * torch.rand(5, 2)).sum(), router.weight)[0] for x in seeded(weights, expected)
    )
    torch.testing.assert_close(got, wanted)
    assert wanted.abs().max() > 1e-3


def seeded(*values):
    for value in values:
        torch.manual_seed(1)
        yield value


def test_a_model_says_why_its_routes_are_not_replayed(tmp_path, tiny_model):
    dense = write_family(tmp_path / "dense", "granitemoehybrid", num_local_experts=0)
    for path in (tiny_model("llama"), dense):
        assert why_not_replayable(path) == "is not a mixture of experts"
    assert "cannot be replayed (phimoe)" in str(why_not_replayable(write_family(tmp_path / "phimoe", "phimoe")))


def test_routes_of_another_model_are_refused(tmp_path):
    routers = Routers.of(load_causal_lm(write_family(tmp_path, "qwen3_moe")))
    routers.require_valid(torch.full((2, 5, 2, 2), NOT_RECORDED))
    for routes in (torch.zeros(2, 5, 3, 2), torch.full((2, 5, 2, 2), 4), torch.full((2, 5, 2, 2), -2)):
        with pytest.raises(BatchError, match=r"the model chooses 2 of 4 experts in 2 layers.*router_replay = false"):
            routers.require_valid(routes.to(torch.int16))
