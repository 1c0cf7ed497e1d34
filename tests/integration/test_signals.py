"""Runs that get signals: stopped or killed runs resume to results equal to an uninterrupted run."""

import json
import signal
import time

import pytest

pytestmark = pytest.mark.slow


def wait_until(condition, process, timeout_s=100):
    end = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def rows(run):
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_killed_then_terminated_then_finished_equals_uninterrupted(tiny, task, uninterrupted, tmp_path, start):
    run = tmp_path / "run"
    command = [*tiny.commands(task)["grpo"], f"trainer.run_dir={run}", "trainer.save_every=1"]

    killed = start(*command, SECONDS_FOR_EACH_REWARD="0.02")
    wait_until(lambda: len(rows(run)) > 2, killed)  # rows of steps 0 (validation) to 2
    killed.kill()
    killed.wait()
    assert rows(run)[-1]["step"] < 6

    terminated = start(*command, SECONDS_FOR_EACH_REWARD="0.02")
    wait_until(lambda: len(rows(run)) > 4, terminated)
    terminated.send_signal(signal.SIGTERM)
    _, err = terminated.communicate(timeout=100)
    assert terminated.returncode == 0
    assert "SIGTERM: this step will be finished, then a checkpoint is saved" in err
    last = rows(run)[-1]["step"]
    assert f"stopped after step {last} of 6; run the same command to continue" in err
    assert (run / "checkpoints" / f"step_{last:06d}").is_dir()

    finished = start(*command)
    _, err = finished.communicate(timeout=100)
    assert finished.returncode == 0
    assert f"continuing '{run}' after step {last}" in err
    assert tiny.results_of(run, 6) == tiny.results_of(uninterrupted.grpo, 6)


def test_second_signal_exits_immediately(tiny, task, tmp_path, start):
    run = tmp_path / "run"
    command = [*tiny.commands(task)["grpo"], f"trainer.run_dir={run}", "data.val_files=[]"]
    begun = tmp_path / "begun"
    process = start(*command, SECONDS_FOR_EACH_REWARD="1", FILE_OF_FIRST_REWARD=str(begun))
    wait_until(begun.exists, process)  # in the first step; its rewards take 24 seconds
    process.send_signal(signal.SIGINT)
    assert "A second signal ends it at once" in next(line for line in process.stderr if "SIGINT" in line)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=100) == 130  # after the first step it would be 0
    assert not (run / "checkpoints").exists()
