"""Fault points: each kind fires once, in its step, phase and worker, also across processes and restarts."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from hybridflow.config import Config, load_config
from hybridflow.config.faults import Fault
from hybridflow.runtime import fault_points
from hybridflow.runtime.fault_points import (
    arm_faults,
    current_worker,
    fault_point,
    fault_point_of_step,
    flip_bit_of_file,
    plan_faults,
    unfired_faults,
    with_flipped_bit,
)


@pytest.fixture
def armed(tmp_path):
    """Return a function that plans faults in a run directory and arms them; disarm after the test."""

    def arm(*texts, next_step=1, delay_s=0.0):
        plan_faults(tmp_path, [Fault.of_text(text) for text in texts], next_step)
        arm_faults(load_config(None, ["faults.random=1", f"faults.delay_s={delay_s}", f"trainer.run_dir={tmp_path}"]))

    yield arm
    arm_faults(Config())


@pytest.fixture
def acting():
    """Make this process the worker actor/0."""
    token = current_worker.set("actor/0")
    yield
    current_worker.reset(token)


def fired(directory):
    file = directory / "faults" / "fired.jsonl"
    return [json.loads(line)["fault"] for line in file.read_text().splitlines()] if file.exists() else []


def test_without_a_plan_nothing_fires_and_no_file_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arm_faults(load_config(None, [f"trainer.run_dir={tmp_path}"]))
    assert fault_points._armed is None
    fault_point_of_step(1)
    fault_point("backward")
    assert unfired_faults() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("acting")
def test_a_fault_fires_once_in_its_step_phase_and_worker(armed, tmp_path):
    armed("2: error actor/0 in backward")
    fault_point_of_step(1)
    fault_point("backward")
    fault_point_of_step(2)
    fault_point("forward")
    token = current_worker.set("actor/1")
    fault_point("backward")
    current_worker.reset(token)
    assert unfired_faults() == ["2: error actor/0 in backward"]
    with pytest.raises(RuntimeError, match="injected by the fault '2: error actor/0 in backward'"):
        fault_point("backward")
    fault_point("backward")
    assert unfired_faults() == []
    row = {"fault": "2: error actor/0 in backward", "step": 2, "worker": "actor/0", "phase": "backward"}
    (line,) = (tmp_path / "faults" / "fired.jsonl").read_text().splitlines()
    fired = json.loads(line)
    assert fired.pop("time") <= time.time()
    assert fired == {**row, "kind": "error"}


@pytest.mark.usefixtures("acting")
def test_a_fault_whose_step_did_not_pass_its_phase_fires_in_a_later_step(armed, tmp_path):
    armed("2: error actor/0 in save")
    fault_point_of_step(5)
    with pytest.raises(RuntimeError):
        fault_point("save")
    assert json.loads((tmp_path / "faults" / "fired.jsonl").read_text())["step"] == 5


@pytest.mark.usefixtures("acting")
def test_before_the_first_step_only_faults_at_the_start_fire(armed):
    armed("3: error actor/0 in start", "3: error actor/0 in forward", next_step=3)
    fault_point("forward")
    with pytest.raises(RuntimeError):
        fault_point("start")
    assert unfired_faults() == ["3: error actor/0 in forward"]


@pytest.mark.usefixtures("acting")
def test_equal_entries_fire_as_often_as_they_are_planned(armed, tmp_path):
    armed(*["1: error actor/0 in score"] * 2)
    fault_point_of_step(1)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            fault_point("score")
    fault_point("score")
    assert fired(tmp_path) == ["1: error actor/0 in score"] * 2


@pytest.mark.usefixtures("acting")
def test_a_fault_that_fired_does_not_fire_after_a_restart(armed, tmp_path):
    entries = "1: error actor/0 in score", "1: error actor/0 in forward"
    armed(*entries)
    fault_point_of_step(1)
    with pytest.raises(RuntimeError):
        fault_point("score")
    armed(*entries)
    fault_point_of_step(1)
    fault_point("score")
    assert unfired_faults() == ["1: error actor/0 in forward"]
    assert fired(tmp_path) == ["1: error actor/0 in score"]


def test_a_fault_of_the_driver_fires_at_the_begin_of_a_step(armed):
    armed("2: error driver in step")
    fault_point_of_step(1)
    with pytest.raises(RuntimeError):
        fault_point_of_step(2)
    fault_point_of_step(2)


@pytest.mark.usefixtures("acting")
def test_memory_and_disk_raise_the_errors_of_pytorch_and_the_system(armed):
    armed("1: memory actor/0 in forward", "1: disk actor/0 in save")
    fault_point_of_step(1)
    with pytest.raises(torch.OutOfMemoryError):
        fault_point("forward")
    with pytest.raises(OSError, match="No space left on device") as error:
        fault_point("save")
    assert error.value.errno == errno.ENOSPC


@pytest.mark.usefixtures("acting")
def test_corrupt_waits_for_a_fault_point_that_can_flip_a_bit(armed, tmp_path):
    armed("1: corrupt actor/0 in save")
    fault_point_of_step(1)
    fault_point("save")
    file = tmp_path / "state"
    file.write_bytes(b"ab")
    for _ in range(2):
        fault_point("save", lambda: flip_bit_of_file(file))
    assert file.read_bytes() == b"ac"


@pytest.mark.usefixtures("acting")
def test_delay_sleeps_and_continues(armed, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    armed("1: delay actor/0 in score", delay_s=7.5)
    fault_point_of_step(1)
    fault_point("score")
    fault_point("score")
    assert slept == [7.5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_flipped_bit_changes_a_copy_of_one_element(dtype):
    tensor = torch.ones(3, 2, dtype=dtype)
    flipped = with_flipped_bit(tensor)
    assert (flipped != tensor).sum() == 1
    assert flipped[0, 0] != 1
    assert torch.equal(tensor, torch.ones(3, 2, dtype=dtype))


PROGRAM = """
import sys
from hybridflow.config import load_config
from hybridflow.runtime.fault_points import arm_faults, current_worker, fault_point, fault_point_of_step

arm_faults(load_config(None, ["faults.random=1", f"trainer.run_dir={sys.argv[1]}"]))
fault_point_of_step(1)
current_worker.set("actor/0")
fault_point("backward")
print("passed", flush=True)
"""


def start(directory):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, str(directory)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_killed_process_does_not_kill_itself_again_after_its_restart(tmp_path):
    plan_faults(tmp_path, [Fault.of_text("1: kill actor/0 in backward")], 1)
    process = start(tmp_path)
    out, errors = process.communicate()
    assert (process.returncode, out) == (-signal.SIGKILL, "")
    assert errors == "fault injected: 1: kill actor/0 in backward\n"
    again = start(tmp_path)
    out, errors = again.communicate()
    assert (again.returncode, out, errors) == (0, "passed\n", "")
    assert fired(tmp_path) == ["1: kill actor/0 in backward"]


def test_a_stopped_process_continues_after_sigcont(tmp_path):
    plan_faults(tmp_path, [Fault.of_text("1: stop actor/0 in backward")], 1)
    process = start(tmp_path)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == signal.SIGSTOP
    os.kill(process.pid, signal.SIGCONT)
    out, _ = process.communicate()
    assert (process.returncode, out) == (0, "passed\n")
    assert fired(tmp_path) == ["1: stop actor/0 in backward"]


def test_two_processes_at_the_same_fault_fire_it_once(tmp_path):
    plan_faults(tmp_path, [Fault.of_text("1: error actor/0 in backward")], 1)
    processes = [start(tmp_path) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 1], outputs
    assert fired(tmp_path) == ["1: error actor/0 in backward"]
