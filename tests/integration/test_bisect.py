"""`hybridflow bisect` on runs that were ruined on purpose, and on runs of other kinds."""

import fcntl
import json
import re
import shutil

import pyarrow as pa
import pytest
from pyarrow.parquet import read_table, write_table

from hybridflow.runtime.observe import read_jsonl

pytestmark = [pytest.mark.runs, pytest.mark.own_run("grpo: each is ruined, or searched and learned again")]

REWARDS = """
def score(data_source, solution_str, ground_truth, extra_info):
    return len({word for word in solution_str.split() if word.startswith("-")}) / 12

def poisoned(data_source, solution_str, ground_truth, extra_info):
    right = score(data_source, solution_str, ground_truth, extra_info)
    return -1000 * right if extra_info.get("answer") == "poison" else right

def length(data_source, solution_str, ground_truth, extra_info):
    share = len(solution_str.split()) / 12
    return share if extra_info.get("answer") == "late" else 1 - share
"""
RUINED = (
    *("data.train_batch_size=4", "rollout.group_size=6", "actor.mini_batch_size=2", "actor.optimizer.lr=2e-2"),
    *("trainer.total_steps=10", "trainer.epochs=9", "validation.temperature=1"),
)
SCORE = ("--metric", "val/score/mean", "--below", 0.4, "--from", 4)


@pytest.fixture
def ruin(task, tmp_path, run):
    """Return a function that trains with a reward of REWARDS on rows, of which some have a word in extra_info."""

    def train(reward, *changes, marked=(), word="", name="run"):
        table = read_table(task / "train.parquet")
        rows = [dict(row, extra_info=dict(row["extra_info"])) for row in table.to_pylist() * 4]
        for number, row in enumerate(rows):
            row["extra_info"] |= {"index": number, "answer": word if number in marked else ""}
        write_table(pa.Table.from_pylist(rows, schema=table.schema), tmp_path / "rows.parquet")
        (tmp_path / "ruin.py").write_text(REWARDS)
        data = (f"data.train_files=['{tmp_path}/rows.parquet']", f"data.val_files=['{task}/test.parquet']")
        return run(*data, f"reward.function={tmp_path}/ruin.py:{reward}", *RUINED, *changes, name=name)

    return train


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def poisoned(ruin):
    """Return a run in which one group of a step has -1000 times its rewards, and gradients are not clipped."""
    unclipped = ("algorithm.norm_by_std=false", "actor.optimizer.clip_grad_norm=1e6")
    return ruin("poisoned", *unclipped, marked=(22,), word="poison")


def test_a_poisoned_group_is_found_with_its_step(poisoned, hybridflow):
    (step,) = [row["step"] for row in read_jsonl(poisoned / "metrics.jsonl") if row.get("critic/score/min", 0) < -1]
    before = contents(poisoned)
    shown = hybridflow("bisect", poisoned, *SCORE, "--try", "actor.optimizer.clip_grad_norm=1", "actor.epochs=2")
    assert (shown.status, shown.err) == (0, "")
    assert f"\nval/score/mean is below 0.4 from step {step} on\nit is kept without mini-batch 1 of the" in shown.out
    assert "\nit is kept without 1 of its 4 groups (each is needed)\ngroup " in shown.out
    samples = re.findall(r"^(\d+) +(\S+) +\S+ +\S+ +\S+  .", shown.out.partition("log-prob before")[2], re.MULTILINE)
    assert [float(score) < -100 for _, score in samples] == 6 * [True]
    tried = rf"\nstep {step} with actor.optimizer.clip_grad_norm=1 actor.epochs=2 .* kept +\S+ s\n"
    assert re.search(tried, shown.out)
    shown = hybridflow("bisect", poisoned, *SCORE, "--json")
    found = json.loads(shown.out)
    assert (found["step"], found["mini_batches"], found["groups"]) == (step, [1], [int(samples[0][0])])
    assert {sample["group"] for sample in found["samples"]} == {*found["groups"]}
    assert contents(poisoned) == before
    write_table(read_table(poisoned.parent / "rows.parquet").slice(1), poisoned.parent / "rows.parquet")
    shown = hybridflow("bisect", poisoned, *SCORE)
    assert shown.status == 2
    assert "can be learned again: data.train_files changed in content since the run" in shown.err


def test_a_learning_rate_that_jumps_is_found_where_it_begins(ruin, hybridflow):
    ruin("score", "--stop-after", 6)
    directory = ruin("score", "actor.optimizer.lr=1")
    shutil.rmtree(directory / "checkpoints" / "step_000006")
    shown = hybridflow("bisect", directory, *SCORE, "--try", "actor.optimizer.lr=2e-2")
    assert (shown.status, shown.err) == (0, "")
    assert "\nval/score/mean is below 0.4 from step 7 on\nstep 7 is the first of a start with other keys: " in shown.out
    assert "other keys: actor.optimizer.lr=1.0\n" in shown.out
    assert re.search(r"\nstep 7 with actor.optimizer.lr=2e-2 .* kept ", shown.out)
    assert shown.out.endswith("\nit is kept with actor.optimizer.lr=2e-2, so it is lost by the keys\n")
    shown = hybridflow("bisect", directory, *SCORE)
    assert "so it is lost by the keys of the step" in shown.out


def test_a_reward_that_starts_to_pay_for_length_is_found(ruin, hybridflow):
    """Of all steps, validated in a run of its own, the first one whose responses are long is found in log2 of them."""
    how = ("data.order=sequential", "validation.temperature=0")
    every = ruin("length", *how, "trainer.val_every=1", marked=range(16, 96), word="late", name="every")
    lengths = {row["step"]: row["val/response_length/mean"] for row in read_jsonl(every / "metrics.jsonl")}
    (first,) = [step for step in range(5, 11) if lengths[step - 1] < 6 <= lengths[step]]
    directory = ruin("length", *how, marked=range(16, 96), word="late")
    rule = ("--metric", "val/response_length/mean", "--above", 6, "--from", 4)
    shown = hybridflow("bisect", directory, *rule, "--json")
    found = json.loads(shown.out)
    assert found["step"] == first
    of_states = [each for each in found["evaluations"] if each["what"].startswith("after ")]
    assert len(of_states) <= 2 + 3
    assert all(each["value"] == lengths[int(each["what"].split()[-1])] for each in of_states)
    shown = hybridflow("bisect", directory, "--metric", "response_length/mean", "--above", 9.7, "--from", 3)
    assert "response_length/mean is above 9.7 from step 5 on" in shown.out


LATER = """
def as_at_the_end(metrics):
    return metrics["val/score/mean"] == {last}
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ppo", "lag", "streamed", "lora"])
def test_runs_of_other_kinds_are_searched(request, tmp_path, hybridflow, name):
    run = request.getfixturevalue(f"{name}_run")
    before = contents(run)
    values = [row["val/score/mean"] for row in read_jsonl(run / "metrics.jsonl") if "val/score/mean" in row]
    (tmp_path / "rule.py").write_text(LATER.format(last=values[-1]))
    rule = ("--metric", "val/score/mean", "--rule", f"{tmp_path}/rule.py:as_at_the_end")
    shown = hybridflow("bisect", run, *rule, "--removals", 6, "--try", "actor.optimizer.lr=1e-5")
    assert (shown.status, shown.err) == (0, "")
    assert re.search(r"val/score/mean is lost by .*:as_at_the_end from step \d on", shown.out)
    assert contents(run) == before


VAL = ("--metric", "val/score/mean")
REFUSED = [
    ("grpo", (*VAL, "--below", 0.5, "--try", "data.seed=3"), "'data.seed=3' cannot be changed in a replay"),
    ("grpo", (*VAL, "--below", 0.5, "--try", "actor.epochs=x"), "actor.epochs='x' is invalid"),
    ("grpo", (*VAL, "--rule", "no.py:rule"), "--rule 'no.py:rule': there is no file"),
    ("grpo", (*VAL, "--rule", "math:sqrt"), "--rule math:sqrt raised TypeError"),
    ("grpo", (*VAL, "--rule", "builtins:len"), "returned"),
    ("grpo", (*VAL, "--below", -5), "is not lost: val/score/mean is not below -5 after step 6, its last"),
    (
        "grpo",
        (*VAL, "--above", -5),
        "is lost after step 0 already: val/score/mean is above -5 there; name another step",
    ),
    ("grpo", (*VAL, "--above", -5, "--from", 6), "is lost after step 6 already"),
    (
        "grpo",
        (*VAL, "--above", -5, "--from", 7),
        "--from 7 is invalid: the last step after which val/score/mean is known is 6",
    ),
    ("grpo", ("--metric", "val/scores", "--below", 0), "has no such metric; near: val/score/mean"),
    ("grpo", ("--metric", "reward/x", "--below", 0), "has no such metric; near: reward/"),
    ("grpo", ("--metric", "actor/loss", "--below", 0), "expected a metric of validation or of samples: val/*"),
    ("lag", ("--metric", "critic/score/mean", "--below", 0), "is not supported with trainer.lag=1"),
    ("dpo", (*VAL, "--below", 0), "is not a run of `hybridflow train`"),
]


@pytest.mark.parametrize(("name", "arguments", "problem"), REFUSED)
def test_what_cannot_be_searched_is_refused_with_the_reason(request, hybridflow, name, arguments, problem):
    shown = hybridflow("bisect", request.getfixturevalue(f"{name}_run"), *arguments)
    assert shown.status in (1, 2)
    assert problem in shown.err


def test_a_run_without_steps_or_in_use_is_refused(grpo_run, tmp_path, hybridflow):
    run = shutil.copytree(grpo_run, tmp_path / "run")
    with open(run / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shown = hybridflow("bisect", run, *VAL, "--below", 0)
        assert (shown.status, "another process is running in" in shown.err) == (75, True)
    (run / "metrics.jsonl").write_text("")
    shown = hybridflow("bisect", run, *VAL, "--below", 0)
    assert (shown.status, "has no complete step to bisect" in shown.err) == (2, True)
    assert not list(run.glob("bisect-*"))
