"""Resumed runs are byte-identical to uninterrupted runs, and invalid resumes are rejected."""

import json
import shutil
from datetime import date
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from fixtures.tiny_run import WEIGHTS, differing, metrics_of, results_of
from hybridflow.runtime.observe import read_jsonl
from hybridflow.trainers.build import preconditions

OFFLINE = ("offline.optimizer.warmup_steps=4", "offline.optimizer.schedule=linear", "trainer.total_steps=4")


@pytest.mark.runs
def test_ppo_resumed_twice_equals_uninterrupted_run(ppo_run, resumed_run):
    """The stops are after step 1, during all warm-ups, and after step 3, at the end of an epoch."""
    whole = results_of(ppo_run, 6)
    assert set(whole) >= {"actor.safetensors", "actor.json", "critic.safetensors", "controller.json"}
    assert differing(ppo_run, resumed_run, 6) == set()
    coefficients = [row["critic/kl_coeff"] for row in whole["metrics"][1:]]
    assert len(set(coefficients)) == 6  # the adaptive controller changed it at every step


@pytest.mark.runs
@pytest.mark.own_run("resumed: of other commands")
@pytest.mark.parametrize(("command", "recipe"), [("sft", "sft"), ("dpo", "pairs"), ("reward-model", "pairs")])
def test_resumed_offline_training_equals_uninterrupted_run(run, command, recipe):
    given = {"command": command, "recipe": f"{recipe}.toml"}
    whole = run(*OFFLINE, name="whole", **given)
    run(*OFFLINE, "--stop-after", "2", **given)
    assert differing(run(*OFFLINE, **given), whole, 4) == set()


@pytest.mark.runs
@pytest.mark.own_run("resumed: its chat template reads the clock")
def test_a_run_continued_on_another_day_equals_one_of_one_day(run, task, tmp_path, monkeypatch):
    model = shutil.copytree(task / "model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ strftime_now('%d') }} {{ messages[0].content }}"
    tokenizer.save_pretrained(model)
    changes = (f"model.path={model}", "data.max_prompt_length=32", "trainer.total_steps=2")
    with monkeypatch.context() as patched:
        patched.setattr(preconditions, "date", SimpleNamespace(today=lambda: date(2020, 2, 3)))
        whole = run(*changes, name="whole")
        run(*changes, "--stop-after", "1")
    assert 'date = "2020-02-03"' in (whole / "config.toml").read_text()
    assert {row["rendered_prompt"][:3] for row in read_jsonl(run(*changes) / "samples.jsonl")} == {"03 "}
    assert differing(tmp_path / "run", whole, 2) == set()


@pytest.mark.runs
@pytest.mark.own_run("resumed: it computes in bfloat16")
def test_a_run_begun_in_the_dtype_of_a_gpu_continues_on_a_cpu(run, monkeypatch):
    """Checkpoints hold the float32 master weights; the model computes with their bfloat16 cast."""
    changes = ("actor.mini_batch_size=4", "trainer.total_steps=2")
    whole = run(*changes, "model.dtype=bfloat16", name="whole")
    with monkeypatch.context() as patched:
        patched.setattr("hybridflow.trainers.build.preconditions.gpu_has_bfloat16", lambda: True)
        auto = run(*changes, "--stop-after", "1")
    assert 'dtype = "bfloat16"' in (auto / "config.toml").read_text()
    assert differing(run(*changes), whole, 2, names=WEIGHTS) == set()


@pytest.mark.runs
@pytest.mark.own_run("sft: it is started again")
def test_a_finished_run_changes_no_file_until_it_has_more_steps(sft_run, tmp_path, hybridflow):
    run = shutil.copytree(sft_run, tmp_path / "run")
    command = ["sft", run / "config.toml", f"trainer.run_dir={run}"]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    again = hybridflow(*command)
    assert again.status == 0
    assert "is finished: it is at step 12 of 12. Raise trainer." in again.log
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    longer = hybridflow(*command, "trainer.total_steps=13", "offline.optimizer.lr=1e-4")
    assert longer.status == 0
    assert "trainer.total_steps was 0 and is 13; offline.optimizer.lr was 0.01 and is 0.0001" in longer.log
    assert [row["step"] for row in metrics_of(run)] == [str(step) for step in range(14)]
    starts = json.loads((run / "run.json").read_text())["starts"]
    assert [start["config"]["offline.optimizer.lr"] for start in starts] == [1e-2, 1e-4]
    assert "lr = 0.0001" in (run / "config.toml").read_text()


@pytest.mark.runs
@pytest.mark.own_run("grpo: it is continued, with processes for rewards")
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("algorithm.advantage=gae", "algorithm.advantage was 'grpo' and is 'gae'"),
        ("trainer.seed=1", "the saved data position belongs to other data or settings: seed was 0"),
    ],
)
def test_resume_rejects_another_runs_checkpoint(grpo_run, tmp_path, hybridflow, change, problem):
    run = shutil.copytree(grpo_run, tmp_path / "run")
    rows = (run / "metrics.jsonl").read_bytes()
    rejected = hybridflow("train", run / "config.toml", change, f"trainer.run_dir={run}")
    assert rejected.status == 2
    assert rejected.err.splitlines()[-1].startswith("error: ")
    assert problem in rejected.err
    assert (run / "metrics.jsonl").read_bytes() == rows
