"""The canonical runs: the files they write and the values of their metrics; and single steps with other settings."""

import itertools
import json
import logging
import math
import time

import pytest
import torch

from fixtures.tiny_run import differing, metrics_of
from hybridflow.checkpoint import open_checkpoint
from hybridflow.models.kernels.library import use_kernels
from hybridflow.runtime.observe import METRICS, find_metric, read_jsonl

TIMES = ("timing_s/gen", "timing_s/reward", "timing_s/step", "timing_s/update_actor", "timing_per_token_ms/gen")
ELSEWHERE = (
    *("parts/", "processes/", "weight_sync/", "balance/", "recovery/"),
    "episode/",  # see tests/trainers/test_episode_runs.py
    "reward/unprotected/",  # of `code_reward`
    *("<model>/", "actor/routes_changed"),  # of a mixture, see tests/models/test_experts.py and tests/engines
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
        "filtered": ("algorithm.filter_groups=true", "trainer.total_steps=2"),
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
def test_lora_run_is_its_own_reference_and_exports_its_adapters(lora_run, tmp_path, hybridflow):
    rows = rows_of(lora_run)
    assert rows[2]["actor/kl_loss"] > 0  # the adapters differ from the base model
    assert "ActorRolloutWorker.compute_ref_log_probs" in methods_of(lora_run)
    assert not [method for method in methods_of(lora_run) if method.startswith("ReferenceWorker")]
    assert all(".lora_" in name for name in weights(lora_run, 6))
    assert hybridflow("export", lora_run, tmp_path / "adapter", "--adapter").status == 0
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


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


def test_memory_is_logged_around_heavy_methods_at_debug_level(run, caplog):
    with caplog.at_level(logging.DEBUG, logger="hybridflow"):
        run()
    for method in ("__init__", "generate_sequences", "update_actor", "save"):
        for when in ("before", "after"):
            assert f"{when} ActorRolloutWorker.{method}, rank 0: resident " in caplog.text
    assert " GiB, peak_resident " in caplog.text


@pytest.mark.runs
@pytest.mark.own_run("grpo: with and without compiled kernels")
def test_compiled_kernels_equal_pytorch_kernels_up_to_rounding(run):
    try:
        compiled = run("trainer.total_steps=3", name="compiled")
        plain = run("trainer.total_steps=3", "controller.compiled_kernels=false", name="plain")
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
