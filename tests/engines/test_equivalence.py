"""Loss, gradient norm and all parameters after three optimizer steps are equal for every way to compute a mini-batch.

In float64, to a relative error of 1e-10: several token budgets, packed or padded, prompts shared or not, activations
recomputed or kept, and compared with a plain loop over rows with the attention of transformers.
"""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from fixtures.layout_program import KL_COEF, OPTIMIZER, largest_errors, loss_of, rows_for_losses
from hybridflow.engines import TorchEngine
from hybridflow.protocol import DataProto
from hybridflow.runtime.device import take_compilations

TOLERANCE = 1e-10
STEPS = 3


@pytest.fixture(scope="module")
def rows(rollout_rows) -> DataProto:
    """Return ten rows with all columns that the losses read."""
    return rows_for_losses(rollout_rows)


@pytest.fixture(scope="module")
def groups(rows) -> DataProto:
    """Make the same rows with three prompts that have two to four responses each, not all adjacent."""
    columns = rows.batch.clone()
    prompt_len = columns["input_ids"].shape[1] - columns["response_mask"].shape[1]
    for row, same_as in ((3, 0), (5, 0), (9, 0), (8, 2), (7, 6)):
        for name in ("input_ids", "attention_mask"):
            columns[name][row, :prompt_len] = columns[name][same_as, :prompt_len]
    return DataProto.from_dict(dict(columns))


def train(engine: TorchEngine, aggregation: str, rows: DataProto) -> SimpleNamespace:
    """Make three optimizer steps and return losses, gradient norms and parameters."""
    loss = loss_of(engine.head, rows, aggregation)
    results = [engine.update(rows, loss, with_entropy=True, temperature=0.7) for _ in range(STEPS)]
    weights = {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}
    losses, norms = [result.loss for result in results], [result.grad_norm for result in results]
    return SimpleNamespace(losses=losses, grad_norms=norms, weights=weights)


def relative_error(run: SimpleNamespace, reference: SimpleNamespace) -> float:
    return max(largest_errors(run, reference).values())


@pytest.fixture
def engine_of(tiny_model, build_engine, use_float64_throughout):
    def build(head: str, **options) -> TorchEngine:
        engine = build_engine(tiny_model("qwen2"), head, dtype="float64", **OPTIMIZER, **options)
        use_float64_throughout(engine.model)
        if head == "value":  # a zero head gives the body no gradient
            with torch.no_grad():
                engine.parameters["score.weight"].copy_(torch.linspace(-1, 1, 32)[None])
        return engine

    return build


@pytest.mark.runs
@pytest.mark.parametrize(("head", "aggregation"), [("policy", "token-mean"), ("value", "seq-mean-token-sum")])
def test_all_splits_into_micro_batches_give_the_same_training(engine_of, rows, head, aggregation):
    whole = engine_of(head, packing=False)
    before = {name: parameter.detach().clone() for name, parameter in whole.parameters.items()}
    reference = train(whole, aggregation, rows)
    moved = [float((p - before[name]).norm() / before[name].norm()) for name, p in reference.weights.items()]
    assert min(moved) > 1000 * TOLERANCE
    assert min(reference.grad_norms) > OPTIMIZER["clip_grad_norm"]
    splits = [(10, False), (24, False), (1000, False), (24, True)]
    for (max_tokens, checkpointing), packing in product(splits, (True, False)):
        engine = engine_of(head, max_tokens=max_tokens, packing=packing, gradient_checkpointing=checkpointing)
        error = relative_error(train(engine, aggregation, rows), reference)
        assert error <= TOLERANCE, (max_tokens, packing, checkpointing)


@pytest.mark.runs
def test_shared_prompts_give_the_same_training(engine_of, groups, monkeypatch):
    monkeypatch.setattr("hybridflow.engines.packing.sharing_pays", lambda shared, *_: shared > 0)  # float64 as well
    reference = train(engine_of("policy", packing=False), "token-mean", groups)
    for max_tokens, checkpointing in ((12, False), (24, False), (1000, False), (24, True)):
        for share_prompts in (True, False):
            options = {"max_tokens": max_tokens, "gradient_checkpointing": checkpointing}
            engine = engine_of("policy", share_prompts=share_prompts, **options)
            assert relative_error(train(engine, "token-mean", groups), reference) <= TOLERANCE, options
    result = engine_of("policy").update(groups, loss_of("policy", groups), with_entropy=True)
    assert result.saved_share > 0.1
    assert result.padding_share == 0


def test_training_equals_plain_loop_over_rows(tiny_model, build_engine, use_float64_throughout, rows):
    """Compare with the attention of transformers, one row at a time, torch's AdamW, and the formulas written out."""
    path = tiny_model("qwen2", tie_word_embeddings=True)
    engine = build_engine(path, dtype="float64", max_tokens=24, **OPTIMIZER)
    use_float64_throughout(engine.model)
    run = train(engine, "token-mean", rows)

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
    use_float64_throughout(model)
    columns = rows.batch
    num_tokens = int(columns["response_mask"].sum())
    decayed = [p for p in model.parameters() if p.ndim > 1]
    kept = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}], lr=0.01, eps=1e-6
    )
    losses, norms = [], []
    for _ in range(STEPS):
        terms = []
        for r in range(len(rows)):
            tokens = columns["input_ids"][r][columns["attention_mask"][r].bool()]
            log_p = (model(tokens[None]).logits[0] / 0.7).log_softmax(-1)
            prompt_len = int(columns["attention_mask"][r, : -columns["response_mask"].shape[1]].sum())
            for o in columns["response_mask"][r].nonzero().flatten().tolist():
                at = prompt_len + o
                of_token = log_p[at - 1]
                log_prob = of_token[tokens[at]]
                advantage = columns["advantages"][r, o]
                ratio = (log_prob - columns["old_log_probs"][r, o]).exp()
                objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                if advantage < 0:
                    objective = torch.maximum(objective, 3 * advantage)
                log_r = columns["ref_log_probs"][r, o] - log_prob
                kl = log_r.exp() - 1 - log_r
                entropy = -(of_token.exp() * of_token).sum()
                terms.append(-objective + KL_COEF * kl - 0.01 * entropy)
        loss = torch.stack(terms).sum() / num_tokens
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad_norm"])))
        optimizer.step()
        losses.append(loss.item())
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert relative_error(run, SimpleNamespace(losses=losses, grad_norms=norms, weights=weights)) <= TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: torch.compile starts a process")
@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
def test_all_layers_and_batches_share_the_compilations_of_the_first_step(tiny_model, build_engine, rollout_rows):
    """Two functions of a layer are compiled, each with and without gradient."""
    torch._dynamo.reset()
    take_compilations()
    policy, critic = (
        build_engine(tiny_model("qwen3", num_hidden_layers=4), head, max_tokens=40, compile=True)
        for head in ("policy", "value")
    )
    counts = []
    for prompt_lens, response_lens in [([3, 1, 5, 2], [4, 6, 1, 3]), ([7, 7, 2], [4, 6, 9]), ([2, 4], [3, 1])]:
        rows = rollout_rows(prompt_lens, response_lens)
        for engine in (policy, critic):
            engine.forward(rows)
            engine.update(rows, lambda outputs, part: (sum(x.sum() for x in outputs.values()) / 40, {}))
            counts.append(take_compilations())
    assert counts == [4, 0, 0, 0, 0, 0]
