"""Whole tiny runs: what they write, and what their numbers must be."""

import json
import logging
import math
import shutil

import pytest
import torch

from hybridflow.checkpoint import open_checkpoint
from hybridflow.config import load_config
from hybridflow.kernels import use_kernels
from hybridflow.observability import METRICS, find_metric, read_jsonl

TIMES = ("timing_s/gen", "timing_s/reward", "timing_s/step", "timing_s/update_actor", "timing_per_token_ms/gen")

RECIPES = {"train": "rl.toml", "sft": "sft.toml", "dpo": "pairs.toml", "reward-model": "pairs.toml"}


@pytest.fixture
def train(task, tmp_path, hybridflow):
    """Runs GRPO with changes in a directory `name`; returns the directory."""

    def run(*changes, name="run", command="train"):
        recipe = task / RECIPES[command]
        outcome = hybridflow(command, recipe, f"trainer.run_dir={tmp_path / name}", *changes)
        assert outcome.status == 0, outcome.err
        return tmp_path / name

    return run


def weights(run, step, component="actor"):
    return open_checkpoint(run / "checkpoints" / f"step_{step:06d}").load(component, "model")


def test_every_metric_of_a_run_is_in_the_glossary_and_the_other_way_round(tiny, task, train):
    runs = [
        train("algorithm.kl_in_loss=true", "validation.group_size=2", "validation.temperature=1", name="grpo"),
        train(*tiny.PPO, name="ppo"),
        *(train("trainer.total_steps=1", name=name, command=name) for name in ("sft", "dpo", "reward-model")),
        train("trainer.total_steps=1", "algorithm.rollout_weights=token", name="weighed"),
        train("trainer.total_steps=1", f"teacher.model_path={task}/teacher", "teacher.loss=forward_kl", name="taught"),
        train("trainer.total_steps=1", "algorithm.filter_groups=true", name="filtered"),
    ]
    names = {name for run in runs for row in read_jsonl(run / "metrics.jsonl") for name in row} - {"step"}
    assert [name for name in sorted(names) if find_metric(name) is None] == []
    found = {id(find_metric(name)) for name in names}
    unseen = [name for name, metric in METRICS.items() if id(metric) not in found]
    sync = ["weight_sync/bytes", "weight_sync/probe_diff_mean", "weight_sync/probe_diff_max"]
    assert unseen == [*sync, "balance/imbalance_before", "balance/imbalance_after"]  # of several ranks, or two engines


def test_a_grpo_run_writes_its_rows_samples_and_checkpoint(train):
    run = train()
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert "val/score/mean" in rows[0]
    assert "val/score/mean" in rows[6]
    assert not any("val/score/mean" in row for row in rows[1:6])
    assert all(name in rows[1] for name in (*TIMES, "mfu/actor", "actor/lr", "memory_bytes/resident"))
    assert [row["training/epoch"] for row in rows[1:]] == [0, 0, 0, 1, 1, 1]
    assert rows[1]["response_length/mean"] > 0
    assert rows[1]["reward/num_words/mean"] > 0
    samples = read_jsonl(run / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [step for step in range(1, 7) for _ in range(4)]
    assert set(samples[0]) == {"step", "prompt", "response", "score"}
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000006"]


def test_one_optimizer_step_a_batch_is_on_policy(train):
    for row in read_jsonl(train("trainer.total_steps=2") / "metrics.jsonl")[1:]:
        assert row["actor/ppo_kl"] == 0.0
        assert row["actor/clipfrac"] == 0.0
        assert row["rollout/log_prob_mismatch"] < 1e-5
        assert "timing_s/old_log_probs" not in row  # the ratio is 1, whatever they are


def test_the_rollouts_log_probs_can_be_the_old_ones(train):
    row = read_jsonl(train("trainer.total_steps=1", "actor.old_log_probs_from=rollout") / "metrics.jsonl")[1]
    assert "timing_s/old_log_probs" not in row
    assert 0 < abs(row["actor/ppo_kl"]) < 1e-5  # the engine's rounding is not the trainer's


def test_several_optimizer_steps_a_batch_move_the_ratio(train):
    row = read_jsonl(train("trainer.total_steps=1", "actor.mini_batch_size=4") / "metrics.jsonl")[1]
    assert row["actor/ppo_kl"] != 0.0
    assert "timing_s/old_log_probs" in row


def test_only_the_critic_learns_in_its_warm_up(tiny, train):
    run = train(*tiny.PPO, "trainer.save_every=1", "trainer.keep_checkpoints=9")
    rows = read_jsonl(run / "metrics.jsonl")[1:]
    assert ["actor/loss" in row for row in rows] == [False, False, True, True, True, True]
    assert all("critic/loss" in row for row in rows)
    start, warm, after = weights(run, 1), weights(run, 2), weights(run, 3)
    assert all(torch.equal(start[name], warm[name]) for name in start)
    assert not any(torch.equal(warm[name], after[name]) for name in start)
    values = weights(run, 1, "critic")["score.weight"], weights(run, 2, "critic")["score.weight"]
    assert not torch.equal(*values)


def test_schedules_reach_to_the_last_update(tiny, train):
    row = read_jsonl(train(*tiny.PPO) / "metrics.jsonl")[-1]
    # the actor: 4 steps of 4 updates, 6 of them warm-up; the last one is number 15, counted from 0
    assert row["actor/lr"] == pytest.approx(1e-3 * (1 - (15 - 6) / (16 - 6)))
    # the critic: 6 steps of 4 updates, the last one is number 23
    assert row["critic/lr"] == pytest.approx(1e-3 * 0.5 * (1 + math.cos(math.pi * 23 / 24)))


def test_the_kl_in_the_reward_steers_its_coefficient(tiny, train):
    rows = read_jsonl(train(*tiny.PPO) / "metrics.jsonl")[1:]
    # The actor is its reference until its first update, in step 3: the KL is 0 and far below its target, so each of
    # 24 samples on a horizon of 50 takes 0.2 / 50 of the coefficient.
    assert [row["critic/kl"] for row in rows[:3]] == [0.0, 0.0, 0.0]
    assert rows[3]["critic/kl"] > 0
    by_hand = [0.1, 0.1 * 0.904, 0.1 * 0.904**2, 0.1 * 0.904**3]
    assert [row["critic/kl_coeff"] for row in rows[:4]] == pytest.approx(by_hand)
    for row in rows[:3]:
        assert row["critic/rewards/mean"] == pytest.approx(row["critic/score/mean"])
    assert rows[3]["critic/rewards/mean"] < rows[3]["critic/score/mean"]


def test_the_kl_in_the_loss_is_added_with_its_weight(train):
    run = train("algorithm.kl_in_loss=true", "algorithm.kl_coef=0.5", "trainer.total_steps=3", "actor.optimizer.lr=0.1")
    rows = read_jsonl(run / "metrics.jsonl")[1:]
    assert rows[0]["actor/kl_loss"] == 0.0
    assert rows[2]["actor/kl_loss"] > 0.1
    for row in rows:
        assert row["actor/loss"] == pytest.approx(row["actor/policy_loss"] + 0.5 * row["actor/kl_loss"])
        assert "critic/kl" not in row


def test_groups_without_a_difference_teach_grpo_nothing(train, tmp_path):
    reward = tmp_path / "constant.py"
    reward.write_text("def score(**_):\n    return 0.5\n")
    run = train(
        f"reward.function={reward}:score",
        "actor.optimizer.weight_decay=0",
        "trainer.total_steps=2",
        "trainer.save_every=1",
    )
    for row in read_jsonl(run / "metrics.jsonl")[1:]:
        assert row["critic/zero_variance_groups"] == 1.0
        assert row["critic/advantages/max"] == row["critic/advantages/min"] == 0.0
        assert row["actor/loss"] == row["actor/grad_norm"] == 0.0
    before, after = weights(run, 1), weights(run, 2)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_reward_that_fails_can_count_as_a_score(train, tmp_path):
    reward = tmp_path / "failing.py"
    reward.write_text("def score(solution_str, **_):\n    return 1 / (len(solution_str) % 2)\n")
    run = train(
        *(f"reward.function={reward}:score", "reward.on_error=zero", "reward.error_score=-1"),
        *("reward.max_failure_rate=1.0", "trainer.total_steps=1"),
    )
    row = read_jsonl(run / "metrics.jsonl")[1]
    failed = row["reward/error_rate"]
    assert 0 < failed < 1
    assert row["critic/score/mean"] == pytest.approx((1 - failed) - failed)


def test_validation_changes_no_number_of_training(tiny, task, train):
    """Not even where the reward draws from the process's random numbers."""
    noisy = f"reward.function={task}/reward.py:noisy_score"
    often = train(noisy, "trainer.val_every=1", "validation.group_size=2", "validation.temperature=1", name="often")
    never = train(noisy, "data.val_files=[]", name="never")
    training = [
        [{name: value for name, value in row.items() if not name.startswith("val/")} for row in tiny.metrics_of(run)]
        for run in (often, never)
    ]
    assert training[0][0] == {"step": "0"}
    assert training[0][1:] == training[1]
    files = [tiny.results_of(run, 6) for run in (often, never)]
    assert all(files[0][name] == files[1][name] for name in ("actor.safetensors", "actor.json", "samples"))


def test_validation_repeats_itself(train):
    """The noise of its samples is the same at every step, so only the weights can change its figures."""
    run = train("actor.optimizer.lr=0", "trainer.val_every=1", "validation.group_size=2", "validation.temperature=1")
    rows = read_jsonl(run / "metrics.jsonl")
    assert len({row["val/score/mean"] for row in rows}) == 1


def test_sft_learns_and_validates_before_during_and_after(train):
    run = train("offline.optimizer.lr=1e-2", "trainer.epochs=8", "trainer.val_every=12", command="sft")
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "sft/val_loss" in row] == [0, 12, 24]
    assert rows[0]["sft/val_loss"] > 4 > rows[12]["sft/val_loss"] > rows[24]["sft/val_loss"]
    assert rows[1]["sft/loss"] > 2 * rows[24]["sft/loss"]
    assert "timing_s/update_sft" in rows[1]
    assert "timing_s/validation" in rows[12]


def test_the_first_configuration_is_kept_when_a_run_is_resumed(task, train):
    run = train("trainer.total_steps=1")
    train("trainer.total_steps=2", "actor.optimizer.lr=1e-4")
    starts = json.loads((run / "run.json").read_text())["starts"]
    assert [start["after_step"] for start in starts] == [0, 1]
    assert [start["config"]["actor.optimizer.lr"] for start in starts] == [1e-3, 1e-4]
    assert {"started_at", "command", "versions", "git", "hardware", "matmul_peak_flops_per_s"} <= set(starts[0])
    assert "lr = 0.0001" in (run / "config.toml").read_text()


def test_tensorboard_gets_the_rows_too(train):
    run = train("trainer.total_steps=1", 'trainer.trackers=["tensorboard"]')
    assert [path.name.startswith("events.out") for path in (run / "tensorboard").iterdir()] == [True]


def test_memory_is_logged_around_each_heavy_method_at_debug_level(train, caplog):
    with caplog.at_level(logging.DEBUG, logger="hybridflow"):
        train("trainer.total_steps=1", "data.val_files=[]")
    for method in ("__init__", "generate_sequences", "update_actor", "save"):
        for when in ("before", "after"):
            assert f"{when} ActorRolloutWorker.{method}, rank 0: resident " in caplog.text
    assert " GiB, peak_resident " in caplog.text


@pytest.mark.parametrize(
    "changes", [(), ("algorithm.advantage=gae", "algorithm.kl_in_reward=true")], ids=["grpo", "ppo"]
)
def test_a_run_with_compiled_kernels_is_that_with_pytorchs_own_to_rounding(changes, train):
    try:
        compiled = train(*changes, name="compiled")
        plain = train(*changes, "controller.compiled_kernels=false", name="plain")
    finally:
        use_kernels(True)  # a setting of the process, which other tests share
    ours, theirs = (read_jsonl(run / "metrics.jsonl") for run in (compiled, plain))
    assert len(ours) == 7  # validation before the first step, and six steps
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert one["critic/score/mean"] == other["critic/score/mean"]  # the same tokens were drawn
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
    pairs = zip(weights(compiled, 6).values(), weights(plain, 6).values(), strict=True)
    assert 0 < max(float((one - other).abs().max()) for one, other in pairs) < 1e-3


def test_an_automatic_token_budget_is_found_once_and_kept_by_the_run(train, tmp_path):
    options = ("memory.max_tokens_per_micro_batch=auto", "trainer.total_steps=2")
    run = train(*options, "--stop-after", "1", name="auto")
    kept = json.loads((run / "token_budgets.json").read_text())
    assert kept["budgets"].keys() == {"actor_rollout"}
    budget = kept["budgets"]["actor_rollout"]
    assert budget >= kept["layout"]["lengths"][0] + kept["layout"]["lengths"][1]
    kept["budgets"]["actor_rollout"] = budget + 1
    (run / "token_budgets.json").write_text(json.dumps(kept))
    train(*options, name="auto")
    assert json.loads((run / "token_budgets.json").read_text()) == kept
    kept["budgets"]["actor_rollout"] = -5
    (run / "token_budgets.json").write_text(json.dumps(kept))
    with pytest.raises(AssertionError, match=r"token_budgets\.json' is damaged \(-5 tokens for actor_rollout\)"):
        train(*options, "trainer.total_steps=3", name="auto")
    (run / "token_budgets.json").write_text("{")
    with pytest.raises(AssertionError, match=r"token_budgets\.json' is damaged"):
        train(*options, "trainer.total_steps=3", name="auto")


def test_a_run_with_adapters_compares_with_itself_and_is_exported_merged(train, task, tmp_path, hybridflow):
    run = train(
        *("lora.rank=2", "lora.alpha=4", "algorithm.kl_in_loss=true", "actor.optimizer.lr=0.01"),
        *("actor.mini_batch_size=4", "trainer.total_steps=2"),
        name="adapted",
    )
    rows = read_jsonl(run / "metrics.jsonl")
    assert rows[1]["actor/kl_loss"] >= 0
    assert rows[2]["actor/kl_loss"] > 0  # the adapters have moved from where they were off
    methods = {event["where"] for event in read_jsonl(run / "trace" / "calls.jsonl")}
    assert "ActorRolloutWorker.compute_ref_log_probs" in methods
    assert not [method for method in methods if method.startswith("ReferenceWorker")]
    state = open_checkpoint(run / "checkpoints" / "step_000002").load("actor")
    assert all(".lora_" in name for name in state["model"])
    assert hybridflow("export", run, tmp_path / "merged").status == 0
    assert hybridflow("export", run, tmp_path / "adapter", "--adapter").status == 0
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert hybridflow("evaluate", task / "rl.toml", f"model.path={tmp_path / 'merged'}").status == 0


def test_a_reward_model_scores_in_place_of_a_function(train, task, tmp_path):
    """Its scores are its own on the samples that the run wrote."""
    from transformers import AutoModelForSequenceClassification

    policy = load_config(task / "rl.toml").model.path
    reward_model = shutil.copytree(policy, tmp_path / "reward_model")
    (reward_model / "model.safetensors").unlink()
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(reward_model)
    run = train(f"reward.model_path={reward_model}", "reward.function=", "trainer.total_steps=2", name="reward_model")
    scores = {sample["score"] for sample in read_jsonl(run / "samples.jsonl")}
    assert len(scores) > 4
    methods = {event["where"] for event in read_jsonl(run / "trace" / "calls.jsonl")}
    assert {"RewardModelWorker.score", "RewardModelWorker.score_validation"} <= methods
    assert not [method for method in methods if method.startswith("RewardWorker")]
