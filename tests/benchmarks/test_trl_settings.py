from pathlib import Path

import pytest

from hybridflow.config import load_config


@pytest.fixture
def settings_of(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from support.trl_settings import trl_settings

    return lambda *overrides: trl_settings(load_config(None, overrides))


def test_trl_gets_our_loss_and_optimizer(settings_of):
    assert settings_of(
        *("rollout.temperature=0.7", "actor.loss_aggregation=seq-mean-token-mean", "data.max_response_length=64"),
        *("actor.clip_ratio_low=0.1", "actor.clip_ratio_high=0.3", "actor.clip_ratio_dual=none"),
        *("algorithm.kl_in_loss=true", "algorithm.kl_coef=0.05", "actor.optimizer.lr=2e-3"),
        *("actor.optimizer.betas=[0.8, 0.95]", "actor.optimizer.epsilon=1e-6", "actor.optimizer.weight_decay=0.2"),
        "actor.optimizer.clip_grad_norm=0.5",
    ) == {
        "temperature": 0.7,
        "loss_type": "grpo",
        "epsilon": 0.1,
        "epsilon_high": 0.3,
        "delta": None,
        "beta": 0.05,
        "use_bias_correction_kl": False,
        "max_completion_length": 64,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-6,
        "weight_decay": 0.2,
        "max_grad_norm": 0.5,
    }


def test_trl_has_a_kl_only_in_the_loss_and_weights_it_as_we_do(settings_of):
    settings = settings_of("algorithm.kl_coef=0.05")
    assert (settings["beta"], settings["loss_type"], settings["delta"]) == (0.0, "dapo", 3.0)
    weighted = settings_of("algorithm.kl_in_loss=true", "algorithm.kl_importance_weight=true")
    assert weighted["use_bias_correction_kl"] is True


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.loss_aggregation=seq-mean-token-sum", "loss_aggregation='seq-mean-token-sum' has no equal in TRL; use"),
        ("actor.optimizer.schedule=linear", "schedule='linear' with warmup_steps=0 cannot be compared with TRL; use"),
        ("actor.optimizer.warmup_steps=3", "schedule='constant' with warmup_steps=3 cannot be compared with TRL; use"),
    ],
)
def test_settings_that_trl_lacks_are_an_error(settings_of, override, message):
    with pytest.raises(RuntimeError, match=message):
        settings_of(override)
