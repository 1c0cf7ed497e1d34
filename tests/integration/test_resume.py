"""Resumed runs are byte-identical to uninterrupted runs, and invalid resumes are rejected."""

import json
import shutil

import pytest


def finish(process):
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err


@pytest.mark.slow
def test_ppo_resumed_twice_equals_uninterrupted_run(tiny, task, uninterrupted, tmp_path, start):
    """The stops are after step 1, during all warm-ups, and after step 4, in the second epoch."""
    shutil.copytree(uninterrupted.ppo_after_1, tmp_path / "run")
    command = [*tiny.commands(task)["ppo"], f"trainer.run_dir={tmp_path}/run"]
    finish(start(*command, "--stop-after", "4"))
    finish(start(*command))
    whole = tiny.results_of(uninterrupted.ppo, 6)
    assert set(whole) >= {"actor.safetensors", "actor.json", "critic.safetensors", "controller.json"}
    assert tiny.results_of(tmp_path / "run", 6) == whole
    coefficients = [row["critic/kl_coeff"] for row in whole["metrics"][1:]]
    assert len(set(coefficients)) == 6  # the adaptive controller changed it at every step
    starts = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert [start_record["after_step"] for start_record in starts] == [0, 1, 4]


@pytest.mark.slow
def test_grpo_resumed_at_the_end_of_an_epoch_equals_uninterrupted_run(tiny, task, uninterrupted, tmp_path, start):
    shutil.copytree(uninterrupted.grpo_after_3, tmp_path / "run")
    finish(start(*tiny.commands(task)["grpo"], f"trainer.run_dir={tmp_path}/run"))
    assert tiny.results_of(tmp_path / "run", 6) == tiny.results_of(uninterrupted.grpo, 6)


@pytest.mark.parametrize(("name", "data"), [("sft", "sft"), ("dpo", "pairs"), ("reward-model", "pairs")])
def test_resumed_offline_training_equals_uninterrupted_run(tiny, task, tmp_path, hybridflow, name, data):
    command = [name, task / f"{data}.toml", "offline.optimizer.warmup_steps=4", "offline.optimizer.schedule=linear"]
    assert hybridflow(*command, f"trainer.run_dir={tmp_path}/whole").status == 0
    hybridflow(*command, f"trainer.run_dir={tmp_path}/resumed", "--stop-after", "2")
    hybridflow(*command, f"trainer.run_dir={tmp_path}/resumed")
    assert tiny.results_of(tmp_path / "resumed", 6) == tiny.results_of(tmp_path / "whole", 6)


def test_resumed_bfloat16_run_equals_uninterrupted_run(tiny, task, tmp_path, hybridflow):
    """Checkpoints hold the float32 master weights; the model computes with their bfloat16 cast."""
    command = [*tiny.commands(task)["grpo"], "model.dtype=bfloat16", "trainer.total_steps=4"]
    assert hybridflow(*command, f"trainer.run_dir={tmp_path}/whole").status == 0
    hybridflow(*command, f"trainer.run_dir={tmp_path}/resumed", "--stop-after", "2")
    hybridflow(*command, f"trainer.run_dir={tmp_path}/resumed")
    whole, resumed = (tiny.results_of(tmp_path / name, 4) for name in ("whole", "resumed"))
    names = ("actor.safetensors", "actor.json", "metrics", "samples")  # random states differ, see `uninterrupted`
    assert all(whole[name] == resumed[name] for name in names)


def test_a_run_begun_in_the_dtype_of_a_gpu_continues_on_a_cpu(tiny, task, tmp_path, hybridflow, monkeypatch):
    command = [*tiny.commands(task)["grpo"], "trainer.total_steps=2"]
    assert hybridflow(*command, "model.dtype=bfloat16", f"trainer.run_dir={tmp_path}/whole").status == 0
    with monkeypatch.context() as patched:
        patched.setattr("hybridflow.trainers.compute_dtype.gpu_has_bfloat16", lambda: True)
        hybridflow(*command, f"trainer.run_dir={tmp_path}/auto", "--stop-after", "1")
    assert 'dtype = "bfloat16"' in (tmp_path / "auto" / "config.toml").read_text()
    assert hybridflow(*command, f"trainer.run_dir={tmp_path}/auto").status == 0
    whole, auto = (tiny.results_of(tmp_path / name, 2) for name in ("whole", "auto"))
    assert all(whole[name] == auto[name] for name in ("actor.safetensors", "actor.json", "metrics", "samples"))


def test_lost_steps_after_a_checkpoint_are_recomputed_identically(tiny, task, tmp_path, hybridflow):
    command = ["train", task / "rl.toml", "trainer.save_every=2", "trainer.keep_checkpoints=9"]
    assert hybridflow(*command, f"trainer.run_dir={tmp_path}/run").status == 0
    whole = tiny.results_of(tmp_path / "run", 6)
    for step in (6, 4):
        (tmp_path / "run" / "checkpoints" / f"step_{step:06d}").rename(tmp_path / f"lost_{step}")
    assert hybridflow(*command, f"trainer.run_dir={tmp_path}/run").status == 0
    assert tiny.results_of(tmp_path / "run", 6) == whole
    steps = [row["step"] for row in tiny.metrics_of(tmp_path / "run")]
    assert steps == ["0", "1", "2", "3", "4", "5", "6"]


def test_restarting_a_finished_run_logs_it_and_changes_no_file(task, tmp_path, hybridflow):
    command = ["sft", task / "sft.toml", f"trainer.run_dir={tmp_path}/run", "trainer.total_steps=1"]
    hybridflow(*command)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    again = hybridflow(*command)
    assert again.status == 0
    assert "is finished: it is at step 1 of 1. Raise trainer.total_steps" in again.log
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_finished_run_continues_with_more_total_steps(tiny, task, tmp_path, hybridflow):
    command = ["sft", task / "sft.toml", f"trainer.run_dir={tmp_path}/run"]
    hybridflow(*command, "trainer.total_steps=1")
    longer = hybridflow(*command, "trainer.total_steps=2", "offline.optimizer.lr=1e-4")
    assert longer.status == 0
    assert "trainer.total_steps was 1 and is 2; offline.optimizer.lr was 1e-05 and is 0.0001" in longer.log
    assert [row["step"] for row in tiny.metrics_of(tmp_path / "run")] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["train", "rl.toml", "algorithm.advantage=gae"], "algorithm.advantage was 'grpo' and is 'gae'"),
        (["train", "rl.toml", "model.dtype=float64"], "model.dtype was 'float32' and is 'float64'"),
        (["train", "rl.toml", "model.path=other"], "the model of model.path differs from the one in "),
        (
            ["train", "rl.toml", "trainer.seed=1"],
            "the saved data position belongs to other data or settings: seed was 0",
        ),
        (["sft", "sft.toml"], "was made by `hybridflow train`, so `hybridflow sft` cannot continue it"),
    ],
)
def test_resume_rejects_another_runs_checkpoint(command, problem, task, finished, tmp_path, monkeypatch, hybridflow):
    monkeypatch.chdir(tmp_path)
    if "model.path=other" in command:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        AutoTokenizer.from_pretrained(task / "model").save_pretrained("other")
        model = AutoModelForCausalLM.from_pretrained(task / "model")
        model.model.norm.weight.data += 1e-3
        model.save_pretrained("other")
    rows = (finished / "metrics.jsonl").read_bytes()
    name, recipe, *overrides = command
    rejected = hybridflow(name, task / recipe, *overrides, f"trainer.run_dir={finished}")
    assert rejected.status == 2
    assert rejected.err.splitlines()[-1].startswith("error: ")
    assert problem in rejected.err
    assert (finished / "metrics.jsonl").read_bytes() == rows


@pytest.fixture(scope="module")
def finished(task, tmp_path_factory):
    """Return a finished GRPO run of one step."""
    from hybridflow.config import load_config
    from hybridflow.trainers import build_trainer

    run = tmp_path_factory.mktemp("finished") / "run"
    build_trainer(load_config(task / "rl.toml", [f"trainer.run_dir={run}", "trainer.total_steps=1"])).fit()
    return run
