"""Steps with failing reward functions, and with the built-in rewards of data sources."""

import pytest

from hybridflow.runtime.observe import read_jsonl

REWARD = """
import os

def number(text):
    return sum(map(ord, text))

def good(data_source, solution_str, ground_truth, extra_info):
    return number(solution_str) % 5

def bad(data_source, solution_str, ground_truth, extra_info):
    if number(solution_str) % 17 == 0:
        while True:
            pass
    if number(solution_str) % 11 == 0:
        os._exit(1)
    if number(solution_str) % 7 == 0:
        raise ValueError("not this one")
    return number(solution_str) % 5
"""
OWN = pytest.mark.own_run("grpo: its rewards fail")


@pytest.fixture
def train(run, tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)

    def train(function, *changes, **given):
        function = f"reward.function={tmp_path / 'mine.py'}:{function}"
        return run("trainer.log_samples=24", function, *changes, **given)

    return train


def scores_of(run):
    return [row["score"] for row in read_jsonl(run / "samples.jsonl")]


@pytest.mark.runs
@OWN
def test_reward_errors_and_timeouts_are_counted_and_other_scores_kept(train):
    changes = ["reward.on_error=zero", "reward.error_score=-1.0", "reward.timeout_s=0.3", "reward.processes=2"]
    good = train("good", name="good")
    bad = train("bad", *changes, "reward.max_failure_rate=1.0", name="bad")
    pairs = list(zip(scores_of(good), scores_of(bad), strict=True))
    assert len(pairs) == 24
    assert all(b in (g, -1.0) for g, b in pairs)
    (row,), (clean,) = (read_jsonl(directory / "metrics.jsonl") for directory in (bad, good))
    assert row["reward/error_rate"] > 0
    failed = row["reward/error_rate"] + row["reward/timeout_rate"]
    assert failed == pytest.approx(sum(b == -1.0 for _, b in pairs) / 24)
    assert clean["reward/error_rate"] == clean["reward/timeout_rate"] == 0
    assert clean["reward/zero_rate"] == pytest.approx(sum(g == 0 for g, _ in pairs) / 24)
    assert row["reward/zero_rate"] <= clean["reward/zero_rate"]


@pytest.mark.runs
@pytest.mark.own_run("grpo: it runs code")
def test_data_source_selects_code_and_math_rewards(run, tmp_path):
    from hybridflow.data import prompt_row, write_prompt_file

    rows = [
        prompt_row(data_source="code", prompt="1 2 =>", ground_truth='{"tests": ["assert x"]}', split="train", index=0),
        prompt_row(data_source="math", prompt="1 3 =>", ground_truth="3", split="train", index=1),
    ]
    write_prompt_file(tmp_path / "mixed.parquet", rows)
    files = (f"data.train_files=['{tmp_path}/mixed.parquet']", "data.train_batch_size=2")
    directory = run("reward.function=", *files, "reward.processes=1")
    (row,) = read_jsonl(directory / "metrics.jsonl")
    assert row["reward/error_rate"] == 0
    assert row["reward/passed/mean"] == 0
    assert len(list((directory / "rewards").iterdir())) == 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (("reward.function=", 'reward.kwargs={url = "x"}'), "needs reward.function, which is empty"),
        (('reward.kwargs={solution_str = "x"}',), "reward.kwargs.solution_str is reserved for the sample"),
    ],
)
def test_invalid_reward_kwargs_are_rejected(refuse, changes, problem):
    assert problem in refuse(*changes, "reward.processes=0")
