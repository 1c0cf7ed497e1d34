"""Tiny runs with every advantage estimator and policy loss, dynamic sampling, reward shaping and user functions."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridflow.algorithms import POLICY_LOSSES
from hybridflow.algorithms.declarations import LOSSES
from hybridflow.checkpoint import open_checkpoint
from hybridflow.observability import read_jsonl

OFF_POLICY = ("actor.mini_batch_size=4", "actor.epochs=2")
OVERLAYS = sorted((Path(__file__).parents[2] / "recipes" / "algorithms").glob("*.toml"))
MINI_BATCHES = ["actor.mini_batch_size=4"]
DISTILLATION = ("distillation", "distillation_forward_kl", "distillation_reverse_kl")
TINY_CHANGES = {
    **dict.fromkeys(("gspo", "gmpo", "cispo", "sapo", "dppo", "decoupled_ppo", "clip_cov", "kl_cov"), MINI_BATCHES),
    "dapo": [*MINI_BATCHES, "reward.overlong_buffer=4"],
    "ppo": [*MINI_BATCHES, "critic.mini_batch_size=4"],
    "gdpo": ["reward.function={task}/reward.py:with_format"],
    **{name: ["teacher.model_path={task}/teacher"] for name in DISTILLATION},
    "pass_at_k": ["algorithm.advantage_kwargs.success_score=0.5"],
}
"""Changes that adapt the recipes, written for batches of 64, to 8 prompts and 12 response tokens."""

USER_FUNCTIONS = """
def advantages(*, scores, group_ids, factor=1.0):
    advantages = (factor * (scores - scores.mean()))[:, None]
    return advantages, advantages

def of_values(*, values, scores, response_mask):
    advantages = scores[:, None] - values
    return advantages, scores[:, None].expand_as(values)

def loss(*, log_probs, advantages, sharpness):
    return -sharpness * advantages * log_probs
"""


@pytest.fixture
def train(task, tmp_path, hybridflow):
    """Return a function that runs two steps in the directory `name` and returns the metric rows and the weights."""

    def run(*changes, name="run", recipes=()):
        directory = tmp_path / name
        changes = [change.replace("{task}", str(task)) for change in changes]
        outcome = hybridflow(
            *("train", task / "rl.toml", *recipes, f"trainer.run_dir={directory}", "trainer.total_steps=2"),
            *("trainer.val_before_train=false", "data.val_files=[]", *changes),
        )
        assert outcome.status == 0, outcome.err
        weights = open_checkpoint(directory / "checkpoints" / "step_000002").load("actor", "model")
        return read_jsonl(directory / "metrics.jsonl"), weights

    return run


def are_equal(a, b) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", OVERLAYS, ids=lambda recipe: recipe.stem)
def test_every_algorithm_recipe_trains(train, recipe):
    rows, _ = train(*TINY_CHANGES.get(recipe.stem, []), recipes=[recipe])
    assert all(math.isfinite(row["actor/loss"]) for row in rows)
    assert any(row["actor/grad_norm"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_trains_independently_of_micro_batch_size(train, name):
    aggregation = (*LOSSES[name].aggregations, "token-mean")[0]
    changes = (f"actor.policy_loss={name}", f"actor.loss_aggregation={aggregation}", *OFF_POLICY)
    rows, weights = train(*changes, name="small")
    whole_rows, whole_weights = train(*changes, "memory.max_tokens_per_micro_batch=4096")
    for row, other in zip(rows, whole_rows, strict=True):
        assert row["actor/grad_norm"] > 0
        assert row["actor/policy_loss"] == pytest.approx(other["actor/policy_loss"], abs=2e-6)
        assert row["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-4)
    for tensor in weights:
        torch.testing.assert_close(weights[tensor], whole_weights[tensor], rtol=0, atol=2e-4)


def test_remax_baseline_is_the_greedy_response_score(train):
    rows, _ = train("algorithm.advantage=remax", "rollout.temperature=0", "rollout.group_size=1")
    assert [row["critic/advantages/max"] for row in rows] == [0, 0]  # each response is its own baseline
    assert [row["critic/advantages/min"] for row in rows] == [0, 0]


def test_dynamic_sampling_keeps_groups_with_different_scores(train, tmp_path):
    (tmp_path / "coarse.py").write_text("def score(*, solution_str, **_):\n    return len(solution_str) % 2\n")
    coarse = (f"reward.function={tmp_path / 'coarse.py'}:score", "rollout.group_size=2")
    plain, _ = train(*coarse, name="plain")
    assert plain[0]["critic/zero_variance_groups"] > 0
    rows, _ = train(*coarse, "algorithm.filter_groups=true")
    for row in rows:
        assert row["sampling/rounds"] > 1
        assert row["sampling/differing_groups"] < 1
        assert row["critic/zero_variance_groups"] == row["sampling/filled_groups"] == 0


def test_dynamic_sampling_stops_after_max_sampling_rounds(task, train, tmp_path):
    (tmp_path / "flat.py").write_text("def score(**_):\n    return 0.5\n")
    rows, _ = train(
        "algorithm.filter_groups=true",
        "algorithm.max_sampling_rounds=2",
        f"reward.function={tmp_path / 'flat.py'}:score",
    )
    for row in rows:
        assert row["sampling/rounds"] == 2
        assert row["sampling/filled_groups"] == row["critic/zero_variance_groups"] == 1
    assert rows[0]["training/epoch"] == 0


def test_overlong_penalty_lowers_the_score(train):
    plain, _ = train("trainer.total_steps=2", name="plain")
    rows, _ = train("reward.overlong_buffer=12", "reward.overlong_penalty=6.0")
    before, after = plain[0], rows[0]
    penalty = 6.0 * before["response_length/mean"] / 12
    assert after["critic/score/mean"] == pytest.approx(before["critic/score/mean"] - penalty, abs=1e-5)


def test_score_is_the_weighted_sum_of_several_rewards(train):
    plain, _ = train(name="plain")
    rows, _ = train("reward.weights={num_words = 0.5, score = 2.0}")
    expected = 2 * plain[0]["critic/score/mean"] + 0.5 * plain[0]["reward/num_words/mean"]
    assert rows[0]["critic/score/mean"] == pytest.approx(expected, abs=1e-5)


def test_weight_of_a_missing_reward_is_an_error(task, tmp_path, hybridflow):
    outcome = hybridflow(
        "train", task / "rl.toml", f"trainer.run_dir={tmp_path / 'run'}", "reward.weights={correct = 1.0}"
    )
    assert outcome.status == 1
    assert "whose 'correct' is missing or not a finite number" in outcome.err


def test_kl_in_reward_changes_score_based_advantages(train):
    rows, weights = train("algorithm.kl_in_reward=true", "algorithm.kl_coef=0.5", *OFF_POLICY)
    assert "critic/kl" in rows[0]
    assert not are_equal(weights, train(*OFF_POLICY, name="without")[1])


def test_rejected_samples_give_zero_gradient(train):
    reject_all = "algorithm.rollout_reject={token_ratio = [100.0, 200.0]}"
    rows, _ = train(reject_all)
    assert rows[0]["rollout_correction/rejected_share"] == 1
    assert rows[0]["actor/grad_norm"] == 0
    rows, _ = train("algorithm.rollout_weights=sequence", name="weighted")
    assert rows[0]["rollout_correction/weight_mean"] == pytest.approx(1, abs=1e-3)
    assert rows[0]["rollout_correction/effective_share"] == pytest.approx(1, abs=1e-3)


def test_user_functions_replace_built_in_algorithms(train, tmp_path):
    (tmp_path / "mine.py").write_text(USER_FUNCTIONS)
    mine = tmp_path / "mine.py"
    rows, _ = train(
        *(f"algorithm.advantage={mine}:advantages", "algorithm.advantage_kwargs.factor=2.0"),
        *(f"actor.policy_loss={mine}:loss", "actor.policy_loss_kwargs.sharpness=0.5", "rollout.group_size=1"),
    )
    assert rows[0]["actor/grad_norm"] > 0
    rows, _ = train(f"algorithm.advantage={mine}:of_values", "critic.always=true", name="with_critic")
    assert "critic/loss" in rows[0]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            ["actor.policy_loss=sapo", "actor.policy_loss_kwargs.tau_pos=-1"],
            "tau_pos=-1 is out of range; it must be a number above 0",
        ),
        (["algorithm.advantage=pass@k", "algorithm.advantage_kwargs.k=0"], "k=0 is not valid"),
    ],
)
def test_out_of_range_parameter_is_rejected_before_writing_files(task, tmp_path, hybridflow, changes, problem):
    outcome = hybridflow("train", task / "rl.toml", f"trainer.run_dir={tmp_path / 'run'}", *changes)
    assert outcome.status == 2
    assert problem in outcome.err
    assert not (tmp_path / "run").exists()


def test_user_function_parameter_without_a_value_is_rejected_at_start(task, tmp_path, hybridflow):
    (tmp_path / "mine.py").write_text(USER_FUNCTIONS)
    outcome = hybridflow(
        *("train", task / "rl.toml", f"trainer.run_dir={tmp_path / 'run'}"),
        f"actor.policy_loss={tmp_path / 'mine.py'}:loss",
    )
    assert outcome.status == 2
    assert "takes sharpness, which is neither a column of the batch nor a key of [actor]" in outcome.err
    assert not (tmp_path / "run").exists()


def test_teacher_vocabulary_may_be_larger_and_limits_top_k(train, task, tmp_path, hybridflow):
    model = AutoModelForCausalLM.from_pretrained(task / "teacher")
    num_tokens = model.config.vocab_size
    model.resize_token_embeddings(num_tokens + 40, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[num_tokens:] = 3.0  # likely tokens that the policy does not have
    shutil.copytree(task / "teacher", tmp_path / "padded")
    model.save_pretrained(tmp_path / "padded")
    teacher = [f"teacher.model_path={tmp_path}/padded", "teacher.loss=forward_kl", "algorithm.advantage=none"]
    rows, _ = train(*teacher, f"teacher.top_k={num_tokens}")
    assert all(math.isfinite(row["actor/teacher_loss"]) for row in rows)
    outcome = hybridflow("train", task / "rl.toml", f"trainer.run_dir={tmp_path}/none", *teacher, "teacher.top_k=9999")
    assert (
        f"teacher.top_k=9999, but policy and teacher share {num_tokens} tokens; use at most {num_tokens}" in outcome.err
    )
    assert not (tmp_path / "none").exists()
