import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from hybridflow.checkpoint import save_state
from hybridflow.config import load_config
from hybridflow.errors import CheckpointError, ConfigError, DataError, RunInUseError
from hybridflow.observability import JsonlWriter, read_jsonl
from hybridflow.runtime.fault_points import PLAN, plan_faults
from hybridflow.trainers import RunDirectory
from hybridflow.trainers.run_directory import RECOVERIES, TOKEN_BUDGETS, WRITTEN, require_unused
from hybridflow.trainers.run_log import RunLog
from hybridflow.workers.schedule import SCHEDULE


@pytest.fixture
def open_run(tmp_path):
    """Return a function that opens the directory `run` with overrides."""
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


def test_begin_writes_configuration_and_versions(open_run, tmp_path):
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


def test_rows_after_the_checkpoint_are_removed(open_run, tmp_path):
    metrics, samples, _, trace = open_run().begin()
    for step in range(4):
        metrics.log(step, {"actor/loss": 0.0})
        samples.write({"step": step, "score": 1.0})
        trace.write({"step": step, "kind": "call"})
    save(open_run(), 2)
    open_run().begin()
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "samples.jsonl")] == [0, 1, 2]
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "trace" / "calls.jsonl")] == [0, 1, 2]


def test_rows_of_finished_steps_that_are_missing_are_a_warning(open_run, tmp_path, caplog):
    run = open_run()
    metrics, *_ = run.begin()
    for step in range(6):
        metrics.log(step, {"actor/loss": 0.0})
    run.end()
    save(run, 4)
    again = open_run()
    again.begin()
    again.end()
    assert "missing" not in caplog.text
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], *lines[3:4], lines[4][:9]]))
    open_run().begin()
    assert f"'{file}' was damaged or cut: the rows of 2 of the 4 finished steps are missing (2, 4)." in caplog.text
    assert [row["step"] for row in read_jsonl(file)] == [0, 1, 3]


def test_many_missing_rows_are_one_short_line(open_run, caplog):
    save(open_run(), 500)
    open_run().begin()
    assert "the rows of 500 of the 500 finished steps are missing (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...)" in caplog.text


@pytest.mark.parametrize("kind", ["a file", "a FIFO", "a dangling link"])
def test_checkpoints_that_are_not_a_directory_are_an_error_at_the_start(open_run, tmp_path, kind):
    metrics, *_ = open_run().begin()
    metrics.log(1, {"actor/loss": 0.0})
    path = tmp_path / "run" / "checkpoints"
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a file":
        path.write_text("not checkpoints")
    else:
        path.symlink_to(tmp_path / "missing")
    with pytest.raises(
        ConfigError, match=r"checkpoints' is not a directory, so .* none can be saved there; move it away"
    ):
        open_run()
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1]


def test_logs_of_a_run_without_checkpoint_are_renamed(open_run, tmp_path):
    metrics, *_ = open_run().begin()
    metrics.log(0, {"val/score/mean": 0.0})
    open_run().begin()
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl") == []
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl.old")] == [0]


def test_a_directory_in_use_is_refused_before_its_files_are_read(open_run, tmp_path):
    require_unused(tmp_path / "run")
    run = open_run()
    run.begin()
    with pytest.raises(RunInUseError, match="another process is running"):
        require_unused(tmp_path / "run")
    run.end()
    require_unused(tmp_path / "run")


def test_logs_that_are_gone_when_they_are_cut_are_an_error(open_run, tmp_path):
    log = RunLog(open_run(), total_steps=3, figures={})
    log.write(1, {"actor/loss": 0.0})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(DataError, match=r"run/metrics.jsonl' could not be cut to step 0: .*No such file"):
        log.rewind(0)


def test_a_second_process_in_a_run_directory_is_refused(open_run, tmp_path):
    run = open_run()
    metrics, *_ = run.begin()
    metrics.log(1, {"actor/loss": 0.0})
    with pytest.raises(CheckpointError, match="another process is running"):
        open_run().begin()
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1]
    run.end()
    open_run().begin()


def test_a_run_continued_by_another_process_is_refused(open_run, tmp_path):
    slow, fast = open_run(), open_run()
    metrics, *_ = fast.begin()
    metrics.log(1, {"actor/loss": 0.0})
    save(fast, 1)
    fast.end()
    with pytest.raises(CheckpointError, match=r"would continue after step 0, but there is a checkpoint of step 1 now"):
        slow.begin()
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1]
    assert open_run().step == 1


def test_every_start_is_recorded(open_run):
    open_run("trainer.total_steps=2").begin()
    save(open_run(), 2)
    run = open_run("trainer.total_steps=9")
    run.begin()
    starts = [(start["after_step"], start["config"]["trainer.total_steps"]) for start in run.starts()]
    assert starts == [(0, 2), (2, 9)]


def test_a_damaged_run_json_is_an_error_with_a_fix(open_run, tmp_path):
    open_run().begin()
    (tmp_path / "run" / "run.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"run\.json' is damaged .*; move it out of the directory"):
        open_run().begin()


def test_resume_never_refuses_a_directory_with_files(open_run, tmp_path):
    open_run("trainer.resume=never")
    (tmp_path / "run").mkdir()
    open_run("trainer.resume=never")
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"is not empty and trainer\.resume='never'"):
        open_run("trainer.resume=never")


def test_a_file_is_not_a_run_directory(open_run, tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match="run' is a file; choose a directory"):
        open_run()


@pytest.mark.parametrize(
    "name",
    ["config.toml", "run.json", "metrics.jsonl", "samples.jsonl", "trace/calls.jsonl", "token_budgets.json", ".lock"],
)
@pytest.mark.parametrize("kind", ["a symbolic link", "a FIFO", "a directory"])
def test_a_run_does_not_write_through_links_and_fifos(open_run, tmp_path, name, kind):
    path, target = tmp_path / "run" / name, tmp_path / "of_another_run"
    path.parent.mkdir(parents=True)
    target.write_text("precious")
    if kind == "a symbolic link":
        path.symlink_to(target)
    elif kind == "a FIFO":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ConfigError, match=rf"{name}' is {kind}, not a regular file, but a run writes it; move it away"):
        open_run()
    assert target.read_text() == "precious"


def test_every_file_of_a_run_is_checked_for_links(open_run, tmp_path):
    run = open_run()
    run.documents[TOKEN_BUDGETS] = "{}"
    run.begin()
    run.end()
    JsonlWriter(run.path / SCHEDULE).write_all([{"step": 1}])
    JsonlWriter(run.path / RECOVERIES).write_all([{"step": 1}])
    plan_faults(tmp_path, [], next_step=1)
    (tmp_path / PLAN).rename(run.path / PLAN)
    files = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert files == set(WRITTEN)


def test_subdirectories_of_a_run_may_be_links(open_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    run = open_run()
    save(run, 1)
    assert open_run().step == 1
    assert (tmp_path / "disk" / "step_000001").is_dir()


def test_a_checkpoint_without_identity_is_refused(open_run):
    with open_run().store.begin(1) as directory:
        save_state({}, directory / "controller")
    with pytest.raises(CheckpointError, match="was not made by a training run, so `hybridflow train` cannot continue"):
        open_run()


def test_a_checkpoint_records_the_identity_as_json(open_run):
    save(open_run(), 1)
    checkpoint = open_run().checkpoint
    assert checkpoint is not None
    assert checkpoint.info["kind"] == "train"
    assert checkpoint.info["config"]["actor.optimizer.betas"] == [0.9, 0.999]
    assert json.loads(json.dumps(checkpoint.info)) == checkpoint.info


def test_a_lock_that_is_held_for_a_moment_is_waited_for(open_run, tmp_path, monkeypatch):
    run = open_run()
    (tmp_path / "run").mkdir()
    look = os.open(tmp_path / "run" / ".lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(look, fcntl.LOCK_SH)  # as `hybridflow runs` does
    monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(look, fcntl.LOCK_UN))
    run.begin()
    with pytest.raises(BlockingIOError):
        fcntl.flock(look, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(look)


def test_a_file_system_without_locks_is_a_warning(open_run, monkeypatch, caplog):
    def without_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    run = open_run()
    run.begin()
    assert "has no locks ([Errno 37] No locks available): a second process" in caplog.text
    save(run, 1)
    assert run.store.list() == (1,)
