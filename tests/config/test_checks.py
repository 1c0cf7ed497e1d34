import pytest

from hybridflow.algorithms.declarations import ESTIMATORS, LOSSES, Estimator, Loss
from hybridflow.config import Config, DataConfig, check, load_config
from hybridflow.config.checks import contradictions
from hybridflow.config.environment import wrong_variable
from hybridflow.errors import ConfigError

VLLM, RAY, LOOSE = "rollout.backend=vllm", "controller.backend=ray", "trainer.deterministic=false"
LAG = "trainer.lag=1 algorithm.rollout_weights=token"
ADAPTIVE = "algorithm.advantage=gae algorithm.kl_in_reward=true algorithm.kl_controller=adaptive"
LENT = f"{RAY} placement.roles.rollout=generate placement.pools={{learn=[1],generate=[2]}}"
# Words in a row are separated by spaces; a value has none.
POOLS = "controller.backend=ray placement.pools={a=[1],b=[1,2]} placement.roles.rollout=b"
STREAM = "trainer.stream=true"
ON_B = "placement.roles.rollout=b"
EPISODES = "environment.classes={a='a.py:A'} environment.max_rows=2"
CONTRADICTIONS = [
    ("trainer.lag=1", "samples of older weights, and no key corrects for it; set actor.policy_loss = 'decoupled-ppo'"),
    ("controller.address=x", "controller.address is set, but controller.backend='local' has one process"),
    ("placement.pools={a=[1]}", "placement.pools is set, but controller.backend='local' has one process"),
    ("recovery.slow_factor=1.4", "equal ranks differ by less; use at least 1.5, or 0"),
    (f"{EPISODES} actor.loss_aggregation=seq-mean-token-sum", "would count the rows of an episode as sequences"),
    (f"{EPISODES} reward.function=a.py:b", "reward.function='a.py:b' and environment.classes both give the rewards"),
    (f"{EPISODES} environment.weights={{a=1,walk=1}}", "environment.weights.walk weighs no environment"),
    (f"{EPISODES} environment.weights={{a=0}}", "environment.weights are all 0"),
    ("environment.classes={a='a.py'}", "environment.classes.a='a.py' names no class"),
    (f"{EPISODES} data.chat_template=false", "data.chat_template=False is not supported"),
    ("data.train_batch_size=6 actor.mini_batch_size=4", "divide data.train_batch_size=6; use 1, 2, 3 or 6"),
    ("data.train_batch_size=1 critic.mini_batch_size=2", "not divide data.train_batch_size=1; use 1"),
    ("rollout.group_size=1", "makes every advantage of algorithm.advantage='grpo' 0; use a group_size of 2"),
    ("rollout.temperature=0", "rollout.temperature=0 gives the same response 8 times (rollout.group_size=8)"),
    ("rollout.max_running_sequences=7", "rollout.group_size=8 exceeds rollout.max_running_sequences=7"),
    ("validation.group_size=2000 validation.temperature=1", "exceeds rollout.max_running_sequences=1024"),
    ("validation.group_size=4", "validation.temperature=0 gives the same response 4 times"),
    ("algorithm.advantage=pass@k algorithm.advantage_kwargs.k=9", "kwargs.k=9 exceeds rollout.group_size=8"),
    (
        "algorithm.filter_groups=true rollout.group_size=1 algorithm.advantage=gae",
        "algorithm.filter_groups=true with rollout.group_size=1 discards every group",
    ),
    (
        "rollout.on_new_weights=retract",
        "='retract' is for sequences that run while the policy learns, but trainer.lag=0",
    ),
    (f"{RAY} {LOOSE} placement.min_processes={{other=1}}", "other=1 is of no defined pool; defined pools: main"),
    (
        f"{RAY} {LOOSE} placement.min_processes={{main=3}} controller.num_workers=2",
        "placement.min_processes.main=3 is more than the 2 processes of the pool",
    ),
    (f"{LOOSE} placement.min_processes={{main=1}}", "placement.min_processes.main=1 needs controller.backend = 'ray'"),
    (
        f"{RAY} {LOOSE} placement.min_processes={{main=1}} recovery.max_restarts=0",
        "placement.min_processes.main=1 needs recovery.max_restarts of 1 or more",
    ),
    (f"{RAY} placement.min_processes={{main=1}}", "main=1 lets the number of ranks change, and sums over other"),
    ("algorithm.advantage=gdpo", "algorithm.advantage='gdpo' compares several rewards, but reward.weights={} names"),
    ("algorithm.advantage=distillation", "='distillation' needs a teacher, but teacher.model_path is empty; set it"),
    ("algorithm.advantage=none", "algorithm.advantage='none' leaves no term in the loss; set teacher.loss and"),
    ("teacher.model_path=x", "teacher.model_path='x' has no effect: teacher.loss='none' and algorithm.advantage="),
    (
        "algorithm.advantage=optimal-token-baseline actor.old_log_probs_from=rollout",
        "algorithm.advantage='optimal-token-baseline' needs a column of the trainer's log-prob pass",
    ),
    ("reward.weights={a=1.0} reward.model_path=x", "reward.weights={'a': 1.0} needs the numbers of a reward"),
    ("reward.overlong_buffer=600", "reward.overlong_buffer=600 exceeds data.max_response_length=512"),
    (
        "algorithm.rollout_weights=token actor.old_log_probs_from=rollout",
        "makes the ratio of algorithm.rollout_weights",
    ),
    ("actor.policy_loss=gspo", "actor.policy_loss='gspo' is not defined for actor.loss_aggregation='token-mean'; use"),
    ("actor.policy_loss=gmpo actor.loss_aggregation=seq-mean-token-sum", "='gmpo' is not defined for actor.loss_a"),
    (
        "actor.policy_loss=decoupled-ppo algorithm.rollout_weights=token",
        "algorithm.rollout_weights='token' both weight",
    ),
    ("actor.policy_loss=decoupled-ppo actor.old_log_probs_from=rollout", "actor.policy_loss='decoupled-ppo' always 1"),
    ("algorithm.rollout_reject={token_k3=[0.5,0.1]}", "algorithm.rollout_reject.token_k3=[0.5, 0.1] is an empty range"),
    ("algorithm.kl_in_reward=true algorithm.advantage=pass@k", "'pass@k', which does not compare sums of rewards"),
    ("algorithm.kl_importance_weight=true", "weights the KL in the loss, but algorithm.kl_in_loss=false; set"),
    ("algorithm.kl_controller=adaptive", "algorithm.kl_controller='adaptive' adjusts the KL in the reward"),
    (f"{ADAPTIVE} algorithm.kl_coef=0", "algorithm.kl_coef=0 stays 0 under algorithm.kl_controller='adaptive'"),
    ("actor.old_log_probs_from=rollout rollout.top_p=0.9", "actor.old_log_probs_from='rollout' with rollout.top_p=0.9"),
    ("memory.max_tokens_per_micro_batch=1023", "data.max_response_length=512; use at least 1024"),
    ("critic.warmup_steps=5", "critic.warmup_steps=5, but algorithm.advantage='grpo' has no critic"),
    ("algorithm.advantage=gae critic.warmup_steps=5 trainer.total_steps=5", "trainer.total_steps=5; use at most 4"),
    ("trainer.val_every=5", "trainer.val_every=5, but data.val_files is empty"),
    (
        f"{RAY} placement.pools={{main=[1],small=[1]}} placement.roles.critic=small",
        "placement.pools.small has no role of this run; place one of actor_rollout, rollout, reward on it in",
    ),
    (f"{RAY} controller.num_workers=2 controller.gpus_per_worker=0.5", "of one pool on a GPU, but controller.num_w"),
    (f"{POOLS} controller.gpus_per_worker=0.5", "several ranks of one pool on a GPU, but placement.pools.b="),
    (
        f"{RAY} placement.pools={{a=[1],b=[1,1]}} placement.roles.rollout=b rollout.weight_sync=ipc",
        "shares memory of one node, but the rollout engines are on 2 (placement.pools.b=[1, 1])",
    ),
    ("memory.offload={critic='idle'}", "memory.offload.critic='idle', but algorithm.advantage='grpo' has no critic"),
    ("memory.offload={reference='idle'}", "memory.offload.reference='idle', but there is no separate reference model"),
    ("memory.offload={reward='host'}", "memory.offload.reward='host', but reward.model_path is empty"),
    ("memory.offload={rollout='idle'}", "memory.offload.rollout='idle', but a rollout engine frees its memory"),
    ("rollout.stop_strings=['a','']", "rollout.stop_strings=['a', ''] has an empty string, which ends every"),
    ("rollout.tensor=2", "rollout.tensor=2 is not supported with rollout.backend='embedded'; use 'vllm'"),
    (f"{VLLM} model.dtype=float64", "model.dtype='float64' is not supported by rollout.backend='vllm'"),
    (f"{VLLM} rollout.max_model_len=100", "rollout.max_model_len=100 cannot hold data.max_prompt_length=512"),
    (f"{VLLM} rollout.tensor=2", "rollout.tensor=2 needs several processes, but controller.backend='local'"),
    (f"{VLLM} {RAY} controller.num_workers=4 rollout.tensor=3", "=3 does not divide controller.num_workers=4"),
    (
        f"{VLLM} {RAY} placement.pools={{a=[2],b=[3]}} placement.roles.rollout=b rollout.tensor=2",
        "rollout.tensor=2 does not divide placement.pools.b=3",
    ),
    (f"{RAY} controller.num_workers=2 parallel.tensor=2", "=2 splits layers over ranks, but rollout.backend="),
    (f"{RAY} placement.pools={{a=[2]}} placement.roles.rollout=a", "placement.roles.rollout='a' is the actor's pool,"),
    ("controller.parts=measured", "controller.parts='measured' assigns rows to ranks by timings"),
]


@pytest.mark.parametrize(("overrides", "problem"), CONTRADICTIONS)
def test_a_contradiction_shows_both_values_and_the_fix(overrides, problem):
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides.split())
    first, line = str(caught.value).split("\n  ")
    assert first == "1 problem(s) in overrides:"
    assert problem in line


@pytest.mark.parametrize(
    "overrides",
    [
        "data.train_batch_size=6 actor.mini_batch_size=3 critic.mini_batch_size=6",
        "algorithm.advantage=gae rollout.group_size=1 rollout.temperature=0",
        "algorithm.kl_in_loss=true algorithm.kl_importance_weight=true algorithm.kl_estimator=k2",
        "algorithm.kl_in_loss=true algorithm.kl_in_reward=true",
        "memory.max_tokens_per_micro_batch=1024",
        "actor.old_log_probs_from=rollout rollout.temperature=0.5",
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
        "recovery.slow_factor=1.5",
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
