from inspect import unwrap

import pytest
import torch

from hybridflow import algorithms
from hybridflow.errors import AlgorithmError

NAN, INF = float("nan"), float("inf")
ONE, GOOD, BAD = torch.zeros(2), torch.zeros(2, 3), torch.zeros(2, 4)
MASK, IDS = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
SCORES = {"covariances": ONE, "seed": 0}
VALID = {
    "gae_advantages": {"token_level_rewards": GOOD, "values": GOOD, "response_mask": MASK}
    | {"gamma": 1.0, "lam": 1.0, "whiten_advantages": False},
    "grpo_advantages": {"scores": ONE, "group_ids": IDS, "norm_by_std": True},
    "gpg_advantages": {"scores": ONE, "group_ids": IDS, "norm_by_std": True},
    "kl_cov_policy_loss": {"log_probs": GOOD, "old_log_probs": GOOD, "advantages": GOOD, "response_mask": MASK}
    | {"selected_tokens": MASK},
    "kl_loss": {"log_probs": GOOD, "ref_log_probs": GOOD, "response_mask": MASK, "kl_estimator": "k1"},
    "apply_kl_penalty": {"token_level_scores": GOOD, "old_log_probs": GOOD, "ref_log_probs": GOOD}
    | {"response_mask": MASK, "kl_coef": 0.1, "kl_estimator": "k1"},
    "ppo_policy_loss": {"log_probs": GOOD, "old_log_probs": GOOD, "advantages": GOOD, "response_mask": MASK}
    | {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_dual": 3.0},
    "clipped_value_loss": {"new_values": GOOD, "values": GOOD, "returns": GOOD, "response_mask": MASK}
    | {"value_clip": 0.5},
    "aggregate_loss": {"token_losses": GOOD, "response_mask": MASK, "mode": "token-mean"}
    | {"num_tokens": 6, "num_sequences": 2},
    "masked_mean": {"values": GOOD, "mask": MASK},
    "select_clip_cov": SCORES,
    "select_kl_cov": SCORES,
    "log_probs_and_entropy_from_logits": {"logits": GOOD, "labels": IDS},
    "log_probs_from_logits": {"logits": GOOD, "labels": IDS},
    "top_log_probs_from_logits": {"logits": torch.zeros(2, 11), "k": 1},
    "teacher_kl": {"candidate_log_probs": GOOD[None] - 2, "teacher_candidate_log_probs": GOOD[None] - 2}
    | {"direction": "reverse_kl"},
    "dpo_loss": {f"{side}{kind}_log_probs": ONE for side in ("chosen", "rejected") for kind in ("", "_ref")}
    | {"beta": 0.1},
    "AdaptiveKLController": {"coef": 1.0, "target": 1.0, "horizon": 1},
    "FixedKLController": {"coef": 1.0},
}


@pytest.mark.parametrize("name", VALID)
def test_columns_of_equal_shapes_are_accepted_and_others_named(name):
    function, columns = unwrap(getattr(algorithms, name)), VALID[name]
    function(**columns)
    tensors = {key: value for key, value in columns.items() if isinstance(value, torch.Tensor)}
    for key, value in tensors.items() if len(tensors) > 1 and name not in ("teacher_kl", "dpo_loss") else ():
        with pytest.raises(AlgorithmError, match=rf"({key}|mask) has shape \("):
            function(**{**columns, key: torch.cat([value, value[:1]])})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gae_advantages", {"gamma": 1.5}, "gamma=1.5"),
        ("gae_advantages", {"gamma": NAN}, "gamma=nan"),
        ("gae_advantages", {"lam": -0.1}, "lam=-0.1"),
        ("gae_advantages", {"token_level_rewards": BAD}, r"rewards has shape \(2, 4\), but values has shape \(2, 3\)"),
        ("gae_advantages", {"values": GOOD[0]}, r"values has shape \(3,\); it must be \(batch, response_len\)"),
        ("grpo_advantages", {"scores": ONE / 0, "group_ids": IDS + 8}, r"scores\[0\]=nan is not.*group_ids\[0\]=8"),
        ("grpo_advantages", {"scores": ONE[:, None]}, r"scores has shape \(2, 1\); it must be \(batch\)"),
        ("grpo_advantages", {"group_ids": ONE}, r"group_ids is torch\.float32"),
        ("grpo_advantages", {"epsilon": -1}, "epsilon=-1"),
        ("kl_loss", {"kl_estimator": "k4"}, "no KL estimator 'k4'; valid are 'k1', 'k2', 'k3', 'abs'"),
        ("kl_loss", {"kl_estimator": "k3", "old_log_probs": BAD}, r"old_log_probs has shape \(2, 4\), but log_probs"),
        ("apply_kl_penalty", {"kl_coef": -1}, "kl_coef=-1"),
        ("ppo_policy_loss", {"clip_ratio_low": 1.5}, r"clip_ratio_low=1\.5 is out of range"),
        ("ppo_policy_loss", {"clip_ratio_high": -0.1}, r"clip_ratio_high=-0\.1 is out of range"),
        ("ppo_policy_loss", {"clip_ratio_dual": 1.0}, r"clip_ratio_dual=1\.0 is .* must be a number above 1"),
        ("ppo_policy_loss", {"advantages": BAD}, r"advantages has shape \(2, 4\), but log_probs has shape \(2, 3\)"),
        ("ppo_policy_loss", {"advantages": ONE}, r"advantages has shape \(2,\)"),
        ("ppo_policy_loss", {"response_mask": MASK.long()}, r"response_mask is torch\.int64"),
        ("clipped_value_loss", {"value_clip": 0}, "value_clip=0 is out of range; it must be a number above 0"),
        ("aggregate_loss", {"mode": "mean"}, "no mode 'mean'; valid are 'token-mean', 'token-sum', "),
        ("aggregate_loss", {"mode": "seq-mean-token-sum-norm"}, "max_response_length=None is not valid"),
        ("aggregate_loss", {"num_tokens": 6.0}, r"num_tokens=6\.0 is not valid"),
        ("aggregate_loss", {"num_tokens": 5}, "num_tokens=5, but this part alone has 6"),
        ("aggregate_loss", {"num_sequences": -2}, "num_sequences=-2"),
        ("aggregate_loss", {"num_sequences": 1}, "num_sequences=1, but this part alone has 2"),
        ("masked_mean", {"mask": GOOD}, r"torch\.float32; it must be torch\.bool"),
        ("masked_mean", {"values": MASK.long()}, r"torch\.int64; it must be floating point"),
        ("kl_cov_policy_loss", {"penalty_coef": -1}, "penalty_coef=-1"),
        ("gpg_advantages", {"epsilon": -1}, "epsilon=-1"),
        ("select_kl_cov", {"selected_share": 1.5}, r"selected_share=1\.5"),
        ("select_clip_cov", {"selected_share": -0.5}, r"selected_share=-0\.5"),
        ("log_probs_and_entropy_from_logits", {"temperature": 0.0}, "temperature=0.0"),
        ("log_probs_and_entropy_from_logits", {"temperature": INF}, "temperature=inf"),
        ("log_probs_and_entropy_from_logits", {"chunk_size": 0}, "=0"),
        ("log_probs_and_entropy_from_logits", {"logits": GOOD[:, :0]}, r"shape \(2, 0\)"),
        ("log_probs_and_entropy_from_logits", {"logits": GOOD.long()}, r"torch\.int64"),
        ("log_probs_from_logits", {"labels": torch.tensor([2, -100])}, "from -100 to 2, but the vocabulary has 3"),
        ("log_probs_from_logits", {"labels": IDS + 3}, "from 3 to 3, but the vocabulary has 3"),
        ("log_probs_from_logits", {"labels": IDS.int()}, r"labels is torch\.int32"),
        ("top_log_probs_from_logits", {"k": 0}, "use 1 to 11"),
        ("top_log_probs_from_logits", {"k": 12}, "use 1 to 11"),
        ("top_log_probs_from_logits", {"k": 6, "below": 5}, "use 1 to 5"),
        ("top_log_probs_from_logits", {"k": 12, "below": 20}, "use 1 to 11"),
        ("teacher_kl", {"direction": "jsd"}, "not one of reverse_kl, forward_kl"),
        *(("dpo_loss", {"beta": beta}, "must be above 0") for beta in (0.0, -1.0, NAN)),
        ("AdaptiveKLController", {"coef": -1.0}, "coef=-1.0"),
        ("AdaptiveKLController", {"target": 0.0}, "target=0.0"),
        ("AdaptiveKLController", {"horizon": 0}, "horizon=0"),
        ("FixedKLController", {"coef": -1}, "coef=-1"),
    ],
)
def test_an_argument_that_is_not_valid_is_named(name, changes, message):
    with pytest.raises(AlgorithmError, match=message):
        unwrap(getattr(algorithms, name))(**{**VALID[name], **changes})
