"""The training commands: their last line, warnings, and steps that are profiled."""

import gzip
import json

import pytest

from fixtures import tiny_run
from hybridflow.checkpoint import save_state
from hybridflow.cli.training import last_line
from hybridflow.config import load_config
from hybridflow.trainers import RunDirectory

GENERATE = "hybridflow generate --run runs/a --prompt TEXT, hybridflow export runs/a DIR"
EVALUATE = "hybridflow evaluate --run runs/a, hybridflow export runs/a DIR"
USE = "hybridflow export runs/a DIR, then reward.model_path=DIR in the recipe of hybridflow train"


NEXT = [("train", "['v.parquet']", EVALUATE), ("reward-model", "[]", USE)]


@pytest.mark.parametrize(("kind", "files", "commands"), [*NEXT, *((kind, "[]", GENERATE) for kind in ("train", "dpo"))])
def test_the_last_line_names_checkpoint_and_next_commands(tmp_path, monkeypatch, kind, files, commands):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    settings = ["model.path=model", f"data.val_files={files}"]
    run = RunDirectory(load_config(None, [*settings, "trainer.run_dir=runs/a"]), kind)
    assert last_line(run) == "no checkpoint was saved in runs/a; the same command starts again"
    for step in (20, 60):
        with run.store.begin(step, info=run.identity) as directory:
            save_state({}, directory / "controller")
    assert last_line(run) == f"checkpoint: runs/a/checkpoints/step_000060; next: {commands}"
    (tmp_path / "runs/a").rename(tmp_path / "runs/my a")
    run = RunDirectory(load_config(None, [*settings, "trainer.run_dir=runs/my a"]), kind)
    assert "hybridflow export 'runs/my a' DIR" in last_line(run)


@pytest.mark.runs
@pytest.mark.own_run("grpo: its rewards are equal, and it profiles a step")
@pytest.mark.usefixtures("restores_the_process")
def test_a_run_without_learning_signal_warns_and_ends_with_its_checkpoint(task, tmp_path, shown, caplog):
    run = tmp_path / "run"
    (tmp_path / "constant.py").write_text("def score(**_):\n    return 0.5\n")
    changes = [f"trainer.run_dir={run}", f"reward.function={tmp_path}/constant.py:score", "trainer.total_steps=2"]
    out, _ = shown("train", f"{task}/rl.toml", *changes, "reward.processes=0")
    assert out.splitlines()[-1] == (
        f"checkpoint: {run}/checkpoints/step_000002; next: hybridflow evaluate --run {run}, hybridflow export {run} DIR"
    )
    messages = [record.getMessage() for record in caplog.records if "no learning signal" in record.getMessage()]
    assert len(messages) == 1
    assert messages[0].startswith(
        "step 1: equal rewards: the standard deviation of the scores of a step is at most 0 ("
    )


@pytest.mark.runs
@pytest.mark.own_run("grpo: profiles a step of it")
@pytest.mark.usefixtures("restores_the_process")
def test_a_profiled_step_is_written_and_results_are_the_same(task, grpo_run, tmp_path, shown):
    changes = (*tiny_run.GRPO, "model.dtype=float64", "trainer.save_every=1", "trainer.profile_steps=[2]")
    run = tmp_path / "run"
    shown("train", f"{task}/rl.toml", *changes, f"trainer.run_dir={run}", "--stop-after", "2")
    (file,) = [path for path in (run / "profile").rglob("*") if path.is_file()]
    assert str(file.relative_to(run)) == "profile/step_000002/actor_rollout_0.json.gz"
    with gzip.open(file) as opened:
        names = {event.get("name") for event in json.load(opened)["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names
    assert tiny_run.metrics_of(run)[:3] == tiny_run.metrics_of(grpo_run)[:3]
    actor = "checkpoints/step_000002/actor.safetensors"
    assert (run / actor).read_bytes() == (grpo_run / actor).read_bytes()
    assert not (grpo_run / "profile").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["trainer.profile_steps=[4]", "trainer.total_steps=3"], "has step 4, but trainer.total_steps=3"),
        (["trainer.profile_steps=[2,9]"], "has step 9, but the run ends with step 6"),
        (["trainer.profile_steps=[1]", "trainer.profile_ranks=[0,1]"], "has rank 1, but the ranks of this run are 0 "),
        (["trainer.profile_steps=[0]"], "trainer.profile_steps"),
    ],
)
def test_a_step_or_a_rank_that_the_run_lacks_is_an_error(task, tmp_path, shown, changes, problem):
    assert problem in shown("train", f"{task}/rl.toml", f"trainer.run_dir={tmp_path}/run", *changes, status=2)[1]
    assert not (tmp_path / "run").exists()
