"""The last line and the warnings of a training command."""

import runpy
from pathlib import Path

import pytest
import torch

from hybridflow.checkpoint import save_state
from hybridflow.cli.main import main
from hybridflow.cli.training import last_line
from hybridflow.config import load_config
from hybridflow.trainers import RunDirectory


@pytest.fixture
def open_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def build(kind, *overrides, run_dir="runs/a", steps=(20, 60)):
        run = RunDirectory(load_config(None, [f"trainer.run_dir={run_dir}", "model.path=model", *overrides]), kind)
        for step in steps:
            with run.store.begin(step, info=run.identity) as directory:
                save_state({}, directory / "controller")
        return run

    return build


@pytest.mark.parametrize(
    ("kind", "overrides", "commands"),
    [
        (
            "train",
            ["data.val_files=['v.parquet']"],
            "hybridflow evaluate --run runs/a, hybridflow export runs/a DIR",
        ),
        ("train", [], "hybridflow generate --run runs/a --prompt TEXT, hybridflow export runs/a DIR"),
        ("sft", [], "hybridflow generate --run runs/a --prompt TEXT, hybridflow export runs/a DIR"),
        ("dpo", [], "hybridflow generate --run runs/a --prompt TEXT, hybridflow export runs/a DIR"),
        (
            "reward-model",
            [],
            "hybridflow export runs/a DIR, then reward.model_path=DIR in the recipe of hybridflow train",
        ),
    ],
)
def test_the_last_line_names_checkpoint_and_next_commands(open_run, kind, overrides, commands):
    run = open_run(kind, *overrides)
    assert last_line(run) == f"checkpoint: runs/a/checkpoints/step_000060; next: {commands}"


def test_a_run_directory_with_a_space_is_quoted(open_run):
    assert "hybridflow export 'my runs/a' DIR" in last_line(open_run("sft", run_dir="my runs/a"))


def test_a_run_without_a_checkpoint_says_so(open_run):
    run = open_run("train", steps=())
    assert last_line(run) == "no checkpoint was saved in runs/a; the same command starts again"


@pytest.fixture
def restores_the_process():
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.usefixtures("restores_the_process")
def test_a_run_without_learning_signal_warns_and_ends_with_its_checkpoint(tmp_path, capsys, caplog):
    tiny = runpy.run_path(str(Path(__file__).parents[1] / "fixtures" / "tiny_run.py"))
    task, run_dir = tiny["write_task"](tmp_path), tmp_path / "run"
    (task / "constant.py").write_text("def score(**_):\n    return 0.5\n")
    changes = [f"trainer.run_dir={run_dir}", f"reward.function={task}/constant.py:score", "trainer.total_steps=2"]
    assert main(["train", f"{task}/rl.toml", *changes]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"checkpoint: {run_dir}/checkpoints/step_000002; next: hybridflow evaluate --run {run_dir}, "
        f"hybridflow export {run_dir} DIR"
    )
    warnings = [record.getMessage() for record in caplog.records if "no learning signal" in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "step 1: equal rewards: the standard deviation of the scores of a step is at most 0 ("
    )
