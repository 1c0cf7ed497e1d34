"""Invalid input and failing disks: an error message on stderr, an exit status, and no traceback."""

import json
import os
import re
import shutil
import subprocess

import pyarrow.parquet as pq
import pytest

from hybridflow.checkpoint import CheckpointStore
from hybridflow.controller import LocalBackend

REWARDS = """
def nan(**_):
    return float("nan")

def none(**_):
    return None

def raising(**_):
    raise KeyError("target")
"""


@pytest.fixture
def refuse(task, tmp_path, hybridflow):
    """Return a function that runs a command, checks that it fails with `status`, and returns its error message."""

    def run(*changes, command="train", recipe=task / "rl.toml", run_dir=tmp_path / "run", status=2):
        outcome = hybridflow(command, recipe, f"trainer.run_dir={run_dir}", *changes)
        assert outcome.status == status
        assert outcome.err.startswith("error: ")
        assert "Traceback" not in outcome.err
        return outcome.err

    return run


@pytest.mark.parametrize("key", ["train_files", "val_files"])
def test_missing_data_file_is_rejected(key, refuse, tmp_path):
    assert "missing.parquet: no such file." in refuse(f'data.{key}=["{tmp_path}/missing.parquet"]')
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


def test_empty_data_file_is_rejected(task, tmp_path, refuse):
    pq.write_table(pq.read_table(task / "train.parquet").slice(0, 0), tmp_path / "empty.parquet")
    assert "empty.parquet: the file has no rows." in refuse(f'data.train_files=["{tmp_path}/empty.parquet"]', status=1)


def test_data_file_that_is_not_parquet_is_rejected(tmp_path, refuse):
    (tmp_path / "text.parquet").write_text("prompt, answer\n")
    assert "text.parquet: not a readable parquet file" in refuse(
        f'data.train_files=["{tmp_path}/text.parquet"]', status=1
    )


def test_prompts_over_max_prompt_length_are_rejected(refuse):
    assert "all 24 prompts are longer than max_prompt_length=5" in refuse("data.max_prompt_length=5")
    problem = refuse("data.max_prompt_length=5", "data.overlong_prompts=error", status=1)
    assert "train.parquet: row 0: 6 tokens, but max_prompt_length=5" in problem


def test_a_link_in_the_run_directory_is_rejected_at_the_start(tmp_path, refuse, monkeypatch):
    monkeypatch.setattr(LocalBackend, "call_all", None)  # fail if a worker is called
    (tmp_path / "run").mkdir()
    (tmp_path / "mine.toml").write_text("precious")
    (tmp_path / "run" / "config.toml").symlink_to(tmp_path / "mine.toml")
    assert "config.toml' is a symbolic link, not a regular file, but a run writes it; move it away" in refuse()
    assert (tmp_path / "mine.toml").read_text() == "precious"
    (tmp_path / "run" / "config.toml").unlink()
    os.mkfifo(tmp_path / "run" / "metrics.jsonl")
    assert "metrics.jsonl' is a FIFO, not a regular file" in refuse()


def test_missing_vllm_is_reported_with_the_install_command(refuse, monkeypatch):
    monkeypatch.setattr("hybridflow.rollout.vllm.versions.PACKAGES", ("no-such-package",))
    problem = refuse("rollout.backend=vllm")
    assert "rollout.backend='vllm' needs vLLM, which is not installed: `pip install 'vllm==0.32.*'`" in problem


def test_train_batch_larger_than_the_data_set_is_rejected(refuse):
    assert "train_batch_size=25 is larger than the data set of 24 rows" in refuse("data.train_batch_size=25")


def test_sequences_longer_than_the_model_positions_are_rejected(refuse):
    problem = refuse("data.max_response_length=251", "memory.max_tokens_per_micro_batch=512")
    assert "but the model has 256 positions" in problem


def test_tokenizer_without_eos_token_is_rejected(task, tmp_path, refuse):
    shutil.copytree(task / "model", tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["eos_token"]
    file.write_text(json.dumps(settings))
    assert "has no EOS token, so no response could end" in refuse(f"model.path={tmp_path}/model", status=1)


def test_model_directory_without_tokenizer_is_rejected(task, tmp_path, refuse):
    shutil.copytree(task / "model", tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    assert f"model.path='{tmp_path}/model' has no tokenizer" in refuse(f"model.path={tmp_path}/model")
    teacher = (f"teacher.model_path={tmp_path}/model", "teacher.loss=reverse_kl")
    assert f"teacher.model_path='{tmp_path}/model' has no tokenizer" in refuse(*teacher)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("nan", "returned nan, which is not a finite number"),
        ("none", "returned None, which is not a finite number"),
        ("raising", "raised KeyError: 'target'"),
        ("absent", "has no function 'absent'; it has nan, none, raising."),
    ],
)
def test_invalid_reward_is_reported_with_its_sample(function, problem, tmp_path, refuse):
    (tmp_path / "rewards.py").write_text(REWARDS)
    status = 2 if function == "absent" else 1
    message = refuse(f"reward.function={tmp_path}/rewards.py:{function}", "data.val_files=[]", status=status)
    assert problem in message
    if function != "absent":
        assert "\n  prompt: " in message  # the sample is shown


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            ["algorithm.advantage=grop"],
            "algorithm.advantage='grop' is invalid: expected one of 'gae', 'grpo', 'rloo', ",
        ),
        (["actor.mini_batch_size=3"], "actor.mini_batch_size=3 does not divide data.train_batch_size=8"),
        (["rollout.group_size=1"], "rollout.group_size=1 makes every advantage of algorithm.advantage='grpo' 0"),
        (["controller.num_workers=2"], "controller.num_workers=2 with controller.backend='local' runs ranks one after"),
        (["model.path="], "model.path must be set"),
        (["model.path=", "data.train_files=[]"], "model.path and data.train_files must be set"),
        (["model.path=absent"], "model.path='absent' is not a model directory: config.json not found"),
        (
            ["algorithm.advantage=gae", "critic.model_path=absent"],
            "critic.model_path='absent' is not a model directory",
        ),
        (["algorithm.kl_in_loss=true", "reference.model_path=absent"], "reference.model_path='absent' is not a model"),
        (["algorithm.advantage=gae", "critic.warmup_steps=6"], "leaves the actor no step of the 6"),
    ],
)
def test_inconsistent_configuration_is_rejected_before_writing_files(changes, problem, refuse, tmp_path):
    assert problem in refuse(*changes)
    assert not (tmp_path / "run").exists()


def test_duplicate_recipe_key_is_rejected(tmp_path, refuse):
    (tmp_path / "twice.toml").write_text("[trainer]\nseed = 1\nseed = 2\n")
    assert "twice.toml, line 3: this key already has a value: each key once: seed = 2" in refuse(
        recipe=tmp_path / "twice.toml"
    )


def test_run_directory_that_is_a_file_is_rejected(task, refuse):
    assert "rl.toml' is a file; choose a directory." in refuse(run_dir=task / "rl.toml")


def test_resume_never_rejects_a_directory_that_is_not_empty(task, refuse):
    assert "is not empty and trainer.resume='never'" in refuse("trainer.resume=never", run_dir=task)


def test_read_only_run_directory_is_rejected(small_disk, refuse):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert "run' cannot be written: [Errno 30] Read-only file system" in refuse(run_dir=small_disk / "run")


def test_truncated_checkpoint_error_names_the_newest_valid_one(task, tmp_path, hybridflow, refuse):
    hybridflow("train", task / "rl.toml", f"trainer.run_dir={tmp_path}/run", "trainer.save_every=3")
    weights = tmp_path / "run" / "checkpoints" / "step_000006" / "actor.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    rows = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    problem = refuse("trainer.save_every=3", status=1)
    assert "step_000006/actor.safetensors' is damaged: it has 1000 bytes, but was saved with " in problem
    assert f"The newest valid checkpoint before it is '{tmp_path}/run/checkpoints/step_000003'" in problem
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == rows


def test_full_disk_during_a_checkpoint_keeps_the_earlier_one(tiny, task, small_disk, hybridflow, refuse):
    changes = [*tiny.PPO, "trainer.save_every=1"]
    problem = refuse(*changes, run_dir=small_disk / "run", status=75)
    assert "the checkpoint of step 2 was not saved: " in problem
    assert "No space left on device" in problem
    assert "Earlier checkpoints are untouched, the newest is " in problem
    assert problem.endswith("\nThe same command continues from the last checkpoint, that of step 1.\n")
    assert CheckpointStore(small_disk / "run" / "checkpoints").list() == (1,)

    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    assert hybridflow("train", task / "rl.toml", f"trainer.run_dir={small_disk}/run", *changes).status == 0
    rows = [json.loads(line)["step"] for line in (small_disk / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [0, 1, 2, 3, 4, 5, 6]


def test_full_disk_during_a_metrics_write_is_reported(task, small_disk, refuse):
    with open(small_disk / "others", "wb") as file:
        file.write(bytes(984 * 1024))  # 40 KiB remain; 30 steps need 45 KiB
    changes = ["data.val_files=[]", "trainer.total_steps=30", "trainer.log_samples=0"]
    problem = refuse(*changes, run_dir=small_disk / "run", status=75)
    assert re.search(r"/(metrics|trace/calls)\.jsonl: \d+ characters could not be written: .*No space left", problem)
    assert problem.endswith("\nThe same command starts again: there is no checkpoint yet.\n")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--run", "absent"], "--run 'absent' is not the directory of a run: 'absent/config.toml' does not exist."),
        (["--checkpoint", "absent"], "'absent' is neither a checkpoint nor a run with checkpoints"),
        (["--step", "3"], "--step 3 needs a run; add --run DIR."),
        (["data.val_files=[]"], "data.val_files must be set"),
        (["model.path="], "no model is named; give --run DIR, a RECIPE or model.path=DIR."),
    ],
)
def test_evaluate_rejects_missing_inputs(arguments, problem, task, hybridflow):
    outcome = hybridflow("evaluate", task / "rl.toml", *arguments)
    assert outcome.status == 2
    assert outcome.err.startswith("error: ")
    assert problem in outcome.err
