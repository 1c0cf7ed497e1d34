"""Training on recorded routes: every layout of rows takes them, as a router with forced experts does."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from fixtures.families import write_family
from hybridflow.engines.packing import pack
from hybridflow.protocol import DataProto

PROMPT, RESPONSE, LAYERS, TOP_K, EXPERTS = 6, 5, 2, 2, 4
LAYOUTS = {
    "padded": {"packing": False},
    "without shared prompts": {"share_prompts": False},
    "recomputed": {"gradient_checkpointing": True},
    "padded and recomputed": {"packing": False, "gradient_checkpointing": True},
    "micro-batches": {"max_tokens": 11},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("moe"), "qwen3_moe", norm_topk_prob=True)


@pytest.fixture
def rows():
    """Return three rows, of which two share a prompt, with random routes for all but the last token."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 40, (3, PROMPT + RESPONSE), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -2:] = mask[2, :2] = 0
    routes = torch.rand(3, PROMPT + RESPONSE, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K].short()
    ids[1, :PROMPT], routes[1, : PROMPT - 1] = ids[0, :PROMPT], routes[0, : PROMPT - 1]
    routes[mask == 0] = -1
    routes[torch.arange(3), PROMPT - 1 + mask[:, PROMPT:].sum(-1)] = -1
    columns = {"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, PROMPT:].bool()}
    return DataProto.from_dict({**columns, "routes": routes})


def forced(gate, routes):
    """Return the forward of a Qwen3 router that takes these experts (tokens, top_k)."""

    def forward(hidden):
        logits = F.linear(hidden, gate.weight)
        weights = logits.softmax(-1).gather(-1, routes)
        return logits, weights / weights.sum(-1, keepdim=True), routes

    return forward


def reference(directory, rows, noise=0.0):
    """Return log-probs of responses, and the gradients of their weighted sum, by transformers with forced routers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter += noise * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    gates, found = [layer.mlp.gate for layer in model.model.layers], []
    for ids, mask, routes in zip(*(rows.batch[n] for n in ("input_ids", "attention_mask", "routes")), strict=True):
        real, own = ids[mask.bool()], routes[mask.bool()].long().clamp(min=0)
        for layer, gate in enumerate(gates):
            gate.forward = forced(gate, own[:, layer])
        of_tokens = model(real[None]).logits[0, :-1].log_softmax(-1).gather(-1, real[1:, None]).squeeze(-1)
        count = int(mask[PROMPT:].sum())
        found.append(F.pad(of_tokens[-count:], (0, RESPONSE - count)))
    log_probs = torch.stack(found)
    (log_probs * torch.linspace(0, 1, RESPONSE)).sum().backward()
    return model, log_probs.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def learned(engine, rows):
    """Return outputs, the gradients of the weighted sum of log-probs, and the metric of a loss."""
    seen = []

    def loss(outputs, part):
        seen.append(outputs["routes_changed"][part.batch["response_mask"]])
        return (outputs["log_probs"] * torch.linspace(0, 1, RESPONSE)).sum(), {}

    outputs = engine.forward(rows)
    before = {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}
    engine.update(rows, loss)
    change = {name: before[name] - parameter.detach() for name, parameter in engine.parameters.items()}
    return outputs, change, torch.cat(seen)


def test_log_probs_and_gradients_are_those_of_routers_with_forced_experts(directory, rows, build_engine):
    noisy, expected, gradients = reference(directory, rows, noise=0.05)  # weights have changed since routes are known
    engine = build_engine(directory, lr=0.0)
    engine.model.load_state_dict(noisy.state_dict())
    outputs = engine.forward(rows)
    torch.testing.assert_close(outputs["log_probs"], expected, rtol=0, atol=1e-5)
    kept = {}
    hooks = [p.register_hook(lambda g, n=n: kept.__setitem__(n, g.clone())) for n, p in engine.model.named_parameters()]
    engine.update(rows, lambda outputs, _: ((outputs["log_probs"] * torch.linspace(0, 1, RESPONSE)).sum(), {}))
    for hook in hooks:
        hook.remove()
    assert kept.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(kept[name], gradient, rtol=1e-3, atol=1e-4, msg=name)
    assert gradients["model.layers.0.mlp.gate.weight"].abs().max() > 1e-2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_rows_take_the_same_routes(directory, rows, build_engine, layout):
    plain = {"lr": 1e-3, "max_tokens": 1000}
    outputs, change, changed = learned(build_engine(directory, **plain), rows)
    found, other, also_changed = learned(build_engine(directory, **plain | LAYOUTS[layout]), rows)
    for name, values in outputs.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=1e-5, msg=name)
    for name, values in change.items():  # a step of Adam is the sign of a gradient
        assert ((other[name] - values).abs() > 1e-4).float().mean() < 0.02, name
    assert torch.equal(also_changed.sort().values, changed.sort().values)
    assert 0 < float(changed.mean()) <= 1


def test_a_changed_route_changes_log_probs_after_it(directory, rows, build_engine):
    engine = build_engine(directory, learns=False)
    before = engine.forward(rows)["log_probs"]
    rows.batch["routes"][0, PROMPT] = (rows.batch["routes"][0, PROMPT] + 1) % EXPERTS
    difference = (engine.forward(rows)["log_probs"] - before).abs()
    assert difference[0, 1:].min() > 1e-5
    assert max(difference[0, 0], difference[1:].max()) < 2e-6  # rounding: products of other rows may be cut elsewhere


def test_rows_share_a_prompt_only_with_equal_routes(rows):
    assert pack(rows).num_computed_tokens == int(rows.batch["attention_mask"].sum()) - (PROMPT - 1)
    rows.batch["routes"][0, 0] = (rows.batch["routes"][0, 0] + 1) % EXPERTS
    assert pack(rows).num_computed_tokens == int(rows.batch["attention_mask"].sum())
