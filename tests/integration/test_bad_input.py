"""Invalid input and failing disks: an error message on stderr, an exit status, and no traceback."""

import subprocess

import pyarrow.parquet as pq
import pytest

from hybridflow.controller import LocalBackend

POOLS = ("placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate")
ON_RAY = ("controller.backend=ray", *POOLS)
LAG = ("trainer.lag=2", "algorithm.rollout_weights=token")
IN_FLIGHT = (*LAG, "rollout.on_new_weights=retract")

INCONSISTENT = [
    (["controller.num_workers=2"], "controller.num_workers=2 with controller.backend='local' runs ranks one after"),
    (["model.path="], "model.path must be set"),
    (["model.path=absent"], "model.path='absent' is not a model directory: config.json not found"),
    (["algorithm.advantage=gae", "critic.model_path=absent"], "critic.model_path='absent' is not a model directory"),
    (["algorithm.kl_in_loss=true", "reference.model_path=absent"], "reference.model_path='absent' is not a model"),
    (["data.train_files=['missing.parquet']"], "missing.parquet: no such file."),
    (["data.max_response_length=251", "memory.max_tokens_per_micro_batch=512"], "but the model has 256 positions"),
    ([*LAG, "trainer.lag=6"], "samples all 6 batches of the run with the initial weights; use a lag below 6"),
    ([*IN_FLIGHT, *POOLS, "rollout.replay=."], "schedule.jsonl not found"),
    ([*LAG, *POOLS, "rollout.replay=."], "needs rollout.on_new_weights = 'retract' and a separate pool"),
]


@pytest.mark.parametrize(("changes", "problem"), INCONSISTENT)
def test_inconsistent_configuration_is_rejected_before_writing_files(changes, problem, refuse, tmp_path):
    assert problem in refuse(*changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "key"), [("train", "train_files"), ("train", "val_files"), ("evaluate", "val_files")]
)
def test_unknown_data_sources_are_rejected_at_the_start(task, tmp_path, refuse, monkeypatch, command, key):
    monkeypatch.setattr(LocalBackend, "call_all", None)  # fail if a worker is called
    table = pq.read_table(task / "train.parquet").slice(0, 12)
    names = ["poems", "countdown", "jokes"] * 4
    column = table.schema.get_field_index("data_source")
    pq.write_table(table.set_column(column, "data_source", [names]), tmp_path / "mixed.parquet")
    problem = refuse(f'data.{key}=["{tmp_path}/mixed.parquet"]', "reward.function=", command=command)
    assert f"serves data_source 'jokes', 'poems' in {tmp_path}/mixed.parquet; known are DigitalLearning" in problem
    assert 'Set reward.function="path.py:function"' in problem
    assert not (tmp_path / "run").exists()


def test_a_replay_of_the_run_itself_is_an_error_that_keeps_its_schedule(tmp_path, refuse):
    (tmp_path / "run").mkdir()
    schedule = tmp_path / "run" / "schedule.jsonl"
    schedule.write_text('{"step": 1, "rank": 0, "event": "load", "number": 0, "engine_steps": null}\n')
    before = schedule.read_text()
    problem = refuse(*IN_FLIGHT, *ON_RAY, f"rollout.replay={tmp_path}/../{tmp_path.name}/run")
    assert "is trainer.run_dir, whose schedule this run writes; set another trainer.run_dir" in problem
    assert schedule.read_text() == before


def test_missing_vllm_is_reported_with_the_install_command(refuse, monkeypatch):
    monkeypatch.setattr("hybridflow.rollout.vllm.process.PACKAGES", ("no-such-package",))
    problem = refuse("rollout.backend=vllm")
    assert "rollout.backend='vllm' needs vLLM, which is not installed: `pip install 'vllm==0.32.*'`" in problem


def test_read_only_run_directory_is_rejected(small_disk, refuse):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    problem = refuse("reward.processes=0", run_dir=small_disk / "run")
    assert "run' cannot be written: [Errno 30] Read-only file system" in problem
