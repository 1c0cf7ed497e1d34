import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridflow.engines import TorchEngine
from hybridflow.errors import CheckpointError, ModelError, NonFiniteError
from hybridflow.protocol import DataProto
from hybridflow.runtime.progress import progress

PROMPT_LENS, RESPONSE_LENS = [3, 1, 4, 2], [2, 5, 0, 4]


@pytest.fixture
def rows(rollout_rows) -> DataProto:
    batch = rollout_rows(PROMPT_LENS, RESPONSE_LENS)
    batch.batch["row_ids"] = torch.tensor([40, 41, 42, 43])
    batch.batch["advantages"] = torch.tensor([[1.0], [-1.0], [0.5], [2.0]])
    return batch


def policy_gradient(outputs, part) -> tuple[Tensor, dict[str, float]]:
    """Return minus the mean of advantage * log-prob over the eleven response tokens of `rows`."""
    columns = part.batch
    weighted = torch.where(columns["response_mask"], columns["advantages"] * outputs["log_probs"], 0.0)
    share = -weighted.sum() / 11
    return share, {"loss": share.item(), "rows": len(part)}


def squared_values(outputs, part) -> tuple[Tensor, dict[str, float]]:
    return ((outputs["values"] - 1) ** 2 * part.batch["response_mask"]).sum() / 11, {}


def snapshot(engine: TorchEngine) -> dict:
    return copy.deepcopy(engine.state_dict())


def same(ours, theirs) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


def test_progress_counts_the_micro_batches(tiny_model, build_engine, rows):
    engine, before = build_engine(tiny_model(), max_tokens=8, packing=False), progress()
    engine.forward(rows)
    after_forward = progress()
    engine.update(rows, policy_gradient)
    assert after_forward - before > 1
    assert progress() - after_forward == after_forward - before


@pytest.mark.parametrize(("packing", "temperature"), [(True, 0.7), (False, 1.0)])
def test_log_probs_and_entropies_equal_those_of_transformers(tiny_model, build_engine, rows, packing, temperature):
    engine = build_engine(tiny_model(), dtype="float64", max_tokens=8, packing=packing, learns=False)
    outputs = engine.forward(rows, with_entropy=True, temperature=temperature)
    stock = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float64, attn_implementation="sdpa")
    columns = rows.batch
    for r, (prompt_len, response_len) in enumerate(zip(PROMPT_LENS, RESPONSE_LENS, strict=True)):
        tokens = columns["input_ids"][r][columns["attention_mask"][r].bool()]
        with torch.no_grad():
            log_p = (stock(tokens[None]).logits[0] / temperature).log_softmax(-1)
        for o in range(response_len):
            of_token = log_p[prompt_len + o - 1]
            assert outputs["log_probs"][r, o].item() == pytest.approx(of_token[tokens[prompt_len + o]].item(), rel=1e-6)
            assert outputs["entropies"][r, o].item() == pytest.approx(
                -(of_token.exp() * of_token).sum().item(), rel=1e-6
            )
    assert not outputs["log_probs"][~columns["response_mask"]].any()
    assert not outputs["entropies"][~columns["response_mask"]].any()


def test_temperature_0_is_treated_as_1(tiny_model, build_engine, rows):
    engine = build_engine(tiny_model(), learns=False)
    greedy, plain = engine.forward(rows, temperature=0.0), engine.forward(rows, temperature=1.0)
    assert torch.equal(greedy["log_probs"], plain["log_probs"])


def test_bfloat16_logits_are_divided_by_temperature_in_float32(tiny_model, build_engine, rows):
    engine = build_engine(tiny_model(), dtype="bfloat16", learns=False)
    inputs = engine.row_forward.arrange(rows)
    arguments = {"position_ids": inputs.position_ids, "attention_plan": inputs.plan}
    with torch.no_grad():
        logits = engine.model_forward(inputs.input_ids, logits_to_keep=inputs.positions, **arguments)[0]
    assert logits.dtype == torch.bfloat16
    expected = (logits.float() / 0.3).log_softmax(-1).gather(-1, inputs.labels[:, None]).squeeze(-1)
    log_probs = engine.forward(rows, temperature=0.3)["log_probs"]
    torch.testing.assert_close(log_probs[rows.batch["response_mask"]], expected, rtol=1e-5, atol=1e-6)


def test_outputs_have_dtype_of_losses(tiny_model, build_engine, rows):
    for head, name in (("policy", "log_probs"), ("value", "values")):
        for dtype, expected in (("bfloat16", torch.float32), ("float32", torch.float32), ("float64", torch.float64)):
            assert build_engine(tiny_model(), head, dtype=dtype).forward(rows)[name].dtype == expected


def test_update_result_has_loss_rate_and_counts(tiny_model, build_engine, rows):
    engine = build_engine(tiny_model(), max_tokens=6, packing=False, schedule="linear", warmup_steps=2, total_updates=6)
    results = [engine.update(rows, policy_gradient) for _ in range(3)]
    assert [result.lr for result in results] == pytest.approx([0.005, 0.01, 0.01])
    first = results[0]
    assert first.loss == pytest.approx(first.metrics["loss"])
    assert first.metrics["rows"] == 4  # metrics of the micro-batches are summed
    assert (first.num_tokens, first.num_computed_tokens) == (21, 21)  # lengths 4 | 5 | 6 | 6, a row each
    assert first.grad_norm > 0
    assert engine.num_updates == 3
    assert results[2].loss < first.loss


def test_batch_without_counted_tokens_gives_zero_gradient(tiny_model, build_engine, rows):
    rows.batch["response_mask"] = torch.zeros_like(rows.batch["response_mask"])
    for packing in (True, False):
        engine = build_engine(tiny_model(), packing=packing, weight_decay=0.0)
        before = snapshot(engine)["model"]
        result = engine.update(rows, policy_gradient, with_entropy=True)
        assert (result.loss, result.grad_norm) == (0, 0)
        assert same(engine.state_dict()["model"], before)


def test_bfloat16_training_is_close_to_float32_with_float32_parameters(tiny_model, build_engine, rows):
    engine, exact = (build_engine(tiny_model(), dtype=dtype, max_tokens=8) for dtype in ("bfloat16", "float32"))
    for _ in range(3):
        ours, theirs = engine.update(rows, policy_gradient), exact.update(rows, policy_gradient)
        assert ours.loss == pytest.approx(theirs.loss, rel=0.1)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=0.1)
    assert {parameter.dtype for parameter in engine.parameters.values()} == {torch.float32}
    for name, weight in engine.weights():
        assert torch.equal(weight, engine.parameters[name].bfloat16()), name


def test_activations_are_recomputed_in_updates_only(tiny_model, build_engine, rows):
    calls = []
    engine = build_engine(tiny_model(), gradient_checkpointing=True)
    engine.model.model.layers[0].mlp.gate_proj.register_forward_pre_hook(lambda *_: calls.append(1))
    engine.forward(rows)
    assert len(calls) == 1
    engine.update(rows, policy_gradient)
    assert len(calls) == 3
    assert not engine.model.training


def test_engine_without_optimizer_cannot_update(tiny_model, build_engine, rows):
    engine = build_engine(tiny_model(), learns=False)
    assert not any(parameter.requires_grad for parameter in engine.parameters.values())
    with pytest.raises(ModelError, match="this engine has no optimizer"):
        engine.update(rows, policy_gradient)


# ------------------------------------------------------------------------------------------ rejected steps


@pytest.mark.parametrize(("dtype", "bad"), [("bfloat16", float("nan")), ("float32", float("inf"))])
def test_non_finite_step_is_rejected_and_names_its_samples(tiny_model, build_engine, rows, dtype, bad):
    engine, untouched = (build_engine(tiny_model(), dtype=dtype, max_tokens=12) for _ in range(2))
    engine.update(rows, policy_gradient)
    untouched.update(rows, policy_gradient)
    before, weights = snapshot(engine), {name: weight.clone() for name, weight in engine.weights()}

    poisoned = DataProto.from_dict({**rows.batch, "advantages": torch.tensor([[1.0], [bad], [0.5], [2.0]])})
    with pytest.raises(NonFiniteError, match=r"policy update 1: .*nothing was applied\. Samples: row 41: ") as error:
        engine.update(poisoned, policy_gradient)
    assert "row 40" not in str(error.value)
    assert "row 43" not in str(error.value)
    assert same(engine.state_dict(), before)
    assert same(dict(engine.weights()), weights)

    engine.update(rows, policy_gradient)
    untouched.update(rows, policy_gradient)
    assert same(engine.state_dict(), untouched.state_dict())


def test_finite_loss_with_non_finite_gradient_is_rejected(tiny_model, build_engine, rows):
    def loss(outputs, part):
        counted = outputs["log_probs"] * (part.batch["row_ids"] == 43)[:, None]
        return counted.sum().abs().clamp(max=0).sqrt(), {}  # 0, with an infinite slope times 0

    engine = build_engine(tiny_model(), max_tokens=6)
    before = snapshot(engine)
    with pytest.raises(NonFiniteError, match=r"loss 0\.0, gradient norm nan.*gradient not finite"):
        engine.update(rows, loss)
    assert same(engine.state_dict(), before)


def test_report_of_many_samples_is_short(tiny_model, build_engine, rollout_rows):
    rows = rollout_rows([1] * 12, [1] * 12)
    rows.batch["advantages"] = torch.full((12, 1), float("nan"))
    with pytest.raises(NonFiniteError, match=r"row 7: .*; and 4 more") as error:
        build_engine(tiny_model()).update(rows, policy_gradient)
    assert "row 8:" not in str(error.value)


def test_samples_without_row_ids_are_named_by_index(tiny_model, build_engine, rows):
    rows.batch["advantages"][3] = float("nan")
    del rows.batch["row_ids"]
    with pytest.raises(NonFiniteError, match="Samples: row 3: loss nan"):
        build_engine(tiny_model()).update(rows, policy_gradient)


def test_failed_update_leaves_no_gradient(tiny_model, build_engine, rows):
    engine, untouched = (build_engine(tiny_model(), max_tokens=6) for _ in range(2))

    def fails_late(outputs, part):
        if int(part.batch["row_ids"][0]) == 43:
            raise KeyError("returns")
        return policy_gradient(outputs, part)

    with pytest.raises(KeyError):
        engine.update(rows, fails_late)
    for either in (engine, untouched):
        either.update(rows, policy_gradient)
    assert same(engine.state_dict(), untouched.state_dict())


# ------------------------------------------------------------------------------------------ state


@pytest.mark.parametrize(
    ("dtype", "head", "loss"), [("bfloat16", "policy", policy_gradient), ("float32", "value", squared_values)]
)
def test_loaded_state_resumes_bit_identically(tiny_model, build_engine, rows, dtype, head, loss):
    options = {"dtype": dtype, "schedule": "cosine", "warmup_steps": 1, "total_updates": 5, "max_tokens": 12}
    engine = build_engine(tiny_model(), head, **options)
    for _ in range(2):
        engine.update(rows, loss)
    resumed = build_engine(tiny_model(seed=7), head, **options)
    resumed.update(rows, loss)
    resumed.load_state_dict(snapshot(engine))
    assert same(resumed.state_dict(), engine.state_dict())
    assert same(dict(resumed.weights()), dict(engine.weights()))
    results = [either.update(rows, loss) for either in (engine, resumed)]
    assert results[0] == results[1]
    assert same(resumed.state_dict(), engine.state_dict())


def test_loaded_state_is_a_copy(tiny_model, build_engine, rows):
    engine, other = build_engine(tiny_model()), build_engine(tiny_model())
    engine.update(rows, policy_gradient)
    other.load_state_dict(engine.state_dict())
    before = snapshot(engine)
    other.update(rows, policy_gradient)
    assert same(engine.state_dict(), before)


def test_tied_model_stores_embedding_once(tiny_model, build_engine):
    engine = build_engine(tiny_model("qwen2", tie_word_embeddings=True))
    names = list(engine.state_dict()["model"])
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert [name for name, _ in engine.weights()] == names


NORM = "model.norm.weight"


def put(where: str, name: str, value) -> Callable[[dict], object]:
    """Return a function that puts a value into the weights, or the moments of the norm, of a state."""

    def change(state):
        target = state["model"] if where == "model" else state["optimizer"][NORM]
        target[name] = value(target[name]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda state: state["model"].pop(NORM),
            "has no parameter 'model.norm.weight'; it is of a different model. Check model.path",
        ),
        (
            put("model", NORM, torch.zeros(7)),
            r"'model.norm.weight' has shape \(7,\) in the checkpoint and \(32,\) in the model",
        ),
        (
            put("model", "model.layers.2.norm.weight", torch.zeros(7)),
            "has parameters the model lacks: model.layers.2.norm.weight; it is of a different model",
        ),
        (lambda state: state.pop("optimizer"), "no optimizer state"),
        (put("moments", "exp_avg", torch.zeros(7)), r"exp_avg of 'model.norm.weight' has shape \(7,\)"),
        (
            lambda state: state["optimizer"].update({"elsewhere.weight": {}}),
            "optimizer state of 'elsewhere.weight', which the model lacks",
        ),
        (
            put("model", NORM, torch.Tensor.int),
            "parameter 'model.norm.weight' is stored as torch.int32, but torch.float32 or another float is expected",
        ),
        (
            put("moments", "step", torch.tensor(1)),
            "step of 'model.norm.weight' is stored as torch.int64, but torch.float32 or another float",
        ),
        (
            put("model", NORM, [1.0] * 32),
            "parameter 'model.norm.weight' is stored as list, but torch.float32 or another float",
        ),
    ],
)
def test_state_that_does_not_fit_changes_nothing(tiny_model, build_engine, rows, damage, message):
    engine = build_engine(tiny_model())
    engine.update(rows, policy_gradient)
    before, state = snapshot(engine), snapshot(engine)
    for tensor in state["model"].values():
        tensor.fill_(3.0)
    damage(state)
    with pytest.raises(CheckpointError, match=message):
        engine.load_state_dict(state)
    assert same(engine.state_dict(), before)
