"""Tiny runs whose reward function misbehaves, and what becomes of them."""

import pytest

from hybridflow.observability import read_jsonl

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


@pytest.fixture
def train(task, tmp_path, hybridflow):
    (tmp_path / "mine.py").write_text(REWARD)

    def run(function, *changes, name="run"):
        return hybridflow(
            *("train", task / "rl.toml", f"trainer.run_dir={tmp_path / name}", "trainer.total_steps=1"),
            *("data.val_files=[]", "trainer.log_samples=24", f"reward.function={tmp_path / 'mine.py'}:{function}"),
            *changes,
        )

    return run


def test_failures_of_every_kind_are_counted_apart_and_the_other_scores_are_untouched(train, tmp_path):
    changes = ["reward.on_error=zero", "reward.error_score=-1.0", "reward.max_failure_rate=1.0", "reward.timeout_s=0.3"]
    assert train("good", name="good").status == 0
    outcome = train("bad", *changes, name="bad")
    assert outcome.status == 0, outcome.err
    good, bad = ([row["score"] for row in read_jsonl(tmp_path / name / "samples.jsonl")] for name in ("good", "bad"))
    assert len(good) == len(bad) == 8
    assert [b for g, b in zip(good, bad, strict=True) if b != -1.0] == [
        g for g, b in zip(good, bad, strict=True) if b != -1.0
    ]
    (row,) = read_jsonl(tmp_path / "bad" / "metrics.jsonl")
    (clean,) = read_jsonl(tmp_path / "good" / "metrics.jsonl")
    assert row["reward/error_rate"] > 0
    assert row["reward/error_rate"] + row["reward/timeout_rate"] < 0.6
    assert clean["reward/error_rate"] == clean["reward/timeout_rate"] == 0
    assert clean["reward/zero_rate"] > 0
    assert row["reward/zero_rate"] <= clean["reward/zero_rate"]


def test_a_failure_stops_the_run_with_its_sample_by_default(train):
    outcome = train("bad", "reward.timeout_s=0.3")
    assert outcome.status == 2
    assert "reward function bad" in outcome.err
    assert "for this sample" in outcome.err
    assert "ground_truth: {'target'" in outcome.err


def test_too_many_failures_stop_the_run_though_they_may_score(train):
    outcome = train("bad", "reward.on_error=zero", "reward.timeout_s=0.3", "reward.max_failure_rate=0.01")
    assert outcome.status == 2
    assert "rewards failed, more than reward.max_failure_rate=0.01 allows" in outcome.err


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_the_number_of_processes_changes_no_score(train, tmp_path, processes):
    for name, number in (("some", processes), ("two", 2)):
        assert train("good", f"reward.processes={number}", name=name).status == 0
    some, two = (read_jsonl(tmp_path / name / "metrics.jsonl")[0] for name in ("some", "two"))
    assert some["critic/score/mean"] == two["critic/score/mean"]
    assert some["actor/grad_norm"] == two["actor/grad_norm"]


def test_a_function_that_cannot_be_loaded_is_told_before_anything_is_written(train, tmp_path):
    outcome = train("nothing")
    assert outcome.status == 2
    assert "has no function 'nothing'; it has number, good, bad" in outcome.err
