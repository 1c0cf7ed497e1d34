"""Values of the algorithm and its models that another value makes wrong."""

import pytest

ADAPTIVE = "algorithm.advantage=gae algorithm.kl_in_reward=true algorithm.kl_controller=adaptive"
CONTRADICTIONS = [
    ("trainer.lag=1", "samples of older weights, and no key corrects for it; set actor.policy_loss = 'decoupled-ppo'"),
    (
        "rollout.backend=vllm rollout.quantization=fp8",
        "rollout.quantization='fp8' samples from other probabilities, and no key corrects for it; set actor",
    ),
    ("data.train_batch_size=6 actor.mini_batch_size=4", "divide data.train_batch_size=6; use 1, 2, 3 or 6"),
    ("data.train_batch_size=1 critic.mini_batch_size=2", "not divide data.train_batch_size=1; use 1"),
    ("rollout.group_size=1", "makes every advantage of algorithm.advantage='grpo' 0; use a group_size of 2"),
    ("algorithm.advantage=pass@k algorithm.advantage_kwargs.k=9", "kwargs.k=9 exceeds rollout.group_size=8"),
    (
        "algorithm.filter_groups=true rollout.group_size=1 algorithm.advantage=gae",
        "algorithm.filter_groups=true with rollout.group_size=1 discards every group",
    ),
    ("algorithm.advantage=gdpo", "algorithm.advantage='gdpo' compares several rewards, but reward.weights={} names"),
    ("algorithm.advantage=distillation", "='distillation' needs a teacher, but teacher.model_path is empty; set it"),
    ("algorithm.advantage=none", "algorithm.advantage='none' leaves no term in the loss; set teacher.loss and"),
    ("teacher.model_path=x", "teacher.model_path='x' has no effect: teacher.loss='none' and algorithm.advantage="),
    ("algorithm.rollout_reject={token_k3=[0.5,0.1]}", "algorithm.rollout_reject.token_k3=[0.5, 0.1] is an empty range"),
    ("algorithm.kl_importance_weight=true", "weights the KL in the loss, but algorithm.kl_in_loss=false; set"),
    ("algorithm.kl_controller=adaptive", "algorithm.kl_controller='adaptive' adjusts the KL in the reward"),
    (f"{ADAPTIVE} algorithm.kl_coef=0", "algorithm.kl_coef=0 stays 0 under algorithm.kl_controller='adaptive'"),
    ("critic.warmup_steps=5", "critic.warmup_steps=5, but algorithm.advantage='grpo' has no critic"),
    ("algorithm.advantage=gae critic.warmup_steps=5 trainer.total_steps=5", "trainer.total_steps=5; use at most 4"),
]


@pytest.mark.parametrize(("overrides", "problem"), CONTRADICTIONS)
def test_a_contradiction_of_learning_shows_both_values_and_the_fix(only_problem, overrides, problem):
    assert problem in only_problem(overrides)
