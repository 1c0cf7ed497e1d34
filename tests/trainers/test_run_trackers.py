"""Trackers of a run: what the libraries read back from their files equals metrics.jsonl."""

import json
import sys
from pathlib import Path

import pytest

from fixtures import tiny_run
from fixtures.wandb_file import history_of
from hybridflow.cli.main import main
from hybridflow.config import load_config
from hybridflow.errors import ConfigError
from hybridflow.runtime.observe import MLflowTracker, WandbTracker, read_jsonl
from hybridflow.trainers import RunDirectory
from hybridflow.trainers.run.run_log import run_trackers

OWN = """
import json

class Own:
    def __init__(self, run_dir, config):
        self.file = open(run_dir / "own.jsonl", "a")
        self.file.write(json.dumps(config["trainer.total_steps"]) + "\\n")

    def log(self, step, metrics):
        if step == FAILS and not hasattr(self, "failed"):
            self.failed = True
            raise OSError("the server is away")
        self.file.write(json.dumps([step, len(metrics)]) + "\\n")

    def log_samples(self, step, samples):
        self.file.write(json.dumps(["samples", step, len(samples)]) + "\\n")

    def close(self):
        self.file.close()

def without_methods(run_dir, config):
    return object()

def fails(run_dir, config):
    raise RuntimeError("no server")
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch, restores_the_process):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def train(task, run_dir, trackers, steps, *changes):
    arguments = [*tiny_run.GRPO, f"trainer.run_dir={run_dir}", f"trainer.trackers={json.dumps(trackers)}", *changes]
    return main(["train", f"{task}/rl.toml", *arguments, f"trainer.total_steps={steps}"])


def numbers_of(run_dir):
    return {
        row["step"]: {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}
        for row in read_jsonl(run_dir / "metrics.jsonl")
    }


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: with trackers, which may start processes")
@pytest.mark.filterwarnings("ignore")  # of the packages of trackers
def test_wandb_and_mlflow_have_the_numbers_of_metrics_jsonl(task, tmp_path):
    from mlflow import MlflowClient

    run = tmp_path / "run"
    for steps in (2, 3):  # the second start goes on
        assert train(task, run, ["wandb", "mlflow"], steps) == 0
    wanted = numbers_of(run)
    assert sorted(wanted) == [0, 1, 2, 3]

    logged: dict[int, dict] = {}
    for row in history_of(run):
        logged.setdefault(row["_step"], {}).update(row)
    for step, numbers in wanted.items():
        assert {name: logged[step][name] for name in numbers} == pytest.approx(numbers)
    assert logged[3]["samples/_type"] == "table-file"
    assert len({file.name for file in run.glob("wandb/offline-run-*/*.wandb")}) == 1  # the same id

    client = MlflowClient(tracking_uri=f"sqlite:///{run}/mlflow.db")
    experiment = client.get_experiment_by_name("hybridflow")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.params["rollout.group_size"] == str(tiny_run.GROUP_SIZE)
    assert found.info.status == "FINISHED"
    for name in wanted[3]:
        history = {metric.step: metric.value for metric in client.get_metric_history(found.info.run_id, name)}
        assert history == pytest.approx(of_steps(wanted, name))
    assert (run / "mlflow" / found.info.run_id / "artifacts/samples/step_000003.json").is_file()


def of_steps(numbers, name):
    return {step: row[name] for step, row in numbers.items() if name in row}


@pytest.mark.runs
@pytest.mark.own_run("grpo: with trackers, one of which fails")
def test_trackers_of_a_run_have_its_newest_numbers_and_may_fail(task, tmp_path, monkeypatch, caplog):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "own.py").write_text(f"FAILS = 2\n{OWN}")
    run = tmp_path / "run"
    assert train(task, run, [f"{tmp_path}/own.py:Own", "tensorboard"], 3) == 0

    rows = [json.loads(line) for line in (run / "own.jsonl").read_text().splitlines()]
    assert rows[0] == 3
    assert [row[0] for row in rows[1:] if row[0] != "samples"] == [0, 1, 2, 3]
    assert [row[1] for row in rows[1:] if row[0] == "samples"] == [1, 2, 3]
    assert "failed at step 2 (OSError: the server is away); the run goes on" in caplog.text
    assert "works again" in caplog.text

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    wanted = numbers_of(run)
    for name in wanted[3]:
        found = {event.step: event.value for event in events.Scalars(name)}
        assert found == pytest.approx(of_steps(wanted, name), rel=1e-6)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("without_methods", "has no method log"),
        ("fails", "failed: RuntimeError: no server"),
        ("Missing", "has no function 'Missing'"),
    ],
)
def test_a_tracker_that_cannot_be_made_is_an_error(tmp_path, model_dir, function, problem):
    (tmp_path / "own.py").write_text(f"FAILS = 0\n{OWN}")
    trackers = f"trainer.trackers=['{tmp_path}/own.py:{function}']"
    with pytest.raises(ConfigError, match=problem):
        run_trackers(
            RunDirectory(
                load_config(None, [trackers, f"trainer.run_dir={tmp_path}/run", f"model.path={model_dir}"]), "train"
            )
        )


def test_a_package_that_is_missing_is_an_error(tmp_path, monkeypatch):
    for package, build in (
        ("wandb", lambda: WandbTracker(Path(tmp_path), "a", "b", {})),
        ("mlflow", lambda: MLflowTracker(Path(tmp_path), "a", "b", {})),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError, match=r"pip install 'hybridflow\[trackers\]'"):
            build()
