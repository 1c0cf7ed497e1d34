"""Tiny runs: the files they write and the values of their metrics."""

import itertools
import json
import logging
import math
import shutil
import time

import pytest
import torch

from hybridflow.checkpoint import open_checkpoint
from hybridflow.config import load_config
from hybridflow.kernels import use_kernels
from hybridflow.observability import METRICS, find_metric, read_jsonl
from hybridflow.observability.glossary.episodes import EPISODES

TIMES = ("timing_s/gen", "timing_s/reward", "timing_s/step", "timing_s/update_actor", "timing_per_token_ms/gen")


@pytest.fixture
def train(task, tmp_path, hybridflow):
    """Return a function that runs GRPO with changes in the directory `name` and returns the directory."""

    def run(*changes, name="run"):
        outcome = hybridflow("train", task / "rl.toml", f"trainer.run_dir={tmp_path / name}", *changes)
        assert outcome.status == 0, outcome.err
        return tmp_path / name

    return run


@pytest.fixture
def ppo_run(tiny, finished_run):
    """Return the directory of a finished PPO run with a checkpoint of every step."""
    return finished_run("train", *tiny.PPO, "trainer.save_every=1", "trainer.keep_checkpoints=9")


def weights(run, step, component="actor"):
    return open_checkpoint(run / "checkpoints" / f"step_{step:06d}").load(component, "model")


def test_metrics_of_runs_equal_the_glossary(task, ppo_run, finished_run):
    changes = [
        ("algorithm.kl_in_loss=true", "validation.group_size=2", "validation.temperature=1"),
        ("algorithm.rollout_weights=token",),
        (f"teacher.model_path={task}/teacher", "teacher.loss=forward_kl"),
        ("algorithm.filter_groups=true",),
        ("trainer.lag=1", "trainer.total_steps=2", "algorithm.rollout_weights=token"),
        ("trainer.total_steps=2", "rollout.schedule=expected"),
    ]
    runs = [
        ppo_run,
        *(finished_run("train", "trainer.total_steps=1", *more) for more in changes),
        *(finished_run(command, "trainer.total_steps=1") for command in ("sft", "dpo", "reward-model")),
    ]
    names = {name for run in runs for row in read_jsonl(run / "metrics.jsonl") for name in row} - {"step"}
    assert [name for name in sorted(names) if find_metric(name) is None] == []
    logged = {id(find_metric(name)) for name in names}
    missing = [name for name, metric in METRICS.items() if id(metric) not in logged]
    sync = ["bytes", "bytes_received", "probe_diff_mean", "probe_diff_max"]
    sync = [f"weight_sync/{name}" for name in sync]
    schedule = ["schedule/imbalance_even", "schedule/imbalance"]
    balance = ["balance/imbalance_before", "balance/imbalance_after"]
    ready = ["late_share", "compared_batches", "length_trained", "length_begun", "tokens_behind"]
    pools = [
        *(f"ready/{name}" for name in ready),
        "parts/<stage>",
        "processes/<pool>",  # see test_lost_node.py
        "sampling/lent_groups",
    ]  # see test_ready_order.py and test_lending.py
    recovery = ["failures", "repeated_steps", "time_s", "slow_ranks"]
    recovery = [f"recovery/{name}" for name in recovery]  # see test_recovery.py and test_slow_ranks.py
    expected = [*pools, *sync, *schedule, *balance, *recovery, *EPISODES]  # see tests/trainers/test_episode_runs.py
    assert sorted(missing) == sorted(expected)  # most need several ranks


def test_grpo_run_writes_metrics_samples_and_checkpoint(finished_run):
    run = finished_run("train")
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert "val/score/mean" in rows[0]
    assert "val/score/mean" in rows[6]
    assert not any("val/score/mean" in row for row in rows[1:6])
    assert all(name in rows[1] for name in (*TIMES, "mfu/actor", "actor/lr", "memory_bytes/resident"))
    assert [row["training/epoch"] for row in rows[1:]] == [0, 0, 0, 1, 1, 1]
    assert rows[1]["perf/tokens_per_s_per_device"] == rows[1]["perf/tokens_per_s"] > 0
    assert rows[1]["response_length/mean"] > 0
    assert rows[1]["reward/num_words/mean"] > 0
    samples = read_jsonl(run / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [step for step in range(1, 7) for _ in range(4)]
    texts = {"prompt", "rendered_prompt", "response", "ground_truth", "data_source", "finish_reason", "prompt_id"}
    assert set(samples[0]) == {*texts, "step", "row", "score", "length", "failed", "tokens"}
    assert [len(row["score"]) for row in read_jsonl(run / "rollouts.jsonl")] == [24] * 6
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000006"]


def test_one_optimizer_step_per_batch_is_on_policy(finished_run):
    for row in read_jsonl(finished_run("train") / "metrics.jsonl")[1:]:
        assert row["actor/ppo_kl"] == 0.0
        assert row["actor/clipfrac"] == 0.0
        assert row["rollout/log_prob_mismatch"] < 1e-5
        assert "timing_s/old_log_probs" not in row  # not computed: the ratio is 1 by definition


def test_rollout_log_probs_can_serve_as_old_log_probs(train):
    row = read_jsonl(train("trainer.total_steps=1", "actor.old_log_probs_from=rollout") / "metrics.jsonl")[1]
    assert "timing_s/old_log_probs" not in row
    assert 0 < abs(row["actor/ppo_kl"]) < 1e-5  # rounding differs between engine and trainer


def test_several_optimizer_steps_per_batch_change_the_ratio(train):
    row = read_jsonl(train("trainer.total_steps=1", "actor.mini_batch_size=4") / "metrics.jsonl")[1]
    assert row["actor/ppo_kl"] != 0.0
    assert "timing_s/old_log_probs" in row


def test_critic_warmup_trains_only_the_critic(ppo_run):
    rows = read_jsonl(ppo_run / "metrics.jsonl")[1:]
    assert ["actor/loss" in row for row in rows] == [False, False, True, True, True, True]
    assert all("critic/loss" in row for row in rows)
    start, warm, after = weights(ppo_run, 1), weights(ppo_run, 2), weights(ppo_run, 3)
    assert all(torch.equal(start[name], warm[name]) for name in start)
    assert not any(torch.equal(warm[name], after[name]) for name in start)
    values = weights(ppo_run, 1, "critic")["score.weight"], weights(ppo_run, 2, "critic")["score.weight"]
    assert not torch.equal(*values)


def test_learning_rate_schedules_end_at_the_last_update(ppo_run):
    row = read_jsonl(ppo_run / "metrics.jsonl")[-1]
    # actor: 4 steps of 4 updates, 6 of them warm-up; the last update has index 15
    assert row["actor/lr"] == pytest.approx(1e-3 * (1 - (15 - 6) / (16 - 6)))
    # critic: 6 steps of 4 updates; the last update has index 23
    assert row["critic/lr"] == pytest.approx(1e-3 * 0.5 * (1 + math.cos(math.pi * 23 / 24)))


def test_adaptive_kl_coefficient_follows_the_kl_in_the_reward(ppo_run):
    rows = read_jsonl(ppo_run / "metrics.jsonl")[1:]
    # The actor equals its reference until its first update, in step 3. The KL is 0, far below its target, so the 24
    # samples of a step lower the coefficient by the factor 1 - 0.2 * 24 / 50 = 0.904.
    assert [row["critic/kl"] for row in rows[:3]] == [0.0, 0.0, 0.0]
    assert rows[3]["critic/kl"] > 0
    by_hand = [0.1, 0.1 * 0.904, 0.1 * 0.904**2, 0.1 * 0.904**3]
    assert [row["critic/kl_coeff"] for row in rows[:4]] == pytest.approx(by_hand)
    for row in rows[:3]:
        assert row["critic/rewards/mean"] == pytest.approx(row["critic/score/mean"])
    assert rows[3]["critic/rewards/mean"] < rows[3]["critic/score/mean"]


def test_kl_loss_is_added_with_its_coefficient(train):
    run = train("algorithm.kl_in_loss=true", "algorithm.kl_coef=0.5", "trainer.total_steps=3", "actor.optimizer.lr=0.1")
    rows = read_jsonl(run / "metrics.jsonl")[1:]
    assert rows[0]["actor/kl_loss"] == 0.0
    assert rows[2]["actor/kl_loss"] > 0.1
    for row in rows:
        assert row["actor/loss"] == pytest.approx(row["actor/policy_loss"] + 0.5 * row["actor/kl_loss"])
        assert "critic/kl" not in row


def test_groups_with_equal_scores_give_grpo_zero_gradient(train, tmp_path):
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


def test_failed_reward_can_count_as_error_score(train, tmp_path):
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


def test_validation_does_not_change_training(tiny, task, train):
    """This holds even if the reward uses the random number generator of the process."""
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


def test_a_clock_that_jumps_changes_no_result(tiny, train, monkeypatch):
    changes = ("trainer.total_steps=2", "data.val_files=[]")
    expected = tiny.metrics_of(train(*changes, name="steady"))
    clock, calls = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: clock() + 3600.0 * (-1) ** next(calls) * (next(calls) % 5))
    assert tiny.metrics_of(train(*changes, name="jumping")) == expected


def test_validation_noise_is_the_same_at_every_step(train):
    """With a learning rate of 0 the weights stay equal, so equal noise gives equal scores."""
    run = train("actor.optimizer.lr=0", "trainer.val_every=1", "validation.group_size=2", "validation.temperature=1")
    rows = read_jsonl(run / "metrics.jsonl")
    assert len({row["val/score/mean"] for row in rows}) == 1


def test_sft_learns_and_validates_before_during_and_after_training(finished_run):
    run = finished_run("sft", "offline.optimizer.lr=1e-2", "trainer.epochs=8", "trainer.val_every=12")
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "sft/val_loss" in row] == [0, 12, 24]
    assert rows[0]["sft/val_loss"] > 4 > rows[12]["sft/val_loss"] > rows[24]["sft/val_loss"]
    assert rows[1]["sft/loss"] > 2 * rows[24]["sft/loss"]
    assert "timing_s/update_sft" in rows[1]
    assert "timing_s/validation" in rows[12]


def test_run_json_keeps_the_configuration_of_every_start(task, train):
    run = train("trainer.total_steps=1")
    train("trainer.total_steps=2", "actor.optimizer.lr=1e-4")
    starts = json.loads((run / "run.json").read_text())["starts"]
    assert [start["after_step"] for start in starts] == [0, 1]
    assert [start["config"]["actor.optimizer.lr"] for start in starts] == [1e-3, 1e-4]
    assert {"started_at", "command", "versions", "git", "hardware", "matmul_peak_flops_per_s"} <= set(starts[0])
    assert "lr = 0.0001" in (run / "config.toml").read_text()


def test_tensorboard_tracker_writes_an_event_file(train):
    run = train("trainer.total_steps=1", 'trainer.trackers=["tensorboard"]')
    assert [path.name.startswith("events.out") for path in (run / "tensorboard").iterdir()] == [True]


def test_memory_is_logged_around_heavy_methods_at_debug_level(train, caplog):
    with caplog.at_level(logging.DEBUG, logger="hybridflow"):
        train("trainer.total_steps=1", "data.val_files=[]")
    for method in ("__init__", "generate_sequences", "update_actor", "save"):
        for when in ("before", "after"):
            assert f"{when} ActorRolloutWorker.{method}, rank 0: resident " in caplog.text
    assert " GiB, peak_resident " in caplog.text


@pytest.mark.parametrize(
    "changes", [(), ("algorithm.advantage=gae", "algorithm.kl_in_reward=true")], ids=["grpo", "ppo"]
)
def test_compiled_kernels_equal_pytorch_kernels_up_to_rounding(changes, finished_run):
    try:
        compiled = finished_run("train", *changes)
        plain = finished_run("train", *changes, "controller.compiled_kernels=false")
    finally:
        use_kernels(True)  # a process-wide setting, shared with other tests
    compiled_rows, plain_rows = (read_jsonl(run / "metrics.jsonl") for run in (compiled, plain))
    assert len(compiled_rows) == 7  # validation before the first step, and six steps
    for one, other in zip(compiled_rows[1:], plain_rows[1:], strict=True):
        assert one["critic/score/mean"] == other["critic/score/mean"]  # the sampled tokens are equal
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
    pairs = zip(weights(compiled, 6).values(), weights(plain, 6).values(), strict=True)
    assert 0 < max(float((one - other).abs().max()) for one, other in pairs) < 1e-3


def test_automatic_token_budget_is_measured_once_per_run(train, tmp_path):
    options = ("memory.max_tokens_per_micro_batch=auto", "trainer.total_steps=2")
    run = train(*options, "--stop-after", "1", name="auto")
    saved = json.loads((run / "token_budgets.json").read_text())
    assert saved["budgets"].keys() == {"actor_rollout"}
    budget = saved["budgets"]["actor_rollout"]
    assert budget >= saved["layout"]["lengths"][0] + saved["layout"]["lengths"][1]
    saved["budgets"]["actor_rollout"] = budget + 1
    (run / "token_budgets.json").write_text(json.dumps(saved))
    train(*options, name="auto")
    assert json.loads((run / "token_budgets.json").read_text()) == saved
    saved["budgets"]["actor_rollout"] = -5
    (run / "token_budgets.json").write_text(json.dumps(saved))
    with pytest.raises(AssertionError, match=r"token_budgets\.json' is damaged \(-5 tokens for actor_rollout\)"):
        train(*options, "trainer.total_steps=3", name="auto")
    (run / "token_budgets.json").write_text("{")
    with pytest.raises(AssertionError, match=r"token_budgets\.json' is damaged"):
        train(*options, "trainer.total_steps=3", name="auto")


def test_lora_run_is_its_own_reference_and_exports_merged_weights(train, task, tmp_path, hybridflow):
    run = train(
        *("lora.rank=2", "lora.alpha=4", "algorithm.kl_in_loss=true", "actor.optimizer.lr=0.01"),
        *("actor.mini_batch_size=4", "trainer.total_steps=2"),
        name="adapted",
    )
    rows = read_jsonl(run / "metrics.jsonl")
    assert rows[1]["actor/kl_loss"] >= 0
    assert rows[2]["actor/kl_loss"] > 0  # the adapters differ from the base model
    methods = {event["where"] for event in read_jsonl(run / "trace" / "calls.jsonl")}
    assert "ActorRolloutWorker.compute_ref_log_probs" in methods
    assert not [method for method in methods if method.startswith("ReferenceWorker")]
    state = open_checkpoint(run / "checkpoints" / "step_000002").load("actor")
    assert all(".lora_" in name for name in state["model"])
    assert hybridflow("export", run, tmp_path / "merged").status == 0
    assert hybridflow("export", run, tmp_path / "adapter", "--adapter").status == 0
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert hybridflow("evaluate", task / "rl.toml", f"model.path={tmp_path / 'merged'}").status == 0


def test_reward_model_replaces_the_reward_function(train, task, tmp_path):
    """The samples get scores from the reward model, and no reward function runs."""
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
