import math

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms import POLICY_LOSSES
from hybridflow.config import Config
from hybridflow.errors import RolloutError
from hybridflow.protocol import DataProto
from hybridflow.workers.exact_samples import exactly
from hybridflow.workers.log_prob_mismatch import KL, MEAN, SHARE, log_prob_mismatch_of
from hybridflow.workers.losses import actor_columns, actor_loss, critic_loss

# Two rows: two tokens and one token. Advantages 1 and -2.
MASK = torch.tensor([[True, True], [True, False]])
LOG_PROBS = torch.tensor([[-1.0, -2.0], [-3.0, 9.0]], dtype=torch.float64)
ENTROPIES = torch.tensor([[0.5, 0.7], [0.9, 9.0]], dtype=torch.float64)


def policy_outputs() -> dict[str, Tensor]:
    return {"log_probs": LOG_PROBS.clone().requires_grad_(), "entropies": ENTROPIES.clone().requires_grad_()}


def policy_rows(**columns: list) -> DataProto:
    defaults = {
        "advantages": [[1.0], [-2.0]],
        "rollout_log_probs": [[-1.05, -2.0], [-3.4, 0.0]],
        "old_log_probs": [[-1.0, -2.5], [-3.1, 0.0]],
        "ref_log_probs": [[-1.2, -2.0], [-3.0, 0.0]],
    }
    tensors = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in (defaults | columns).items()}
    return DataProto.from_dict({"response_mask": MASK, **tensors})


def config(actor: dict | None = None, algorithm: dict | None = None) -> Config:
    return Config(actor={"epochs": 2, **(actor or {})}, algorithm=algorithm or {})


def test_policy_loss_and_metrics_equal_the_formulas():
    # Ratios 1, e^0.5 (clipped at 1.2), e^0.1; losses -1, -1.2, 2 * e^0.1.
    outputs = policy_outputs()
    loss, metrics = actor_loss(config(), 0.0, num_tokens=3, num_sequences=2)(outputs, policy_rows())
    expected = (-1 - 1.2 + 2 * math.exp(0.1)) / 3
    assert loss.item() == pytest.approx(expected)
    assert metrics == pytest.approx(
        {
            "actor/policy_loss": expected,
            "actor/clipfrac": 1 / 3,
            "actor/clipfrac_dual": 0.0,
            "actor/entropy": (0.5 + 0.7 + 0.9) / 3,
            "actor/ppo_kl": (0 - 0.5 - 0.1) / 3,
            "rollout/log_prob_mismatch": (0.05 + 0 + 0.4) / 3,
            "rollout/log_prob_mismatch_max": 0.4,
            "rollout/log_prob_mismatch_share": 1 / 3,
            "rollout/log_prob_kl": (math.exp(0.05) - 1.05 + math.exp(0.4) - 1.4) / 3,
        }
    )
    loss.backward()
    assert outputs["log_probs"].grad.flatten().tolist() == pytest.approx([-1 / 3, 0, 2 * math.exp(0.1) / 3, 0])
    assert outputs["entropies"].grad is None  # its coefficient is 0


def test_a_loss_of_exact_samples_names_a_token_that_differs():
    exact = policy_rows(rollout_log_probs=LOG_PROBS.tolist())
    loss = exactly(actor_loss(config(), 0.0, num_tokens=3, num_sequences=2))
    assert loss(policy_outputs(), exact)[1]["rollout/log_prob_mismatch_max"] == 0
    exact.batch["rollout_log_probs"][1, 0] += 1e-12
    with pytest.raises(RolloutError, match=r"1 of 3 sampled tokens have another .* in row 1, token 0"):
        loss(policy_outputs(), exact)


def test_on_policy_ratio_is_one_without_reading_old_log_probs():
    rows = policy_rows()
    del rows.batch["old_log_probs"]
    on_policy = Config()
    assert "old_log_probs" not in actor_columns(on_policy)
    outputs = policy_outputs()
    loss, metrics = actor_loss(on_policy, 0.0, num_tokens=3, num_sequences=2)(outputs, rows)
    assert loss.item() == 0.0  # exactly (-1 - 1 + 2) / 3
    assert metrics["actor/ppo_kl"] == 0.0
    loss.backward()
    assert outputs["log_probs"].grad.flatten().tolist() == pytest.approx([-1 / 3, -1 / 3, 2 / 3, 0])


def test_entropy_is_subtracted_and_kl_added_with_coefficients():
    # k2: half of the squared differences 0.2, 0, 0.
    settings = config({"entropy_coef": 0.1}, {"kl_in_loss": True, "kl_estimator": "k2"})
    outputs = policy_outputs()
    loss, metrics = actor_loss(settings, 0.25, num_tokens=3, num_sequences=2)(outputs, policy_rows())
    policy = (-1 - 1.2 + 2 * math.exp(0.1)) / 3
    assert metrics["actor/kl_loss"] == pytest.approx(0.02 / 3)
    assert loss.item() == pytest.approx(policy - 0.1 * (2.1 / 3) + 0.25 * (0.02 / 3))
    loss.backward()
    assert outputs["entropies"].grad.flatten().tolist() == pytest.approx([-0.1 / 3, -0.1 / 3, -0.1 / 3, 0])


@pytest.mark.parametrize("epochs", [1, 2])
def test_importance_weights_multiply_the_kl_of_each_token(epochs):
    weighted = {"kl_in_loss": True, "kl_importance_weight": True}
    rows = policy_rows(ref_log_probs=[[-1.2, -1.7], [-3.0, 0.0]])
    ratios = [1.0, math.exp(0.5), math.exp(0.1)] if epochs == 2 else [1.0, 1.0, 1.0]
    log_rs = [-0.2, 0.3, 0.0]  # log(reference / policy)
    gradients = []
    for algorithm in (weighted, {}):
        outputs = policy_outputs()
        settings = config({"epochs": epochs}, algorithm)
        loss, metrics = actor_loss(settings, 0.25, num_tokens=3, num_sequences=2)(outputs, rows)
        loss.backward()
        gradients.append(outputs["log_probs"].grad.flatten()[:3])
        if algorithm:
            kls = [ratio * (math.exp(r) - 1 - r) for ratio, r in zip(ratios, log_rs, strict=True)]
            assert metrics["actor/kl_loss"].item() == pytest.approx(sum(kls) / 3, rel=1e-12)
    of_kl = (gradients[0] - gradients[1]).tolist()
    slopes = [-0.25 * ratio * r / 3 for ratio, r in zip(ratios, log_rs, strict=True)]
    assert of_kl == pytest.approx(slopes, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (-1 - 1.2 + 2 * math.exp(0.1)) / 3),
        ("token-sum", -1 - 1.2 + 2 * math.exp(0.1)),
        ("seq-mean-token-sum", (-1 - 1.2 + 2 * math.exp(0.1)) / 2),
        ("seq-mean-token-mean", ((-1 - 1.2) / 2 + 2 * math.exp(0.1)) / 2),
    ],
)
def test_the_configured_aggregation_is_used(mode, expected):
    loss = actor_loss(config({"loss_aggregation": mode}), 0.0, num_tokens=3, num_sequences=2)
    assert loss(policy_outputs(), policy_rows())[0].item() == pytest.approx(expected)


def test_masked_values_do_not_change_loss_or_gradient():
    nan = float("nan")
    rows = policy_rows(
        old_log_probs=[[-1.0, -2.5], [-3.1, nan]],
        ref_log_probs=[[-1.2, -2.0], [-3.0, nan]],
        rollout_log_probs=[[-1.1, -2.0], [-3.4, nan]],
        advantages=[[1.0, 1.0], [-2.0, nan]],
    )
    loss = actor_loss(config(algorithm={"kl_in_loss": True}), 0.25, num_tokens=3, num_sequences=2)
    outputs = policy_outputs()
    total, metrics = loss(outputs, rows)
    total.backward()
    assert total.item() == pytest.approx(loss(policy_outputs(), policy_rows())[0].item())
    assert outputs["log_probs"].grad.isfinite().all()
    assert all(math.isfinite(value) for value in metrics.values())


def test_losses_read_only_their_declared_columns():
    plain = ("advantages", "response_mask", "rollout_log_probs")
    for settings, more in (
        (Config(), ()),
        (config(), ("old_log_probs",)),
        (config(algorithm={"kl_in_loss": True}), ("old_log_probs", "ref_log_probs")),
    ):
        assert actor_columns(settings) == tuple(sorted((*plain, *more)))
        rows = policy_rows().select(batch_keys=list(actor_columns(settings)))
        loss = actor_loss(settings, 0.1, num_tokens=3, num_sequences=2)
        expected = loss(policy_outputs(), rows)[0].item()
        rows.batch["response_mask"] = MASK.long()  # an integer mask equals a bool mask
        assert loss(policy_outputs(), rows)[0].item() == expected


def test_the_value_loss_is_the_maximum_of_clipped_and_unclipped():
    # value_clip 0.5. Old values 0, new 1, -0.2, 3 (masked: 9); returns 2, 0, 3.
    outputs = {"values": torch.tensor([[1.0, -0.2], [3.0, 9.0]], requires_grad=True)}
    rows = DataProto.from_dict(
        {
            "response_mask": MASK,
            "values": torch.tensor([[0.0, 0.0], [0.0, 0.0]]),
            "returns": torch.tensor([[2.0, 0.0], [3.0, 0.0]]),
        }
    )
    loss, metrics = critic_loss(Config(), num_tokens=3, num_sequences=2)(outputs, rows)
    assert loss.item() == pytest.approx((0.5 * 1.5**2 + 0.5 * 0.2**2 + 0.5 * 2.5**2) / 3)
    assert metrics == pytest.approx({"critic/clipfrac": 2 / 3})
    by_sequence = critic_loss(Config(critic={"loss_aggregation": "seq-mean-token-sum"}), 3, 2)(outputs, rows)[0]
    assert by_sequence.item() == pytest.approx(loss.item() * 3 / 2)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_no_policy_loss_reads_the_device(name):
    needs = {"decoupled-ppo": {"old_log_probs_from": "rollout"}}.get(name, {})
    mode = "seq-mean-token-mean" if name == "gspo" else "token-mean"
    settings = config(
        {"policy_loss": name, "entropy_coef": 0.1, "loss_aggregation": mode, **needs}, {"kl_in_loss": True}
    )
    rows, outputs = policy_rows(), policy_outputs()
    rows.batch["selected_tokens"] = MASK
    outputs = {column: values.detach().to("meta").requires_grad_() for column, values in outputs.items()}
    loss, metrics = actor_loss(settings, 0.25, num_tokens=3, num_sequences=2)(outputs, rows.to("meta"))
    loss.backward()
    assert {value.device.type for value in (loss, *metrics.values())} == {"meta"}
    assert {value.ndim for value in (loss, *metrics.values())} == {0}


def test_the_mismatch_of_log_probs_is_that_of_each_token_and_finite():
    values = log_prob_mismatch_of(torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.5, -2.0, -1000.0]]))
    assert values[MEAN].tolist() == [[0.5, 0.0, 1000.0]]
    assert values[SHARE].tolist() == [[1.0, 0.0, 1.0]]
    assert values[KL][0].tolist() == pytest.approx([math.exp(0.5) - 1 - 0.5, 0.0, math.exp(20) - 21])
