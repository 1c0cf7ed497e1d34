import json
from pathlib import Path

import pytest

from hybridflow.checkpoint import save_state
from hybridflow.config import load_config
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.observability import read_jsonl
from hybridflow.trainers import RunDirectory


@pytest.fixture
def open_run(tmp_path):
    """Opens the directory `run` under a configuration with changes."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def build(*overrides, kind="train"):
        defaults = [f"trainer.run_dir={tmp_path}/run", f"model.path={tmp_path}/model"]
        return RunDirectory(load_config(None, [*defaults, *overrides]), kind)

    return build


def save(run, step):
    with run.store.begin(step, info=run.identity) as directory:
        save_state({"global_step": step}, directory / "controller")


def test_opening_a_new_directory_writes_nothing(open_run, tmp_path):
    run = open_run()
    assert run.checkpoint is None
    assert run.step == 0
    assert not (tmp_path / "run").exists()


def test_beginning_writes_the_configuration_and_what_it_runs_on(open_run, tmp_path):
    run = open_run("trainer.seed=3")
    run.start_facts["matmul_peak_flops_per_s"] = 1.5e11
    run.begin()
    assert load_config(tmp_path / "run" / "config.toml") == run.config
    (start,) = run.starts()
    assert start["after_step"] == 0
    assert start["directory"] == str(Path.cwd())
    assert start["config"]["trainer.seed"] == 3
    assert start["versions"]["torch"]
    assert start["matmul_peak_flops_per_s"] == 1.5e11


def test_rows_behind_the_checkpoint_are_dropped_because_they_come_again(open_run, tmp_path):
    metrics, samples, trace = open_run().begin()
    for step in range(4):
        metrics.log(step, {"actor/loss": 0.0})
        samples.write({"step": step, "score": 1.0})
        trace.write({"step": step, "kind": "call"})
    save(open_run(), 2)
    open_run().begin()
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "samples.jsonl")] == [0, 1, 2]
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "trace" / "calls.jsonl")] == [0, 1, 2]


def test_rows_of_a_run_that_never_saved_are_put_aside(open_run, tmp_path):
    metrics, _, _ = open_run().begin()
    metrics.log(0, {"val/score/mean": 0.0})
    open_run().begin()
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl") == []
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl.old")] == [0]


def test_a_second_run_in_a_directory_that_is_in_use_is_refused_and_loses_nothing(open_run, tmp_path):
    run = open_run()
    metrics, _, _ = run.begin()
    metrics.log(1, {"actor/loss": 0.0})
    with pytest.raises(CheckpointError, match="another process is running"):
        open_run().begin()
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1]
    run.end()
    open_run().begin()


def test_a_run_that_another_process_continued_meanwhile_is_refused_and_loses_nothing(open_run, tmp_path):
    slow, fast = open_run(), open_run()
    metrics, _, _ = fast.begin()
    metrics.log(1, {"actor/loss": 0.0})
    save(fast, 1)
    fast.end()
    with pytest.raises(CheckpointError, match=r"would continue after step 0, but there is a checkpoint of step 1 now"):
        slow.begin()
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1]
    assert open_run().step == 1


def test_every_start_is_kept(open_run):
    open_run("trainer.total_steps=2").begin()
    save(open_run(), 2)
    run = open_run("trainer.total_steps=9")
    run.begin()
    starts = [(start["after_step"], start["config"]["trainer.total_steps"]) for start in run.starts()]
    assert starts == [(0, 2), (2, 9)]


def test_a_damaged_record_of_starts_is_an_error_that_says_what_to_do(open_run, tmp_path):
    open_run().begin()
    (tmp_path / "run" / "run.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"run\.json' is damaged .*; move it away to continue"):
        open_run().begin()


def test_a_directory_with_files_is_refused_where_none_may_be_resumed(open_run, tmp_path):
    open_run("trainer.resume=never")
    (tmp_path / "run").mkdir()
    open_run("trainer.resume=never")
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"is not empty and trainer\.resume='never'"):
        open_run("trainer.resume=never")


def test_a_file_is_no_directory(open_run, tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match="run' is a file; choose a directory"):
        open_run()


def test_a_checkpoint_that_no_training_run_wrote_is_refused(open_run):
    with open_run().store.begin(1) as directory:
        save_state({}, directory / "controller")
    with pytest.raises(CheckpointError, match="was not made by a training run, so `hybridflow train` cannot continue"):
        open_run()


def test_the_identity_is_in_the_checkpoint_as_plain_json(open_run):
    save(open_run(), 1)
    checkpoint = open_run().checkpoint
    assert checkpoint is not None
    assert checkpoint.info["kind"] == "train"
    assert checkpoint.info["config"]["actor.optimizer.betas"] == [0.9, 0.999]
    assert json.loads(json.dumps(checkpoint.info)) == checkpoint.info
