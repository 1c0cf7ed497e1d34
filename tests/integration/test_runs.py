"""The canonical runs: the files they write and the values of their metrics; and single steps with other settings."""

import itertools
import json
import logging
import math
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file

from fixtures.tiny_run import differing, metrics_of, texts_of
from hybridflow.checkpoint import open_checkpoint
from hybridflow.kernels import use_kernels
from hybridflow.observability import METRICS, find_metric, read_jsonl
from hybridflow.observability.glossary.episodes import EPISODES

TIMES = ("timing_s/gen", "timing_s/reward", "timing_s/step", "timing_s/update_actor", "timing_per_token_ms/gen")
ELSEWHERE = (
    *("ready/", "parts/", "processes/", "sampling/lent_groups", "weight_sync/", "schedule/", "balance/", "recovery/"),
    *EPISODES,  # see tests/trainers/test_episode_runs.py
)
"""Metrics of runs on several processes."""


def rows_of(run):
    return read_jsonl(run / "metrics.jsonl")


def weights(run, step, component="actor"):
    return open_checkpoint(run / "checkpoints" / f"step_{step:06d}").load(component, "model")


def methods_of(run):
    return {event["where"] for event in read_jsonl(run / "trace" / "calls.jsonl")}


@pytest.mark.runs
def test_metrics_of_runs_equal_the_glossary(task, run, ppo_run, grpo_run, lag_run, sft_run, dpo_run):
    changes = {
        "validated": (f"data.val_files=['{task}/test.parquet']", "validation.group_size=2", "validation.temperature=1"),
        "taught": (f"teacher.model_path={task}/teacher", "teacher.loss=forward_kl"),
        "filtered": ("algorithm.filter_groups=true", "rollout.schedule=expected", "trainer.total_steps=2"),
    }
    runs = [run(*more, name=name) for name, more in changes.items()]
    runs.append(run(command="reward-model", recipe="pairs.toml", name="judge"))
    runs.append(run(f"data.val_files=['{task}/pairs.parquet']", command="reward-model", recipe="pairs.toml"))
    runs += [ppo_run, grpo_run, lag_run, sft_run, dpo_run]
    names = {name for run in runs for row in rows_of(run) for name in row} - {"step"}
    assert [name for name in sorted(names) if find_metric(name) is None] == []
    logged = {id(find_metric(name)) for name in names}
    missing = [name for name, metric in METRICS.items() if id(metric) not in logged]
    assert [name for name in missing if not name.startswith(ELSEWHERE)] == []


@pytest.mark.runs
def test_grpo_run_writes_metrics_samples_and_checkpoints(grpo_run):
    rows = rows_of(grpo_run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert ["val/score/mean" in row for row in rows] == [True, *[False] * 5, True]
    assert all(name in rows[1] for name in (*TIMES, "mfu/actor", "actor/lr", "memory_bytes/resident"))
    assert [row["training/epoch"] for row in rows[1:]] == [0, 0, 0, 1, 1, 1]
    assert rows[1]["perf/tokens_per_s_per_device"] == rows[1]["perf/tokens_per_s"] > 0
    assert rows[1]["response_length/mean"] > 0
    assert rows[1]["reward/num_words/mean"] > 0
    samples = read_jsonl(grpo_run / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [step for step in range(1, 7) for _ in range(4)]
    texts = {"prompt", "rendered_prompt", "response", "ground_truth", "data_source", "finish_reason", "prompt_id"}
    assert set(samples[0]) == {*texts, "step", "row", "score", "length", "failed", "tokens"}
    assert [len(row["score"]) for row in read_jsonl(grpo_run / "rollouts.jsonl")] == [24] * 6
    saved = sorted(path.name for path in (grpo_run / "checkpoints").iterdir())
    assert saved == [f"step_{step:06d}" for step in range(1, 7)]


def batches_of(run):
    """Return the prompts of each step, in order."""
    return [list(dict.fromkeys(row["prompt_id"])) for row in read_jsonl(run / "rollouts.jsonl")]


@pytest.mark.runs
@pytest.mark.parametrize("name", ["ppo", "lag", "streamed", "lora"])
def test_every_prompt_is_used_once_in_each_epoch_and_in_one_order(request, grpo_run, name):
    batches = batches_of(request.getfixturevalue(f"{name}_run"))
    assert batches == batches_of(grpo_run)
    epochs = [list(itertools.chain(*batches[:3])), list(itertools.chain(*batches[3:]))]
    assert len(set(epochs[0])) == len(epochs[0]) == 24
    assert set(epochs[1]) == set(epochs[0])
    assert epochs[1] != epochs[0]


@pytest.mark.runs
def test_several_optimizer_steps_change_the_ratio_and_one_does_not(grpo_run, streamed_run):
    for row in rows_of(grpo_run)[1:]:
        assert row["actor/ppo_kl"] != 0.0
        assert "timing_s/old_log_probs" in row
        assert row["rollout/log_prob_mismatch"] < 1e-5
    for row in rows_of(streamed_run)[1:]:
        assert row["actor/ppo_kl"] == row["actor/clipfrac"] == 0.0
        assert "timing_s/old_log_probs" not in row  # not computed: the ratio is 1 by definition


@pytest.mark.runs
def test_kl_loss_is_added_with_its_coefficient(grpo_run, streamed_run):
    for row in rows_of(grpo_run)[1:] + rows_of(streamed_run)[1:]:
        assert row["actor/loss"] == pytest.approx(row["actor/policy_loss"] + 0.001 * row["actor/kl_loss"])
        assert "critic/kl" not in row
    assert rows_of(streamed_run)[1]["actor/kl_loss"] == 0.0
    assert rows_of(grpo_run)[6]["actor/kl_loss"] > 0.01


@pytest.mark.runs
def test_critic_warmup_trains_only_the_critic(ppo_run):
    rows = rows_of(ppo_run)[1:]
    assert ["actor/loss" in row for row in rows] == [False, False, True, True, True, True]
    assert all("critic/loss" in row for row in rows)
    begin, warm, after = (weights(ppo_run, step) for step in (1, 2, 3))
    assert all(torch.equal(begin[name], warm[name]) for name in begin)
    assert not any(torch.equal(warm[name], after[name]) for name in begin)
    values = weights(ppo_run, 1, "critic")["score.weight"], weights(ppo_run, 2, "critic")["score.weight"]
    assert not torch.equal(*values)


@pytest.mark.runs
def test_learning_rate_schedules_end_at_the_last_update(ppo_run):
    row = rows_of(ppo_run)[-1]
    # actor: 4 steps of 4 updates, 6 of them warm-up; the last update has index 15
    assert row["actor/lr"] == pytest.approx(1e-3 * (1 - (15 - 6) / (16 - 6)))
    # critic: 6 steps of 4 updates; the last update has index 23
    assert row["critic/lr"] == pytest.approx(1e-3 * 0.5 * (1 + math.cos(math.pi * 23 / 24)))


@pytest.mark.runs
def test_adaptive_kl_coefficient_follows_the_kl_in_the_reward(ppo_run):
    rows = rows_of(ppo_run)[1:]
    # The actor equals its reference until its first update, in step 3. The KL is 0, far below its target, so the 24
    # samples of a step lower the coefficient by the factor 1 - 0.2 * 24 / 50 = 0.904.
    assert [row["critic/kl"] for row in rows[:3]] == [0.0, 0.0, 0.0]
    assert rows[3]["critic/kl"] > 0
    by_hand = [0.1, 0.1 * 0.904, 0.1 * 0.904**2, 0.1 * 0.904**3]
    assert [row["critic/kl_coeff"] for row in rows[:4]] == pytest.approx(by_hand)
    for row in rows[:3]:
        assert row["critic/rewards/mean"] == pytest.approx(row["critic/score/mean"])
    assert rows[3]["critic/rewards/mean"] < rows[3]["critic/score/mean"]


@pytest.mark.runs
def test_validation_noise_is_the_same_while_the_weights_are(ppo_run):
    """The actor is trained from step 3 on; validation of greedy responses would be equal without its noise."""
    scores = {row["step"]: row.get("val/score/mean") for row in rows_of(ppo_run)}
    assert abs(scores[0] - scores[2]) < 0.01  # but for the noise of the rewards
    assert scores[4] != scores[2]


@pytest.mark.runs
def test_sft_learns_and_validates_before_during_and_after_training(sft_run):
    rows = rows_of(sft_run)
    losses = {row["step"]: row["sft/val_loss"] for row in rows if "sft/val_loss" in row}
    assert list(losses) == [0, 2, 4, 6, 8, 10, 12]
    assert losses[0] > 4 > losses[6] > losses[12]
    assert rows[1]["sft/loss"] > 1.2 * rows[12]["sft/loss"]
    assert "timing_s/update_sft" in rows[1]
    assert "timing_s/validation" in rows[12]


@pytest.mark.runs
def test_dpo_learns_to_prefer_the_chosen_responses(dpo_run):
    rows = rows_of(dpo_run)
    assert rows[0]["dpo/val_accuracy"] == 0.5  # the policy equals its reference
    assert rows[0]["dpo/val_loss"] == pytest.approx(math.log(2))
    assert rows[1]["dpo/margin"] == 0.0
    assert rows[-1]["dpo/val_accuracy"] > 0.9
    assert rows[-1]["dpo/val_loss"] < 0.8 * rows[0]["dpo/val_loss"]


@pytest.mark.runs
def test_lora_run_is_its_own_reference_and_exports_merged_weights(lora_run, task, tmp_path, hybridflow):
    rows = rows_of(lora_run)
    assert rows[2]["actor/kl_loss"] > 0  # the adapters differ from the base model
    assert "ActorRolloutWorker.compute_ref_log_probs" in methods_of(lora_run)
    assert not [method for method in methods_of(lora_run) if method.startswith("ReferenceWorker")]
    assert all(".lora_" in name for name in weights(lora_run, 6))
    assert hybridflow("export", lora_run, tmp_path / "merged").status == 0
    assert hybridflow("export", lora_run, tmp_path / "adapter", "--adapter").status == 0
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    model = f"model.path={tmp_path / 'merged'}"
    evaluated = hybridflow("evaluate", task / "rl.toml", model, "model.dtype=float64", "reward.processes=0")
    (accuracy,) = [line.split()[1] for line in evaluated.out.splitlines() if line.startswith("val/score/mean")]
    assert float(accuracy) == pytest.approx(rows[6]["val/score/mean"], abs=1e-4)


@pytest.mark.runs
def test_run_json_keeps_the_configuration_of_every_start(resumed_run):
    starts = json.loads((resumed_run / "run.json").read_text())["starts"]
    assert [start["after_step"] for start in starts] == [0, 1, 3]
    assert [start["config"]["actor.optimizer.lr"] for start in starts] == [1e-3] * 3
    assert {"started_at", "command", "versions", "git", "hardware", "matmul_peak_flops_per_s"} <= set(starts[0])


def test_rollout_log_probs_can_serve_as_old_log_probs(run):
    (row,) = rows_of(run("actor.old_log_probs_from=rollout", "actor.mini_batch_size=4"))
    assert "timing_s/old_log_probs" not in row
    assert abs(row["actor/ppo_kl"]) > 0


def test_groups_with_equal_scores_give_grpo_zero_gradient(run, task, tmp_path):
    (tmp_path / "constant.py").write_text("def score(**_):\n    return 0.5\n")
    directory = run(f"reward.function={tmp_path}/constant.py:score", "actor.optimizer.weight_decay=0")
    (row,) = rows_of(directory)
    assert row["critic/zero_variance_groups"] == 1.0
    assert row["critic/advantages/max"] == row["critic/advantages/min"] == 0.0
    assert row["actor/loss"] == row["actor/grad_norm"] == 0.0
    before, after = load_file(task / "model" / "model.safetensors"), weights(directory, 1)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_failed_reward_can_count_as_error_score(run, tmp_path):
    (tmp_path / "failing.py").write_text("def score(solution_str, **_):\n    return 1 / (len(solution_str) % 2)\n")
    changes = (f"reward.function={tmp_path}/failing.py:score", "reward.on_error=zero", "reward.error_score=-1")
    (row,) = rows_of(run(*changes, "reward.max_failure_rate=1.0"))
    failed = row["reward/error_rate"]
    assert 0 < failed < 1
    assert row["critic/score/mean"] == pytest.approx((1 - failed) - failed)


@pytest.mark.runs
@pytest.mark.own_run("ppo: one run validates more often, one not at all")
@pytest.mark.parametrize("lag", [(), ("trainer.lag=2", "algorithm.rollout_weights=token")])
def test_validation_does_not_change_training(task, run, lag):
    """This holds even if the reward uses the random number generator of the process."""
    changes = (f"reward.function={task}/reward.py:noisy_score", "trainer.total_steps=3", "trainer.log_samples=24", *lag)
    validation = (f"data.val_files=['{task}/test.parquet']", "validation.group_size=2", "validation.temperature=1")
    often, never = run(*changes, "trainer.val_every=1", *validation, name="often"), run(*changes, name="never")
    names = frozenset({"actor.safetensors", "actor.json", "samples"})
    assert differing(often, never, 3, names=names) == set()
    before_training, *rows = metrics_of(often)
    assert set(before_training) >= {"step", "val/score/mean"}
    for row, plain in zip(rows, metrics_of(never), strict=True):
        assert "val/score/mean" in row
        assert {name: row[name] for name in plain} == plain


@pytest.mark.runs
@pytest.mark.own_run("grpo: its clock jumps")
def test_a_clock_that_jumps_changes_no_result(run, monkeypatch):
    expected = metrics_of(run("trainer.total_steps=2", name="steady"))
    clock, calls = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: clock() + 3600.0 * (-1) ** next(calls) * (next(calls) % 5))
    assert metrics_of(run("trainer.total_steps=2", name="jumping")) == expected


def test_tensorboard_tracker_writes_an_event_file(run):
    directory = run('trainer.trackers=["tensorboard"]') / "tensorboard"
    assert [path.name.startswith("events.out") for path in directory.iterdir()] == [True]


def test_memory_is_logged_around_heavy_methods_at_debug_level(run, caplog):
    with caplog.at_level(logging.DEBUG, logger="hybridflow"):
        run()
    for method in ("__init__", "generate_sequences", "update_actor", "save"):
        for when in ("before", "after"):
            assert f"{when} ActorRolloutWorker.{method}, rank 0: resident " in caplog.text
    assert " GiB, peak_resident " in caplog.text


@pytest.mark.runs
@pytest.mark.own_run("grpo: with and without compiled kernels")
@pytest.mark.parametrize(
    "changes", [(), pytest.param(("algorithm.advantage=gae", "algorithm.kl_in_reward=true"), id="ppo")]
)
def test_compiled_kernels_equal_pytorch_kernels_up_to_rounding(changes, run):
    changes = (*changes, "trainer.total_steps=3")
    try:
        compiled = run(*changes, name="compiled")
        plain = run(*changes, "controller.compiled_kernels=false", name="plain")
    finally:
        use_kernels(True)  # a process-wide setting, shared with other tests
    for one, other in zip(rows_of(compiled), rows_of(plain), strict=True):
        assert one["critic/score/mean"] == other["critic/score/mean"]  # the sampled tokens are equal
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
    pairs = zip(weights(compiled, 3).values(), weights(plain, 3).values(), strict=True)
    assert 0 < max(float((one - other).abs().max()) for one, other in pairs) < 1e-3


@pytest.mark.runs
@pytest.mark.own_run("resumed: it measures its token budget")
def test_automatic_token_budget_is_measured_once_per_run(run):
    options = ("memory.max_tokens_per_micro_batch=auto", "trainer.total_steps=2")
    file = run(*options, "--stop-after", "1") / "token_budgets.json"
    saved = json.loads(file.read_text())
    assert saved["budgets"].keys() == {"actor_rollout"}
    assert saved["budgets"]["actor_rollout"] >= sum(saved["layout"]["lengths"][:2])
    saved["budgets"]["actor_rollout"] += 1
    file.write_text(json.dumps(saved))
    run(*options)
    assert json.loads(file.read_text()) == saved
    saved["budgets"]["actor_rollout"] = -5
    damages = {json.dumps(saved): "token_budgets.json' is damaged (-5 tokens for actor_rollout)", "{": "is damaged"}
    for damage, problem in damages.items():
        file.write_text(damage)
        run(*options, "trainer.total_steps=3", status=1, problem=problem)


def test_reward_model_replaces_the_reward_function(run, task, tmp_path):
    from transformers import AutoModelForSequenceClassification

    reward_model = shutil.copytree(task / "model", tmp_path / "reward_model")
    (reward_model / "model.safetensors").unlink()
    model = AutoModelForSequenceClassification.from_pretrained(task / "model", num_labels=1)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(reward_model)
    changes = (f"reward.model_path={reward_model}", "reward.function=", "trainer.val_before_train=true")
    directory = run(*changes, f"data.val_files=['{task}/test.parquet']", "trainer.log_samples=24")
    assert len({sample["score"] for sample in texts_of(directory)}) > 4
    assert {"RewardModelWorker.score", "RewardModelWorker.score_validation"} <= methods_of(directory)
    assert not [method for method in methods_of(directory) if method.startswith("RewardWorker")]
