import pytest

from hybridflow.algorithms.declarations import ESTIMATORS, LOSSES, Estimator, Loss
from hybridflow.config import Config, DataConfig, check, load_config
from hybridflow.config.checks import contradictions
from hybridflow.config.environment import wrong_variable
from hybridflow.errors import ConfigError

VLLM, RAY, LOOSE = "rollout.backend=vllm", "controller.backend=ray", "trainer.deterministic=false"
LAG = "trainer.lag=1 algorithm.rollout_weights=token"
STREAM = "trainer.stream=true"
ON_B = "placement.roles.rollout=b"
EPISODES = "environment.classes={a='a.py:A'} environment.max_rows=2"


@pytest.mark.parametrize(
    "overrides",
    [
        "data.train_batch_size=6 actor.mini_batch_size=3 critic.mini_batch_size=6",
        "algorithm.advantage=gae rollout.group_size=1 rollout.temperature=0",
        "algorithm.kl_in_loss=true algorithm.kl_importance_weight=true algorithm.kl_estimator=k2",
        "algorithm.kl_in_loss=true algorithm.kl_in_reward=true",
        "memory.max_tokens_per_micro_batch=1024",
        "actor.old_log_probs_from=rollout rollout.temperature=0.5",
        "actor.old_log_probs_from=rollout rollout.temperature=0 rollout.group_size=1 algorithm.advantage=gae",
        "actor.old_log_probs_from=rollout actor.policy_loss=decoupled-ppo",
        "actor.old_log_probs_from=rollout algorithm.rollout_weights=token",
        f"{EPISODES} rollout.stop_strings=['a'] algorithm.advantage=remax",
        "algorithm.advantage=gae critic.warmup_steps=4 trainer.total_steps=5",
        f"controller.parts=measured {LOOSE}",
        f"{VLLM} {RAY} controller.num_workers=4 parallel.tensor=4 rollout.tensor=2",
        f"{RAY} placement.pools={{a=[2],b=[1]}} placement.roles.rollout=b parallel.tensor=2",
        "trainer.lag=1 actor.policy_loss=decoupled-ppo",
        "trainer.lag=1 algorithm.rollout_weights=sequence",
        f"{LAG} algorithm.rollout_weight_outside=mask",
        "trainer.lag=1 algorithm.rollout_reject={sequence_mean_k3=[0.0,0.01]}",
        "trainer.lag=1 actor.old_log_probs_from=rollout",
        f"{LAG} {STREAM} algorithm.filter_groups=true",
        f"{STREAM} {RAY} placement.pools={{learn=[2]}} controller.balance=none",
        f"{STREAM} {RAY} placement.pools={{learn=[2]}} controller.balance=groups",
        f"{STREAM} {RAY} placement.pools={{learn=[2]}} parallel.sequence=2",
        f"{STREAM} {RAY} placement.pools={{learn=[2,2]}} parallel.sequence=2",
        "data.train_batch_size=100000000000",
        f"{EPISODES} algorithm.rollout_weights=sequence algorithm.rollout_reject={{sequence_ratio=[0.5,2.0]}}",
        f"rollout.replay=x rollout.on_new_weights=retract {LAG} placement.pools={{a=[1],b=[1]}} {ON_B}",
    ],
)
def test_consistent_settings_pass(overrides):
    assert contradictions(load_config(None, overrides.split())) == []


@pytest.mark.parametrize(
    ("overrides", "is_on_policy"),
    [
        ("", True),
        ("data.train_batch_size=8 actor.mini_batch_size=8", True),
        ("data.train_batch_size=8 actor.mini_batch_size=4", False),
        ("actor.epochs=2", False),
        ("actor.old_log_probs_from=rollout", False),
    ],
)
def test_one_optimizer_step_per_batch_is_on_policy(overrides, is_on_policy):
    assert load_config(None, overrides.split()).is_on_policy is is_on_policy


@pytest.mark.parametrize(
    ("overrides", "learns_in_parts"),
    [
        ("", True),
        ("algorithm.advantage=gae algorithm.whiten_advantages=false critic.epochs=2", True),
        ("actor.mini_batch_size=64 data.train_batch_size=64", True),
        ("actor.old_log_probs_from=rollout", True),
        ("trainer.stream=false", False),
        ("actor.epochs=2", False),
        ("actor.mini_batch_size=16", False),
        ("algorithm.advantage=gpg", False),
        ("algorithm.advantage=reinforce++", False),
        ("algorithm.advantage=a.py:f", False),
        ("algorithm.advantage=gae", False),
        ("algorithm.filter_groups=true", False),
        ("actor.policy_loss=kl-cov", False),
    ],
)
def test_a_streamed_batch_is_learned_in_parts_unless_they_are_compared(overrides, learns_in_parts):
    assert load_config(None, [STREAM, *overrides.split()]).learns_in_parts is learns_in_parts


def test_a_config_of_python_is_checked_and_all_problems_are_reported():
    check(Config())
    with pytest.raises(ConfigError, match=r"1 problem\(s\) in the configuration:\n  memory.max_tokens_per_micro_batch"):
        check(Config(data=DataConfig(max_response_length=20000)))
    with pytest.raises(ConfigError, match=r"2 problem\(s\)"):
        load_config(None, ["rollout.group_size=1", "critic.warmup_steps=1"])


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ("teacher_log_probs", "actor.policy_loss='ppo' needs a teacher, but teacher.model_path is empty"),
        ("reward_components", "actor.policy_loss='ppo' compares several rewards, but reward.weights={} names none"),
    ],
)
def test_declared_columns_of_a_policy_loss_are_checked(monkeypatch, column, problem):
    monkeypatch.setitem(LOSSES, "ppo", Loss("ppo:ppo_policy_loss", extra_columns=(column,)))
    assert [line.partition(";")[0] for line in contradictions(Config())] == [problem]


def test_declared_columns_decide_the_models_of_a_run(monkeypatch):
    assert (Config().uses_critic, Config().uses_reference) == (False, False)
    monkeypatch.setitem(ESTIMATORS, "grpo", Estimator("grpo:grpo_advantages", extra_columns=("values",)))
    monkeypatch.setitem(LOSSES, "ppo", Loss("ppo:ppo_policy_loss", extra_columns=("ref_log_probs",)))
    assert (Config().uses_critic, Config().uses_reference) == (True, True)


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"A": "x"}, None),
        ([1], "[1] is not a mapping from names of variables to texts"),
        ({"A": 3}, "A=3 is not a text"),
        ({"A": "x\0"}, "A='x\\x00' is not a text"),
        ({"A": "\ud800"}, "A='\\ud800' is not a text"),
        ({"1A": "x"}, "'1A' is not the name of a variable; expected letters, digits and _"),
        ({3: "x"}, "3 is not the name of a variable; expected letters, digits and _"),
        ({"A": "x", "RANK": "1"}, "RANK is set by the backend for each rank; leave it out"),
    ],
)
def test_variables_of_worker_processes_are_named_texts(environment, problem):
    assert wrong_variable(environment) == problem
