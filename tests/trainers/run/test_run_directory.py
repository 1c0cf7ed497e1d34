import errno
import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridflow.checkpoint import CheckpointStore, save_state
from hybridflow.cli.api.rows import write_rows
from hybridflow.config import load_config
from hybridflow.errors import CheckpointError, ConfigError, DataConfigError, DataError, RunInUseError
from hybridflow.runtime.observe import JsonlWriter, read_jsonl
from hybridflow.runtime.observe.run_files import RunFiles
from hybridflow.trainers import RunDirectory
from hybridflow.trainers.run.run_directory import DATA, RECOVERIES, TOKEN_BUDGETS, WRITTEN, require_unused
from hybridflow.trainers.run.run_log import RunLog
from hybridflow.workers.engine_schedule import SCHEDULE


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def open_run(run_dir, model_dir):
    def build(*overrides, kind="train"):
        defaults = [f"trainer.run_dir={run_dir}", f"model.path={model_dir}"]
        return RunDirectory(load_config(None, [*defaults, *overrides]), kind)

    return build


def save(run, step):
    with run.store.begin(step, info=run.identity) as directory:
        save_state({"global_step": step}, directory / "controller")


def steps_of(file):
    return [row["step"] for row in read_jsonl(file)]


def write_metrics(run, steps):
    metrics, *_ = run.begin()
    for step in steps:
        metrics.log(step, {"actor/loss": 0.0})


def test_a_run_records_its_starts_with_configuration_and_versions(open_run, run_dir):
    run = open_run("trainer.seed=3", "trainer.total_steps=2")
    assert (run.checkpoint, run.step, run_dir.exists()) == (None, 0, False)  # opening writes nothing
    run.start_facts["matmul_peak_flops_per_s"] = 1.5e11
    run.begin()
    assert load_config(run_dir / "config.toml") == run.config
    (start,) = run.starts()
    assert start["directory"] == str(Path.cwd())
    assert start["config"]["trainer.seed"] == 3
    assert start["versions"]["torch"]
    assert start["matmul_peak_flops_per_s"] == 1.5e11
    save(open_run(), 2)
    run = open_run("trainer.total_steps=9")
    run.begin()
    starts = [(start["after_step"], start["config"]["trainer.total_steps"]) for start in run.starts()]
    assert starts == [(0, 2), (2, 9)]


def test_rows_after_the_checkpoint_are_removed(open_run, run_dir):
    metrics, samples, _, trace = open_run().begin()
    for step in range(4):
        metrics.log(step, {"actor/loss": 0.0})
        samples.write({"step": step, "score": 1.0})
        trace.write({"step": step, "kind": "call"})
    save(open_run(), 2)
    open_run().begin()
    for name in ("metrics.jsonl", "samples.jsonl", "trace/calls.jsonl"):
        assert steps_of(run_dir / name) == [0, 1, 2]


def test_rows_of_finished_steps_that_are_missing_are_a_warning(open_run, run_dir, caplog):
    run = open_run()
    write_metrics(run, range(6))
    run.end()
    save(run, 4)
    again = open_run()
    again.begin()
    again.end()
    assert "missing" not in caplog.text
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], *lines[3:4], lines[4][:9]]))
    open_run().begin()
    assert f"'{file}' was damaged or cut: the rows of 2 of the 4 finished steps are missing (2, 4)." in caplog.text
    assert steps_of(file) == [0, 1, 3]


def test_logs_of_a_run_without_checkpoint_are_renamed(open_run, run_dir):
    write_metrics(open_run(), [0])
    open_run().begin()
    assert steps_of(run_dir / "metrics.jsonl") == []
    assert steps_of(run_dir / "metrics.jsonl.old") == [0]


def test_logs_that_are_gone_when_they_are_cut_are_an_error(open_run, run_dir):
    log = RunLog(open_run(), total_steps=3, figures={})
    log.write(1, {"actor/loss": 0.0})
    shutil.rmtree(run_dir)
    with pytest.raises(DataError, match=r"run/metrics.jsonl' could not be cut to step 0: .*No such file"):
        log.rewind(0)


def test_a_second_process_in_a_run_directory_is_refused(open_run, run_dir):
    require_unused(run_dir)
    run, late = open_run(), open_run()
    write_metrics(run, [1])
    with pytest.raises(RunInUseError, match="another process is running"):
        require_unused(run_dir)
    with pytest.raises(CheckpointError, match="another process is running"):
        open_run().begin()
    save(run, 1)
    run.end()
    require_unused(run_dir)
    with pytest.raises(CheckpointError, match=r"would continue after step 0, but there is a checkpoint of step 1 now"):
        late.begin()
    assert steps_of(run_dir / "metrics.jsonl") == [1]
    assert open_run().step == 1


NEVER = ("trainer.resume=never",)


def fifo(path):
    os.mkfifo(path)


def file(path):
    path.write_text("[")


def link(path):
    path.symlink_to(path.parents[1] / "missing")


@pytest.mark.parametrize(
    ("name", "make", "settings", "error", "message"),
    [
        ("run/checkpoints", file, (), ConfigError, "checkpoints' is not a directory, so .* none can be saved there"),
        ("run/checkpoints", fifo, (), ConfigError, "checkpoints' is not a directory, so .* move it away"),
        ("run/checkpoints", link, (), ConfigError, "checkpoints' is a symbolic link"),
        ("run/notes.txt", file, NEVER, CheckpointError, r"is not empty and trainer\.resume='never'"),
        ("run/run.json", file, (), CheckpointError, r"run\.json' is damaged .*; move it out of the directory"),
        ("run", file, (), ConfigError, "run' is a file; choose a directory"),
    ],
)
def test_a_directory_that_cannot_take_a_run_is_an_error(open_run, tmp_path, name, make, settings, error, message):
    open_run(*settings)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    open_run(*settings)  # an empty directory is fine
    make(tmp_path / name)
    with pytest.raises(error, match=message):
        open_run(*settings).begin()
    assert (tmp_path / "run" / "metrics.jsonl").exists() is (name == "run/run.json")


@pytest.mark.parametrize("name", sorted(WRITTEN))
@pytest.mark.parametrize(("kind", "make"), [("a symbolic link", link), ("a FIFO", fifo), ("a directory", Path.mkdir)])
def test_a_run_does_not_write_through_links_and_fifos(open_run, run_dir, name, kind, make):
    path = run_dir / name
    path.parent.mkdir(parents=True)
    make(path)
    message = rf"{re.escape(name)}' is {kind}, not a regular file, but a run writes it; move it away"
    with pytest.raises(ConfigError, match=message):
        open_run()


def test_every_file_of_a_run_is_checked_for_links(open_run, run_dir):
    run = open_run()
    run.documents[TOKEN_BUDGETS] = "{}"
    run.begin()
    run.end()
    JsonlWriter(run.path / SCHEDULE).write_all([{"step": 1}])
    JsonlWriter(run.path / RECOVERIES).write_all([{"step": 1}])
    assert {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()} == set(WRITTEN)


def test_a_link_in_place_of_a_subdirectory_is_refused(open_run, tmp_path, run_dir):
    run = open_run()
    run.begin()
    save(run, 1)
    run.end()
    (tmp_path / "elsewhere").mkdir()
    for name in ("trace", "rewards", "weight_sync", DATA, "anything"):
        path = run_dir / name
        if path.is_dir():
            path.rename(tmp_path / "moved")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match=rf"{name}' is a symbolic link, .*, but a run writes it; move it away"):
            open_run()
        with pytest.raises(DataConfigError, match=rf"cannot be read: .*{name}' is a symbolic link"):
            RunFiles(run_dir)
        path.unlink()
    (run_dir / DATA).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataConfigError, match=rf"cannot be written: '.*{DATA}' is a symbolic link"):
        write_rows([{"prompt": "a"}], run_dir / DATA / "train.parquet")
    (run_dir / "checkpoints").rename(tmp_path / "checkpoints")
    (run_dir / "checkpoints").symlink_to(tmp_path / "checkpoints")
    with pytest.raises(ConfigError, match="checkpoints' is not a directory"):
        CheckpointStore(run_dir / "checkpoints")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_checkpoint_records_the_identity_as_json(open_run):
    save(open_run(), 1)
    info = open_run().checkpoint.info
    assert info["kind"] == "train"
    assert info["config"]["actor.optimizer.betas"] == [0.9, 0.999]
    assert json.loads(json.dumps(info)) == info
    with open_run().store.begin(2) as directory:
        save_state({}, directory / "controller")
    with pytest.raises(CheckpointError, match="was not made by a training run, so `hybridflow train` cannot continue"):
        open_run()


def test_a_lock_that_is_held_for_a_moment_is_waited_for(open_run, run_dir, monkeypatch):
    run = open_run()
    run_dir.mkdir()
    look = os.open(run_dir / ".lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(look, fcntl.LOCK_SH)  # as `hybridflow runs` does
    clock = SimpleNamespace(sleep=lambda _: fcntl.flock(look, fcntl.LOCK_UN))
    monkeypatch.setattr("hybridflow.trainers.run.run_directory.time", clock)
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
