"""Exit statuses of the command in a separate process.

test_signals.py covers 0 and 130 after signals in the training loop; test_ray_runs.py covers 75 after a killed rank.
"""

import errno
import os
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

REWARDS = """
import pathlib, sys, time

def raising(**_):
    raise KeyError("target")

def waiting(**_):
    return 0.0

if "wait" in __file__:
    pathlib.Path(__file__).with_suffix(".begun").touch()
    time.sleep(600)
"""

FULL_DISK = """
import os, sys
from hybridflow.checkpoint import state_files
from hybridflow.cli.main import main

def save_file(tensors, path, metadata, *, save_file=state_files.save_file):
    if "step_000002" in str(path):
        raise OSError(int(sys.argv[1]), os.strerror(int(sys.argv[1])), str(path))
    save_file(tensors, path, metadata)

state_files.save_file = save_file
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["trian", "rl.toml"], "'trian' is not a command; did you mean train?"),
        (["train", "{task}/rl.toml", "--stop-afetr", "3"], "unrecognized arguments"),
        (["train", "{task}/rl.toml", "trainer.sed=1"], "trainer.sed"),
        (["train", "{task}/absent.toml"], "absent.toml does not exist"),
        (["prepare", "gsm8k", "--train-file", "absent.jsonl", "--test-file", "absent.jsonl"], "no such file"),
    ],
)
def test_exit_2_for_usage_configuration_and_missing_file_errors(arguments, problem, task, start):
    process = start(*(argument.format(task=task) for argument in arguments))
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    assert problem in errors


def test_exit_1_for_a_malformed_row_in_prepare(task, tmp_path, start):
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "two"}\n')
    files = ("--train-file", tmp_path / "rows.jsonl", "--test-file", tmp_path / "rows.jsonl")
    process = start("prepare", "gsm8k", *files, "--output-dir", tmp_path / "out")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "line 1: the answer must end in '#### number'" in errors


@pytest.mark.slow
def test_exit_1_for_a_malformed_row_of_training_data(task, tmp_path, start):
    rows = pq.read_table(task / "train.parquet").to_pylist()
    rows[3]["prompt"] = []
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    process = start(
        "train", task / "rl.toml", f'data.train_files=["{tmp_path}/rows.parquet"]', f"trainer.run_dir={tmp_path}/run"
    )
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "row 3: column 'prompt' has no messages." in errors


@pytest.mark.slow
def test_exit_0_for_a_finished_run_and_1_for_a_damaged_checkpoint(task, tmp_path, start):
    command = ["train", task / "rl.toml", f"trainer.run_dir={tmp_path}/run", "data.val_files=[]"]
    process = start(*command, "trainer.total_steps=1")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    weights = tmp_path / "run" / "checkpoints" / "step_000001" / "actor.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    process = start(*command, "trainer.total_steps=2")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "has 1000 bytes, but was saved with" in errors
    assert "same command" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "recipe", "change", "problem"),
    [
        ("sft", "sft.toml", "offline.optimizer.lr=1e30", "not finite"),
        ("train", "rl.toml", "reward.function={directory}/rewards.py:raising", "raised KeyError: 'target'"),
    ],
)
def test_exit_1_for_a_non_finite_loss_and_a_raising_reward(command, recipe, change, problem, task, tmp_path, start):
    (tmp_path / "rewards.py").write_text(REWARDS)
    change = change.format(directory=tmp_path)
    process = start(command, task / recipe, f"trainer.run_dir={tmp_path}/run", "data.val_files=[]", change)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert problem in errors
    assert errors.count("Traceback") == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_exit_75_for_a_full_disk_and_the_same_command_resumes(number, task, tmp_path, start):
    command = ["train", task / "rl.toml", f"trainer.run_dir={tmp_path}/run", "data.val_files=[]"]
    command += ["trainer.save_every=1", "trainer.total_steps=3"]
    failed = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(number), *map(str, command)], capture_output=True, text=True
    )
    assert failed.returncode == 75
    assert f"error: the checkpoint of step 2 was not saved: cannot write '{tmp_path}/run/" in failed.stderr
    assert os.strerror(number) in failed.stderr
    assert failed.stderr.endswith("\nThe same command continues from the last checkpoint, that of step 1.\n")
    process = start(*command)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "after step 1" in errors


@pytest.mark.slow
def test_exit_75_for_a_run_directory_in_use_by_another_process(task, tmp_path, start):
    run = ["train", task / "rl.toml", f"trainer.run_dir={tmp_path}/run", "data.val_files=[]"]
    first = start(*run, SECONDS_FOR_EACH_REWARD="10", FILE_OF_FIRST_REWARD=str(tmp_path / "begun"))
    wait_for(tmp_path / "begun", first)
    second = start(*run)
    _, errors = second.communicate(timeout=100)
    assert second.returncode == 75
    assert "another process is running in trainer.run_dir" in errors
    assert errors.endswith("\nThe same command starts again: there is no checkpoint yet.\n")


@pytest.mark.slow
def test_exit_75_of_prepare_gives_no_resume_advice(small_disk):
    with open(small_disk / "others", "wb") as file:
        file.write(bytes(1024 * 1024))
    done = subprocess.run(
        [sys.executable, "-m", "hybridflow", "prepare", "countdown", "--output-dir", small_disk / "data"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 75
    assert "No space left on device" in done.stderr
    assert "same command" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_exit_130_for_one_signal_before_the_first_step(number, task, tmp_path, start):
    (tmp_path / "wait.py").write_text(REWARDS)
    process = start(
        "train", task / "rl.toml", f"trainer.run_dir={tmp_path}/run", f"reward.function={tmp_path}/wait.py:waiting"
    )
    wait_for(tmp_path / "wait.begun", process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    assert errors.endswith("interrupted\n")
    assert not (tmp_path / "run").exists()


def wait_for(file, process):
    end = time.monotonic() + 100
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
