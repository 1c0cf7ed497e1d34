"""Losses and gradients through the whole engine equal those of TRL's GRPO (tests/fixtures/make_trl_grpo_fixture.py)."""

import pytest
import torch

from hybridflow.config import Config
from hybridflow.protocol import DataProto
from hybridflow.workers.losses import actor_loss

AGGREGATION = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum",
}
SETTINGS = ["grpo", "grpo_kl", "dapo", "dapo_kl", "bnpo_kl", "dr_grpo_kl", "dapo_kl_delta"]


@pytest.fixture(scope="module")
def directory(recorded_grpo, tmp_path_factory):
    path = tmp_path_factory.mktemp("trl_model")
    recorded_grpo.build_model().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def rows(recorded_grpo) -> DataProto:
    recorded = recorded_grpo.tensors
    masks = recorded["prompt_mask"], recorded["completion_mask"]
    return DataProto.from_dict(
        {
            "input_ids": torch.cat([recorded["prompt_ids"], recorded["completion_ids"]], dim=1),
            "attention_mask": torch.cat(masks, dim=1),
            "response_mask": masks[1].bool(),
            "advantages": recorded["advantages"].double()[:, None],
            "old_log_probs": recorded["old_log_probs"],
            "ref_log_probs": recorded["ref_log_probs"],
            "rollout_log_probs": recorded["old_log_probs"],
        }
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_loss_and_gradient_equal_trl_to_ten_digits(
    recorded_grpo, directory, rows, build_engine, use_float64_throughout, setting
):
    recorded, settings = recorded_grpo.record, recorded_grpo.record["settings"][setting]
    config = Config(
        actor={
            "epochs": 2,  # so that old log-probs are read and not replaced by the new ones
            "loss_aggregation": AGGREGATION[settings["loss_type"]],
            "clip_ratio_low": recorded["clip"]["epsilon"],
            "clip_ratio_high": recorded["clip"]["epsilon_high"],
            "clip_ratio_dual": settings.get("delta"),
        },
        algorithm={"kl_in_loss": settings["beta"] > 0},
    )
    mask = rows.batch["response_mask"]
    loss = actor_loss(config, settings["beta"], int(mask.sum()), len(mask))
    # Without momentum the optimizer's first moment is the gradient.
    engine = build_engine(directory, dtype="float64", max_tokens=15, betas=(0.0, 0.999), clip_grad_norm=1e9)
    use_float64_throughout(engine.model)
    result = engine.update(rows, loss, with_entropy=True)
    divisor = recorded["max_completion_length"] if settings["loss_type"] == "dr_grpo" else 1
    expected = recorded_grpo.grads(setting)
    ours = {name: moments["exp_avg"] / divisor for name, moments in engine.state_dict()["optimizer"].items()}
    assert ours.keys() == expected.keys()
    difference = torch.cat([(ours[name] - expected[name]).flatten() for name in expected])
    size = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    assert float(difference.norm() / size) < 1e-10
    assert result.loss / divisor == pytest.approx(settings["loss"], rel=1e-10, abs=0)
