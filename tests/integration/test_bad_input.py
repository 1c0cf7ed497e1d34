"""Invalid input and failing disks: an error message on stderr, an exit status, and no traceback."""

import os
import shutil
import subprocess

import pyarrow.parquet as pq
import pytest

from hybridflow.checkpoint import CheckpointStore
from hybridflow.controller import LocalBackend
from hybridflow.observability import read_jsonl

REWARDS = """
def nan(**_):
    return float("nan")

def none(**_):
    return None

def raising(**_):
    raise KeyError("target")
"""
POOLS = ("placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate")
ON_RAY = ("controller.backend=ray", *POOLS)
LAG = ("trainer.lag=2", "algorithm.rollout_weights=token")
IN_FLIGHT = (*LAG, "rollout.on_new_weights=retract")

INCONSISTENT = [
    (["algorithm.advantage=grop"], "algorithm.advantage='grop' is invalid: expected one of 'gae', 'grpo', 'rloo', "),
    (["controller.num_workers=2"], "controller.num_workers=2 with controller.backend='local' runs ranks one after"),
    (["model.path="], "model.path must be set"),
    (["model.path=absent"], "model.path='absent' is not a model directory: config.json not found"),
    (["algorithm.advantage=gae", "critic.model_path=absent"], "critic.model_path='absent' is not a model directory"),
    (["algorithm.kl_in_loss=true", "reference.model_path=absent"], "reference.model_path='absent' is not a model"),
    (["data.train_files=['missing.parquet']"], "missing.parquet: no such file."),
    (["data.val_files=['missing.parquet']"], "missing.parquet: no such file."),
    (["data.max_prompt_length=5"], "all 24 prompts are longer than max_prompt_length=5"),
    (["data.train_batch_size=25"], "train_batch_size=25 is larger than the data set of 24 rows"),
    (["data.max_response_length=251", "memory.max_tokens_per_micro_batch=512"], "but the model has 256 positions"),
    ([*LAG, "trainer.lag=6"], "samples all 6 batches of the run with the initial weights; use a lag below 6"),
    ([*IN_FLIGHT, *ON_RAY, "trainer.lag=6"], "samples all 6 batches of the run with the initial weights"),
    (
        [*IN_FLIGHT, *ON_RAY, "algorithm.advantage=remax"],
        "='retract' is not supported with algorithm.advantage='remax'",
    ),
    ([*IN_FLIGHT, *POOLS, "rollout.replay=."], "schedule.jsonl not found"),
    ([*LAG, *POOLS, "rollout.replay=."], "needs rollout.on_new_weights = 'retract' or 'keep-kv', and a separate pool"),
    (["placement.lend=true", *POOLS], "placement.pools is set, but controller.backend='local' has one process"),
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


def test_data_files_that_cannot_be_read_are_rejected(task, tmp_path, refuse):
    pq.write_table(pq.read_table(task / "train.parquet").slice(0, 0), tmp_path / "empty.parquet")
    (tmp_path / "text.parquet").write_text("prompt, answer\n")
    for name, problem in (("empty", "the file has no rows."), ("text", "not a readable parquet file")):
        assert f"{name}.parquet: {problem}" in refuse(f'data.train_files=["{tmp_path}/{name}.parquet"]', status=1)
    problem = refuse("data.max_prompt_length=5", "data.overlong_prompts=error", status=1)
    assert "train.parquet: row 0: 6 tokens, but max_prompt_length=5" in problem


def test_a_file_of_the_run_directory_that_is_not_regular_is_rejected(tmp_path, refuse, monkeypatch):
    monkeypatch.setattr(LocalBackend, "call_all", None)  # fail if a worker is called
    (tmp_path / "run").mkdir()
    (tmp_path / "mine.toml").write_text("precious")
    (tmp_path / "run" / "config.toml").symlink_to(tmp_path / "mine.toml")
    assert "config.toml' is a symbolic link, not a regular file, but a run writes it; move it away" in refuse()
    assert (tmp_path / "mine.toml").read_text() == "precious"
    (tmp_path / "run" / "config.toml").unlink()
    os.mkfifo(tmp_path / "run" / "metrics.jsonl")
    assert "metrics.jsonl' is a FIFO, not a regular file" in refuse()


def test_a_replay_of_the_run_itself_is_an_error_that_keeps_its_schedule(tmp_path, refuse):
    (tmp_path / "run").mkdir()
    schedule = tmp_path / "run" / "schedule.jsonl"
    schedule.write_text('{"step": 1, "rank": 0, "event": "load", "number": 0, "engine_steps": null}\n')
    before = schedule.read_text()
    problem = refuse(*IN_FLIGHT, *ON_RAY, f"rollout.replay={tmp_path}/../{tmp_path.name}/run")
    assert "is trainer.run_dir, whose schedule this run writes; set another trainer.run_dir" in problem
    assert schedule.read_text() == before


def test_run_directories_that_cannot_be_used_are_rejected(task, refuse):
    assert "rl.toml' is a file; choose a directory." in refuse(run_dir=task / "rl.toml")
    assert "is not empty and trainer.resume='never'" in refuse("trainer.resume=never", run_dir=task)


def test_missing_vllm_is_reported_with_the_install_command(refuse, monkeypatch):
    monkeypatch.setattr("hybridflow.rollout.vllm.versions.PACKAGES", ("no-such-package",))
    problem = refuse("rollout.backend=vllm")
    assert "rollout.backend='vllm' needs vLLM, which is not installed: `pip install 'vllm==0.32.*'`" in problem


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("nan", "returned nan, which is not a finite number"),
        ("none", "returned None, which is not a finite number"),
        ("raising", "raised KeyError: 'target'"),
    ],
)
def test_invalid_reward_is_reported_with_its_sample(function, problem, tmp_path, refuse):
    (tmp_path / "rewards.py").write_text(REWARDS)
    function = f"reward.function={tmp_path}/rewards.py:{function}"
    message = refuse(function, "data.val_files=[]", "reward.processes=0", status=1)
    assert problem in message
    assert "\n  prompt: " in message  # the sample is shown


def test_duplicate_recipe_key_is_rejected(tmp_path, refuse):
    (tmp_path / "twice.toml").write_text("[trainer]\nseed = 1\nseed = 2\n")
    problem = refuse(recipe=tmp_path / "twice.toml")
    assert "twice.toml, line 3: this key already has a value: each key once: seed = 2" in problem


def test_read_only_run_directory_is_rejected(small_disk, refuse):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    problem = refuse("reward.processes=0", run_dir=small_disk / "run")
    assert "run' cannot be written: [Errno 30] Read-only file system" in problem


@pytest.mark.runs
def test_truncated_checkpoint_error_names_the_newest_valid_one(grpo_run, tmp_path, hybridflow):
    run = shutil.copytree(grpo_run, tmp_path / "run")
    weights = run / "checkpoints" / "step_000006" / "actor.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    rows = (run / "metrics.jsonl").read_bytes()
    damaged = hybridflow("train", run / "config.toml", f"trainer.run_dir={run}")
    assert damaged.status == 1
    assert "step_000006/actor.safetensors' is damaged: it has 1000 bytes, but was saved with " in damaged.err
    assert f"The newest valid checkpoint before it is '{run}/checkpoints/step_000005'" in damaged.err
    assert "same command" not in damaged.err
    assert (run / "metrics.jsonl").read_bytes() == rows


@pytest.mark.runs
@pytest.mark.own_run("resumed: its disk is full")
def test_full_disk_during_a_checkpoint_keeps_the_earlier_one(task, tiny, small_disk, run, refuse):
    changes = [*tiny.PPO, "critic.warmup_steps=0", "trainer.save_every=1", "trainer.total_steps=3", "data.val_files=[]"]
    changes += ["reward.processes=0"]
    problem = refuse(*changes, run_dir=small_disk / "run", status=75)
    assert "the checkpoint of step 2 was not saved: " in problem
    assert "No space left on device" in problem
    assert "Earlier checkpoints are untouched, the newest is " in problem
    assert problem.endswith("\nThe same command continues from the last checkpoint, that of step 1.\n")
    assert CheckpointStore(small_disk / "run" / "checkpoints").list() == (1,)
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    run(*changes, f"trainer.run_dir={small_disk}/run")
    assert [row["step"] for row in read_jsonl(small_disk / "run" / "metrics.jsonl")] == [1, 2, 3]
