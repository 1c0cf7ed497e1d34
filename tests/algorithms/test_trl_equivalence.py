"""Losses and gradients equal those recorded from TRL's GRPO (tests/fixtures/make_trl_grpo_fixture.py)."""

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms import aggregate_loss, grpo_advantages, kl_loss, log_probs_from_logits, ppo_policy_loss

AGGREGATION = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum",
}
SETTINGS = ["grpo", "grpo_kl", "dapo", "dapo_kl", "bnpo_kl", "dr_grpo_kl", "dapo_kl_delta"]
ALL_ROWS = [list(range(12))]


def loss_and_gradient(recorded, setting: str, micro_batches: list[list[int]]):
    """Return our loss, summed over micro-batches of rows that are cut to their longest response."""
    settings, batch = recorded.record["settings"][setting], recorded.tensors
    model = recorded.build_model()
    response_mask = batch["completion_mask"].bool()
    total = 0.0
    for rows in micro_batches:
        width = int(response_mask[rows].sum(1).max())
        responses, mask = batch["completion_ids"][rows, :width], response_mask[rows, :width]
        logits = model(
            input_ids=torch.cat([batch["prompt_ids"][rows], responses], dim=1),
            attention_mask=torch.cat([batch["prompt_mask"][rows], mask], dim=1),
            use_cache=False,
        ).logits
        log_probs = log_probs_from_logits(logits[:, -width - 1 : -1], responses, chunk_size=16)
        token_losses = ppo_policy_loss(
            log_probs=log_probs,
            old_log_probs=batch["old_log_probs"][rows, :width],
            advantages=batch["advantages"][rows].to(log_probs.dtype).unsqueeze(1),
            response_mask=mask,
            clip_ratio_low=recorded.record["clip"]["epsilon"],
            clip_ratio_high=recorded.record["clip"]["epsilon_high"],
            clip_ratio_dual=settings.get("delta"),
        ).token_losses
        if settings["beta"]:
            token_losses = token_losses + settings["beta"] * kl_loss(
                log_probs=log_probs,
                ref_log_probs=batch["ref_log_probs"][rows, :width],
                response_mask=mask,
                kl_estimator="k3",
            )
        loss = aggregate_loss(
            token_losses,
            mask,
            AGGREGATION[settings["loss_type"]],
            num_tokens=int(response_mask.sum()),
            num_sequences=int(response_mask.any(1).sum()),
        )
        if settings["loss_type"] == "dr_grpo":  # a constant divisor: the maximum response length
            loss = loss / recorded.record["max_completion_length"]
        loss.backward()
        total += loss.item()
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    return total, grads


def flat(grads: dict[str, Tensor]) -> Tensor:
    return torch.cat([grads[name].flatten() for name in sorted(grads)])


def relative_errors(recorded, setting: str, loss: float, grads: dict[str, Tensor]) -> tuple[float, float]:
    settings, expected = recorded.record["settings"][setting], flat(recorded.grads(setting))
    assert len(grads) == len(recorded.grads(setting)) == 26
    loss_error = abs(loss - settings["loss"]) / abs(settings["loss"])
    return loss_error, float((flat(grads) - expected).norm() / expected.norm())


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("micro_batches", [ALL_ROWS, [[0, 7], [11, 2, 4, 8], [1, 3, 5, 6, 9], [10]]])
def test_loss_and_gradient_equal_to_ten_digits_in_micro_batches(recorded_grpo, setting, micro_batches):
    loss, grads = loss_and_gradient(recorded_grpo, setting, micro_batches)
    loss_error, grad_error = relative_errors(recorded_grpo, setting, loss, grads)
    assert loss_error < 1e-10
    assert grad_error < 1e-10


@pytest.mark.parametrize("setting", ["grpo_kl", "dapo_kl"])
def test_loss_and_gradient_equal_in_float32(recorded_grpo_float32, setting):
    loss, grads = loss_and_gradient(recorded_grpo_float32, setting, ALL_ROWS)
    loss_error, grad_error = relative_errors(recorded_grpo_float32, setting, loss, grads)
    assert loss_error < 1e-5
    assert grad_error < 1e-5


def test_advantages_equal(recorded_grpo):
    advantages, _ = grpo_advantages(
        scores=recorded_grpo.tensors["rewards"],
        group_ids=torch.arange(12) // 4,
        norm_by_std=True,
        epsilon=1e-4,
    )
    expected = recorded_grpo.tensors["advantages"]
    torch.testing.assert_close(advantages[:, 0], expected, rtol=1e-6, atol=0)
    assert expected[8:].tolist() == [0, 0, 0, 0]
