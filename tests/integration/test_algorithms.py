"""Steps with every advantage estimator and policy loss, dynamic sampling, reward shaping and user functions."""

import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridflow.runtime.observe import read_jsonl

USER_FUNCTIONS = """
def advantages(*, scores, group_ids, factor=1.0):
    advantages = (factor * (scores - scores.mean()))[:, None]
    return advantages, advantages

def of_values(*, values, scores, response_mask):
    advantages = scores[:, None] - values
    return advantages, scores[:, None].expand_as(values)

def loss(*, log_probs, advantages, sharpness):
    return -sharpness * advantages * log_probs

def coarse(*, solution_str, **_):
    return len(solution_str) % 2

def flat(**_):
    return 0.5
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(USER_FUNCTIONS)
    return tmp_path / "mine.py"


@pytest.fixture
def step(run):
    def step(*changes, name="run", steps=1):
        directory = run(*changes, f"trainer.total_steps={steps}", name=name)
        return read_jsonl(directory / "metrics.jsonl")[-1]

    return step


def test_remax_baseline_is_the_greedy_response_score(step):
    row = step("algorithm.advantage=remax", "rollout.temperature=0", "rollout.group_size=1")
    assert row["critic/advantages/max"] == row["critic/advantages/min"] == 0  # each response is its own baseline


def test_a_kl_penalty_may_be_in_the_reward_and_in_the_loss(step):
    in_reward = ("algorithm.kl_in_reward=true", "actor.mini_batch_size=4")
    one, two = step(*in_reward, name="one", steps=2), step(*in_reward, "algorithm.kl_in_loss=true", name="two", steps=2)
    assert "actor/kl_loss" not in one
    assert two["actor/kl_loss"] > 0 < two["critic/kl"]
    assert two["critic/kl"] != one["critic/kl"]  # the loss of the first step had both


def test_log_probs_of_greedy_rollouts_are_those_of_the_trainer(step):
    greedy = ("rollout.temperature=0", "rollout.group_size=1", "algorithm.advantage=gae", "actor.epochs=2")
    rows = [step(*greedy, f"actor.old_log_probs_from={each}", name=each) for each in ("trainer", "rollout")]
    assert rows[0]["rollout/log_prob_mismatch_max"] < 1e-4
    assert rows[1]["actor/loss"] == pytest.approx(rows[0]["actor/loss"], rel=1e-3)


def test_a_correction_of_rollouts_that_are_the_old_policy_changes_nothing(step):
    old = ("actor.old_log_probs_from=rollout", "actor.mini_batch_size=4")
    changes = ("trainer.seed=0", "algorithm.rollout_weights=sequence", "actor.policy_loss=decoupled-ppo")
    plain, *others = [step(*old, change, name=f"run{number}") for number, change in enumerate(changes)]
    for name in ("actor/loss", "actor/grad_norm"):
        assert [row[name] for row in others] == [plain[name]] * 2


def test_dynamic_sampling_keeps_groups_with_different_scores(step, mine):
    coarse = (f"reward.function={mine}:coarse", "rollout.group_size=2")
    assert step(*coarse, name="plain")["critic/zero_variance_groups"] > 0
    row = step(*coarse, "algorithm.filter_groups=true")
    assert row["sampling/rounds"] > 1
    assert row["sampling/differing_groups"] < 1
    assert row["critic/zero_variance_groups"] == row["sampling/filled_groups"] == 0


def test_dynamic_sampling_stops_after_max_sampling_rounds(step, mine):
    changes = ("algorithm.filter_groups=true", "algorithm.max_sampling_rounds=2", f"reward.function={mine}:flat")
    row = step(*changes)
    assert (row["sampling/rounds"], row["training/epoch"]) == (2, 0)
    assert row["sampling/filled_groups"] == row["critic/zero_variance_groups"] == 1


def test_scores_are_weighted_sums_less_a_penalty_for_length(step):
    plain = step(name="plain")
    weighted = step("reward.weights={num_words = 0.5, score = 2.0}", name="weighted")
    expected = 2 * plain["critic/score/mean"] + 0.5 * plain["reward/num_words/mean"]
    assert weighted["critic/score/mean"] == pytest.approx(expected, abs=1e-5)
    shaped = step("reward.overlong_buffer=12", "reward.overlong_penalty=6.0")
    penalty = 6.0 * plain["response_length/mean"] / 12
    assert shaped["critic/score/mean"] == pytest.approx(plain["critic/score/mean"] - penalty, abs=1e-5)


def test_rejected_samples_give_zero_gradient_and_fresh_ones_weigh_one(step):
    row = step("algorithm.rollout_reject={token_ratio = [100.0, 200.0]}")
    assert (row["rollout_correction/rejected_share"], row["actor/grad_norm"]) == (1, 0)
    row = step("algorithm.rollout_weights=sequence", name="weighted")
    assert row["rollout_correction/weight_mean"] == pytest.approx(1, abs=1e-3)
    assert row["rollout_correction/effective_share"] == pytest.approx(1, abs=1e-3)


def test_user_functions_replace_built_in_algorithms(step, mine):
    row = step(
        *(f"algorithm.advantage={mine}:advantages", "algorithm.advantage_kwargs.factor=2.0"),
        *(f"actor.policy_loss={mine}:loss", "actor.policy_loss_kwargs.sharpness=0.5", "rollout.group_size=1"),
    )
    assert row["actor/grad_norm"] > 0
    assert "critic/loss" in step(f"algorithm.advantage={mine}:of_values", "critic.always=true", name="with_critic")


@pytest.mark.parametrize(
    ("changes", "problem", "status"),
    [
        (["actor.policy_loss=sapo", "actor.policy_loss_kwargs.tau_pos=-1"], "tau_pos=-1 is out of range; it must", 2),
        (["algorithm.advantage=pass@k", "algorithm.advantage_kwargs.k=0"], "k=0 is not valid", 2),
        (["reward.weights={correct = 1.0}"], "whose 'correct' is missing or not a finite number", 1),
    ],
)
def test_a_parameter_that_does_not_fit_is_an_error(run, mine, changes, problem, status):
    directory = run(*(change.replace("{mine}", str(mine)) for change in changes), status=status, problem=problem)
    assert directory.exists() == (status == 1)


def test_teacher_vocabulary_may_be_larger_and_limits_top_k(step, run, task, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(task / "teacher")
    num_tokens = model.config.vocab_size
    model.resize_token_embeddings(num_tokens + 40, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[num_tokens:] = 3.0  # likely tokens that the policy does not have
    shutil.copytree(task / "teacher", tmp_path / "padded")
    model.save_pretrained(tmp_path / "padded")
    teacher = [f"teacher.model_path={tmp_path}/padded", "teacher.loss=forward_kl", "algorithm.advantage=none"]
    assert math.isfinite(step(*teacher, f"teacher.top_k={num_tokens}")["actor/teacher_loss"])
    problem = f"teacher.top_k=9999, but policy and teacher share {num_tokens} tokens; use at most {num_tokens}"
    assert not run(*teacher, "teacher.top_k=9999", name="none", status=2, problem=problem).exists()
