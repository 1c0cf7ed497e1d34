"""Exit statuses of the command in a separate process, also after signals. test_ray_runs.py covers a killed rank."""

import signal
import time

import pytest

from fixtures.tiny_run import GRPO, differing
from hybridflow.runtime.observe import read_jsonl

pytestmark = [pytest.mark.runs, pytest.mark.own_run("grpo: it ends with an error or by a signal")]


def test_exit_75_for_a_run_directory_in_use_by_another_process(task, tmp_path, start):
    run = ["train", task / "rl.toml", f"trainer.run_dir={tmp_path}/run", "data.val_files=[]"]
    first = start(*run, SECONDS_FOR_EACH_REWARD="600", FILE_OF_FIRST_REWARD=str(tmp_path / "begun"))
    wait_until((tmp_path / "begun").exists, first)
    second = start(*run)
    _, errors = second.communicate(timeout=300)
    assert second.returncode == 75
    assert "another process is running in trainer.run_dir" in errors
    assert errors.endswith("\nThe same command starts again: there is no checkpoint yet.\n")


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


def wait_until(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
