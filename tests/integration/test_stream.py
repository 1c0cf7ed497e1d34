"""Runs with `trainer.stream`: the same training as on the whole batch, the same bits each time, overlap on Ray."""

import pytest
import torch
from safetensors.torch import load_file

from fixtures.tiny_run import WEIGHTS, differing, metrics_differ, spans, texts_of
from hybridflow.runtime.observe import read_jsonl

EXACT = ("model.dtype=float64",)
STREAM = ("trainer.stream=true",)
LAG = ("trainer.lag=1", "algorithm.rollout_weights=token")
OF_BATCHES = (
    *("actor/", "critic/", "reward/", "response_length/", "prompt_length/", "training/", "staleness/"),
    *("rollout_correction/", "sampling/", "val/"),
)
ALGORITHMS = {
    "remax": ("algorithm.advantage=remax", "actor.loss_aggregation=seq-mean-token-mean", "actor.entropy_coef=0.01"),
    "gae": (
        *("algorithm.advantage=gae", "algorithm.whiten_advantages=false", "algorithm.kl_in_reward=true"),
        *("algorithm.kl_controller=adaptive", "critic.mini_batch_size=4", "critic.warmup_steps=1"),
    ),
    "lag": (*LAG, "actor.loss_aggregation=seq-mean-token-sum-norm", "reward.overlong_buffer=3"),
    "one prompt": ("data.train_batch_size=1",),
    "several updates": ("actor.epochs=2", "actor.mini_batch_size=4", "algorithm.kl_in_loss=true"),
    "advantages of the batch": (
        *("algorithm.advantage=reinforce++-baseline", "algorithm.kl_in_reward=true"),
        *("actor.policy_loss=kl-cov", "actor.policy_loss_kwargs={selected_share=0.2}"),
    ),
    "dynamic sampling": ("algorithm.filter_groups=true", "rollout.group_size=2", *LAG, "algorithm.advantage=remax"),
}


def require_same_training(streamed, whole, steps, *, ranks=1):
    """Assert equality of weights, metrics and samples up to the rounding of float64; several ranks have shards."""
    if ranks == 1:
        files = [path / f"checkpoints/step_{steps:06d}/actor.safetensors" for path in (streamed, whole)]
        weights, expected = map(load_file, files)
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-11)
    assert metrics_differ(whole, streamed, *OF_BATCHES, steps=steps, rel=1e-7, absolute=1e-9) == []
    texts = [[row["response"] for row in texts_of(run) if row["step"] <= steps] for run in (streamed, whole)]
    assert texts[0] == texts[1] != []


@pytest.mark.runs
@pytest.mark.own_run("streamed: the same run on whole batches")
def test_the_streamed_run_equals_one_on_whole_batches(run, streamed_run):
    whole = run(*EXACT, "algorithm.kl_in_loss=true", "trainer.total_steps=3")
    require_same_training(streamed_run, whole, 3)


@pytest.mark.runs
@pytest.mark.own_run("streamed: with other algorithms")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_streamed_run_of_other_kinds_equals_that_on_whole_batches(run, algorithm):
    changes = (*EXACT, *ALGORITHMS[algorithm], "trainer.total_steps=3")
    require_same_training(run(*STREAM, *changes, name="streamed"), run(*changes, name="whole"), 3)


@pytest.mark.runs
@pytest.mark.own_run("streamed: it is resumed, with a lag")
def test_a_resumed_streamed_run_has_the_bits_of_an_uninterrupted_one(run):
    more = [*STREAM, *LAG, "algorithm.filter_groups=true", "rollout.group_size=2", "trainer.total_steps=4"]
    first = run(*more, name="first")
    resumed = run(*more, "--stop-after", "2")
    files = {path.name for path in (resumed / "checkpoints/step_000002").glob("batch*")}
    assert files == {f"batch_000002_{part}.safetensors" for part in range(8)}
    assert differing(run(*more), first, 4, names=WEIGHTS) == set()


REWARD_THAT_FAILS = """
import zlib

calls = []

def often(solution_str, **_):
    calls.append(solution_str)
    if len(calls) > 6:
        raise ValueError("no more scores")
    return float(len(solution_str) % 3)

def rarely(solution_str, **_):
    if zlib.crc32(solution_str.encode()) % 12 == 0:
        raise ValueError("a rare failure")
    return float(len(solution_str) % 3)
"""


@pytest.mark.runs
def test_failed_rewards_of_parts_count_for_the_whole_batch(run, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD_THAT_FAILS)
    function = f"reward.function={tmp_path}/reward.py"
    run(*STREAM, f"{function}:often", status=1, problem="no more scores", name="failed")
    changes = [*STREAM, f"{function}:rarely", "reward.on_error=zero"]
    rows = read_jsonl(run(*changes, "reward.max_failure_rate=0.25", "trainer.total_steps=3") / "metrics.jsonl")
    rate = max(row["reward/error_rate"] for row in rows)
    assert 0 < rate < 0.25  # in a part of three rows, one failure is more
    problem = f"{round(24 * rate)} of 24 rewards failed, more than reward.max_failure_rate="
    fewer = f"reward.max_failure_rate={rate - 0.01}"
    run(*changes, fewer, "trainer.total_steps=3", status=1, problem=problem, name="fewer")


def pools(learn, generate, balance="none"):
    return (
        *("controller.backend=ray", "controller.cpus_per_worker=0.5", f"controller.balance={balance}"),
        f"placement.pools={{learn=[{learn}],generate=[{generate}],score=[1]}}",
        "placement.roles={rollout='generate',reward='score'}",
    )


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("streamed: on Ray")
def test_streamed_runs_on_ray_overlap_and_equal_whole_batches(task, tmp_path, run_in_turn):
    tail = (*EXACT, "data.max_response_length=48", "memory.max_tokens_per_micro_batch=400")
    commands = {
        "whole": [],
        "streamed": [*STREAM, *pools(1, 1)],
        "ranks": [*STREAM, *pools(2, 2)],
        "whole_critic": [*ALGORITHMS["gae"]],
        "balanced": [*STREAM, *pools(2, 2, "rows"), *ALGORITHMS["gae"]],
        "whole_updates": [*ALGORITHMS["several updates"]],
        "updates": [*STREAM, *pools(2, 2, "rows"), *ALGORITHMS["several updates"]],
        "whole_lag": [*LAG],
        "streamed_lag": [*LAG, *STREAM, *pools(1, 1)],
    }
    arguments = []
    for name, changes in commands.items():
        command = ["train", task / "rl.toml", *tail, f"trainer.run_dir={tmp_path}/{name}", *changes]
        arguments += [[*command, "--stop-after", "3"], command] if name == "streamed_lag" else [command]
    run_in_turn(*arguments, shares_cluster=True)
    for name, like, ranks in (
        ("streamed", "whole", 1),
        ("ranks", "whole", 2),
        ("balanced", "whole_critic", 2),
        ("updates", "whole_updates", 2),
        ("streamed_lag", "whole_lag", 1),
    ):
        require_same_training(tmp_path / name, tmp_path / like, 6, ranks=ranks)
    rows = read_jsonl(tmp_path / "balanced/metrics.jsonl")[1:]
    before, after = (sum(row[f"balance/imbalance_{when}"] for row in rows) for when in ("before", "after"))
    assert after < before
    parts = spans(tmp_path / "streamed", "next_sequences")
    assert len(parts) == 6 * 8
    ends = [max(end for _, end in parts[8 * step : 8 * step + 8]) for step in range(6)]
    for method in ("finish_score", "update_actor_in_parts"):
        calls = spans(tmp_path / "streamed", method)[: 6 * 8]
        assert len(calls) == 6 * 8
        assert any(calls[8 * step + part][0] < ends[step] for step in range(6) for part in range(7)), method
