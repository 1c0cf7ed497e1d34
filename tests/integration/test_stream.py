"""Runs with `trainer.stream`: the same training as on the whole batch, the same bits each time, overlap on Ray."""

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.observability import read_jsonl

STREAM = ("trainer.stream=true", "model.dtype=float64")
WEIGHTS = "checkpoints/step_000006/actor.safetensors"
ALGORITHMS = {
    "grpo": ("algorithm.kl_in_loss=true", "reward.overlong_buffer=3"),
    "remax": ("algorithm.advantage=remax", "actor.loss_aggregation=seq-mean-token-mean", "actor.entropy_coef=0.01"),
    "gae": (
        *("algorithm.advantage=gae", "algorithm.whiten_advantages=false", "algorithm.kl_in_reward=true"),
        *("algorithm.kl_controller=adaptive", "critic.mini_batch_size=4", "critic.warmup_steps=1"),
    ),
    "scheduled": ("rollout.schedule=expected",),
    "lag": ("trainer.lag=2", "algorithm.rollout_weights=token", "actor.loss_aggregation=seq-mean-token-sum-norm"),
}


def assert_same_training(streamed, whole):
    """Assert equality of all weights up to the rounding of float64, and of metrics and samples."""
    weights, expected = load_file(streamed / WEIGHTS), load_file(whole / WEIGHTS)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-11)
    assert_same_metrics(streamed, whole)


def assert_same_metrics(streamed, whole, *additional):
    """Assert equality, up to rounding, of all metrics of the batch and the update, and of the samples.

    `additional`: prefixes of metrics that one of the runs lacks.
    """
    rows, expected_rows = (read_jsonl(run / "metrics.jsonl")[1:] for run in (streamed, whole))
    varying = ("timing", "perf/", "mfu/", "memory_bytes/", "transfer/", "rollout/log_prob", "actor/shared_prompts")
    for row, expected_row in zip(rows, expected_rows, strict=True):
        more = row.keys() ^ expected_row.keys()  # on Ray, of the weight sync
        allowed = ("weight_sync/", "timing_s/weight_sync", *additional, *varying)
        assert all(name.startswith(allowed) for name in more), more
        for name, value in expected_row.items():
            if isinstance(value, float) and not name.startswith((*varying, "balance/")):
                assert row[name] == pytest.approx(value, rel=1e-7, abs=1e-9), name
    assert [row["response"] for row in read_jsonl(streamed / "samples.jsonl")] == [
        row["response"] for row in read_jsonl(whole / "samples.jsonl")
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_streamed_run_equals_that_on_whole_batches(run, algorithm):
    whole = run("whole", "model.dtype=float64", *ALGORITHMS[algorithm])
    assert_same_training(run("streamed", *STREAM, *ALGORITHMS[algorithm]), whole)


def test_a_streamed_run_has_the_same_bytes_each_time_and_resumed(tiny, run, tmp_path):
    more = ["trainer.stream=true", "trainer.lag=1", "algorithm.rollout_weights=token", "trainer.val_every=2"]
    for name in ("first", "second"):
        run(name, *more)
    run("resumed", *more, "--stop-after", "2")
    files = {path.name for path in (tmp_path / "resumed/checkpoints/step_000002").glob("batch*")}
    assert files == {f"batch_000002_{part}.safetensors" for part in range(8)}
    run("resumed", *more)
    first, second, resumed = (tiny.results_of(tmp_path / name, 6) for name in ("first", "second", "resumed"))
    assert first == second
    for name in ("actor.safetensors", "actor.json", "metrics", "samples"):
        assert resumed[name] == first[name]


def test_one_prompt_is_a_batch_of_one_part(run):
    changes = ("data.train_batch_size=1", "trainer.total_steps=6")
    whole = run("whole", "model.dtype=float64", *changes)
    assert_same_training(run("streamed", *STREAM, *changes), whole)


REWARD_THAT_FAILS = """
calls = []

def score(solution_str, **_):
    calls.append(solution_str)
    if len(calls) > {successes}:
        raise ValueError("no more scores")
    return float(len(solution_str) % 3)
"""


def test_a_reward_that_fails_in_a_part_stops_the_run_with_its_error(task, tmp_path, hybridflow):
    (tmp_path / "reward.py").write_text(REWARD_THAT_FAILS.format(successes=2 * 3))  # parts of one prompt each
    changes = [f"reward.function={tmp_path}/reward.py:score", "reward.processes=0", "trainer.val_before_train=false"]
    outcome = hybridflow("train", task / "rl.toml", f"trainer.run_dir={tmp_path}/run", "trainer.stream=true", *changes)
    assert outcome.status != 0
    assert "no more scores" in outcome.err
    assert "part" not in outcome.err.splitlines()[0]


REWARD_THAT_FAILS_RARELY = """
import zlib

def score(solution_str, **_):
    if zlib.crc32(solution_str.encode()) % 12 == 0:
        raise ValueError("a rare failure")
    return float(len(solution_str) % 3)
"""


def test_the_failure_rate_of_a_streamed_batch_is_that_of_all_its_parts(run, task, tmp_path, hybridflow):
    (tmp_path / "reward.py").write_text(REWARD_THAT_FAILS_RARELY)
    changes = [f"reward.function={tmp_path}/reward.py:score", "reward.processes=0", "reward.on_error=zero"]
    changes += ["trainer.stream=true", "data.val_files=[]"]
    rows = read_jsonl(run("run", *changes, "reward.max_failure_rate=0.25") / "metrics.jsonl")
    rates = [row["reward/error_rate"] for row in rows]
    assert 0 < max(rates) < 0.25  # in a part of three rows, one failure is more
    changes += [f"trainer.run_dir={tmp_path}/fewer", f"reward.max_failure_rate={max(rates) - 0.01}"]
    outcome = hybridflow("train", task / "rl.toml", *changes)
    assert outcome.status != 0
    assert f"{round(24 * max(rates))} of 24 rewards failed, more than reward.max_failure_rate=" in outcome.err


def test_resuming_without_the_stream_is_an_error(task, run, tmp_path, hybridflow):
    run("run", "trainer.stream=true", "--stop-after", "2")
    outcome = hybridflow("train", task / "rl.toml", f"trainer.run_dir={tmp_path / 'run'}")
    assert outcome.status != 0
    assert "trainer.stream was True and is False" in outcome.err


def pools(learn, generate, balance="none"):
    return (
        *("controller.backend=ray", "controller.cpus_per_worker=0.5", f"controller.balance={balance}"),
        f"placement.pools={{learn=[{learn}],generate=[{generate}],score=[1]}}",
        "placement.roles={rollout='generate',reward='score'}",
    )


def spans(run, method):
    """Return the times of the calls of a method, in order."""
    calls = [row for row in read_jsonl(run / "trace" / "calls.jsonl") if row["kind"] == "call"]
    return [(call["start"], call["end"]) for call in calls if call["where"].endswith(f".{method}")]


@pytest.mark.ray
@pytest.mark.slow
def test_streamed_runs_on_ray_overlap_and_equal_whole_batches(task, tmp_path, run_in_turn):
    lag = ("trainer.lag=1", "algorithm.rollout_weights=token")
    slow_tail = (
        "data.max_response_length=48",
        "memory.max_tokens_per_micro_batch=400",
        "trainer.val_before_train=false",
    )
    commands = {
        "whole": [*slow_tail, "model.dtype=float64"],
        "streamed": [*slow_tail, *STREAM, *pools(1, 1)],
        "ranks": [*slow_tail, *STREAM, *pools(2, 2)],
        "whole_critic": [*slow_tail, "model.dtype=float64", *ALGORITHMS["gae"]],
        "balanced": [*slow_tail, *STREAM, *pools(2, 2, "rows"), *ALGORITHMS["gae"]],
        "whole_lag": [*slow_tail, *lag, "model.dtype=float64"],
        "streamed_lag": [*slow_tail, *lag, *STREAM, *pools(1, 1)],
    }
    arguments = []
    for name, changes in commands.items():
        command = ["train", task / "rl.toml", f"trainer.run_dir={tmp_path}/{name}", *changes]
        arguments += [[*command, "--stop-after", "3"], command] if name == "streamed_lag" else [command]
    run_in_turn(*arguments, shares_cluster=True)
    assert_same_training(tmp_path / "streamed", tmp_path / "whole")
    assert_same_metrics(tmp_path / "ranks", tmp_path / "whole")  # its checkpoint has shards
    assert_same_metrics(tmp_path / "balanced", tmp_path / "whole_critic", "balance/")
    rows = read_jsonl(tmp_path / "balanced/metrics.jsonl")[1:]
    before, after = (sum(row[f"balance/imbalance_{when}"] for row in rows) for when in ("before", "after"))
    assert after < before
    assert_same_training(tmp_path / "streamed_lag", tmp_path / "whole_lag")
    parts = spans(tmp_path / "streamed", "next_sequences")
    assert len(parts) == 6 * 8
    ends = [max(end for _, end in parts[8 * step : 8 * step + 8]) for step in range(6)]
    for method in ("finish_score", "update_actor_in_parts"):
        calls = spans(tmp_path / "streamed", method)[: 6 * 8]
        assert len(calls) == 6 * 8
        assert any(calls[8 * step + part][0] < ends[step] for step in range(6) for part in range(7)), method
