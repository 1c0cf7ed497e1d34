"""Exit statuses of the command in a separate process, also after signals. test_ray_runs.py covers a killed rank."""

import signal
import time

import pytest

from fixtures.tiny_run import GRPO, differing
from hybridflow.observability import read_jsonl

pytestmark = [pytest.mark.runs, pytest.mark.own_run("grpo: it ends with an error or by a signal")]

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

EXHAUSTIVE = pytest.mark.exhaustive
ROWS = '{"question": "1 + 1?", "answer": "two"}\n'
RAISING = "reward.function={directory}/rewards.py:raising"

STATUSES = [
    (2, ["trian", "rl.toml"], "'trian' is not a command; did you mean train?"),
    pytest.param(2, ["train", "{task}/rl.toml", "--stop-afetr", "3"], "unrecognized arguments", marks=EXHAUSTIVE),
    (2, ["train", "{task}/rl.toml", "trainer.sed=1"], "trainer.sed"),
    pytest.param(2, ["train", "{task}/absent.toml"], "absent.toml does not exist", marks=EXHAUSTIVE),
    (1, ["prepare", "gsm8k", "--train-file", "{rows}", "--test-file", "{rows}"], "line 1: the answer must end in"),
    pytest.param(1, ["sft", "{task}/sft.toml", "offline.optimizer.lr=1e30"], "not finite", marks=EXHAUSTIVE),
    (1, ["train", "{task}/rl.toml", RAISING], "raised KeyError: 'target'"),
]


@pytest.mark.parametrize(("status", "arguments", "problem"), STATUSES)
def test_exit_1_for_failures_and_2_for_errors_of_usage(status, arguments, problem, task, tmp_path, start):
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "rewards.py").write_text(REWARDS)
    given = {"task": task, "rows": tmp_path / "rows.jsonl", "directory": tmp_path}
    arguments = [argument.format(**given) for argument in arguments]
    arguments += [f"trainer.run_dir={tmp_path}/run", "data.val_files=[]"] if arguments[0] in ("train", "sft") else []
    process = start(*arguments)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == status
    assert problem in errors
    assert errors.count("Traceback") == 0


def test_exit_75_for_a_run_directory_in_use_by_another_process(task, tmp_path, start):
    run = ["train", task / "rl.toml", f"trainer.run_dir={tmp_path}/run", "data.val_files=[]"]
    first = start(*run, SECONDS_FOR_EACH_REWARD="600", FILE_OF_FIRST_REWARD=str(tmp_path / "begun"))
    wait_until((tmp_path / "begun").exists, first)
    second = start(*run)
    _, errors = second.communicate(timeout=300)
    assert second.returncode == 75
    assert "another process is running in trainer.run_dir" in errors
    assert errors.endswith("\nThe same command starts again: there is no checkpoint yet.\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_exit_130_for_one_signal_before_the_first_step(number, task, tmp_path, start):
    (tmp_path / "wait.py").write_text(REWARDS)
    function = f"reward.function={tmp_path}/wait.py:waiting"
    process = start("train", task / "rl.toml", f"trainer.run_dir={tmp_path}/run", function)
    wait_until((tmp_path / "wait.begun").exists, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert errors.endswith("interrupted\n")
    assert not (tmp_path / "run").exists()


def test_killed_then_terminated_then_finished_equals_uninterrupted(task, grpo_run, tmp_path, start):
    run = tmp_path / "run"
    command = ["train", task / "rl.toml", *GRPO, "model.dtype=float64", "trainer.save_every=1"]
    command.append(f"trainer.run_dir={run}")

    def last_step():
        rows = read_jsonl(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
        return rows[-1]["step"] if rows else 0

    killed = start(*command, SECONDS_FOR_EACH_REWARD="0.02")
    wait_until(lambda: last_step() > 1, killed)
    killed.kill()
    killed.wait()
    terminated = start(*command, SECONDS_FOR_EACH_REWARD="0.02")
    wait_until(lambda: last_step() > 3, terminated)
    terminated.send_signal(signal.SIGTERM)
    _, err = terminated.communicate(timeout=300)
    assert terminated.returncode == 0
    assert "SIGTERM: this step will be finished, then a checkpoint is saved" in err
    assert f"stopped after step {last_step()} of 6; run the same command to continue" in err
    assert (run / "checkpoints" / f"step_{last_step():06d}").is_dir()
    continuing = f"continuing '{run}' after step {last_step()}"
    finished = start(*command)
    _, err = finished.communicate(timeout=300)
    assert finished.returncode == 0
    assert continuing in err
    assert differing(run, grpo_run, 6) == set()


@pytest.mark.exhaustive
def test_second_signal_exits_immediately(task, tmp_path, start):
    run, begun = tmp_path / "run", tmp_path / "begun"
    command = ["train", task / "rl.toml", f"trainer.run_dir={run}", "data.val_files=[]"]
    process = start(*command, SECONDS_FOR_EACH_REWARD="600", FILE_OF_FIRST_REWARD=str(begun))
    wait_until(begun.exists, process)
    process.send_signal(signal.SIGINT)
    assert "A second signal ends it at once" in next(line for line in process.stderr if "SIGINT" in line)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 130
    assert not (run / "checkpoints").exists()


def wait_until(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
