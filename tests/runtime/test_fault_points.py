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
    """Return a function that plans faults of actor/0 and arms them, in this process as that worker."""
    token = current_worker.set("actor/0")

    def arm(*texts, next_step=1, delay_s=0.0):
        plan_faults(tmp_path, [Fault.of_text(text) for text in texts], next_step)
        arm_faults(load_config(None, ["faults.random=1", f"faults.delay_s={delay_s}", f"trainer.run_dir={tmp_path}"]))

    yield arm
    arm_faults(Config())
    current_worker.reset(token)


def fired(directory):
    return [json.loads(line) for line in (directory / "faults" / "fired.jsonl").read_text().splitlines()]


def names(directory):
    return [row["fault"] for row in fired(directory)]


def fails_at(phase):
    with pytest.raises(RuntimeError, match="injected by the fault"):
        fault_point(phase)


def test_without_a_plan_nothing_fires_and_no_file_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arm_faults(load_config(None, [f"trainer.run_dir={tmp_path}"]))
    assert fault_points._armed is None
    fault_point_of_step(1)
    fault_point("backward")
    assert unfired_faults() == []
    assert list(tmp_path.iterdir()) == []


def test_a_fault_fires_once_in_its_step_phase_and_worker(armed, tmp_path):
    name = "2: error actor/0 in backward"
    armed(name)
    fault_point_of_step(1)
    fault_point("backward")
    fault_point_of_step(2)
    fault_point("forward")
    token = current_worker.set("actor/1")
    fault_point("backward")
    current_worker.reset(token)
    assert unfired_faults() == [name]
    with pytest.raises(RuntimeError, match=f"injected by the fault '{name}'"):
        fault_point("backward")
    fault_point("backward")
    assert unfired_faults() == []
    (row,) = fired(tmp_path)
    assert row.pop("time") <= time.time()
    assert row == {"fault": name, "step": 2, "worker": "actor/0", "phase": "backward", "kind": "error"}


def test_a_missed_fault_fires_later_and_at_the_start_only_its_own(armed, tmp_path):
    armed("1: error actor/0 in save", "3: error actor/0 in start", "3: error actor/0 in forward", next_step=3)
    fault_point("forward")
    fails_at("start")
    assert unfired_faults() == ["1: error actor/0 in save", "3: error actor/0 in forward"]
    fault_point_of_step(5)
    fails_at("save")
    assert fired(tmp_path)[-1]["step"] == 5


def test_faults_fire_as_often_as_planned_also_after_a_restart(armed, tmp_path):
    twice, other = "1: error actor/0 in score", "1: error actor/0 in forward"
    for _ in range(2):
        armed(twice, twice, other)
        fault_point_of_step(1)
        fails_at("score")
    armed(twice, twice, other)
    fault_point_of_step(1)
    fault_point("score")
    assert unfired_faults() == [other]
    assert names(tmp_path) == [twice] * 2


def test_a_fault_of_the_driver_fires_at_the_begin_of_a_step(armed):
    armed("2: error driver in step")
    current_worker.set("driver")
    fault_point_of_step(1)
    with pytest.raises(RuntimeError):
        fault_point_of_step(2)
    fault_point_of_step(2)


def test_memory_disk_and_delay_act_as_the_system_does(armed, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    armed("1: memory actor/0 in forward", "1: disk actor/0 in save", "1: delay actor/0 in score", delay_s=7.5)
    fault_point_of_step(1)
    with pytest.raises(torch.OutOfMemoryError):
        fault_point("forward")
    with pytest.raises(OSError, match="No space left on device") as error:
        fault_point("save")
    assert error.value.errno == errno.ENOSPC
    for _ in range(2):
        fault_point("score")
    assert slept == [7.5]


def test_corrupt_waits_for_a_fault_point_that_can_flip_a_bit(armed, tmp_path):
    armed("1: corrupt actor/0 in save")
    fault_point_of_step(1)
    fault_point("save")
    file = tmp_path / "state"
    file.write_bytes(b"ab")
    for _ in range(2):
        fault_point("save", lambda: flip_bit_of_file(file))
    assert file.read_bytes() == b"ac"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_flipped_bit_changes_a_copy_of_one_element(dtype):
    tensor = torch.ones(3, 2, dtype=dtype)
    flipped = with_flipped_bit(tensor)
    assert (flipped != tensor).tolist() == [[True, False], [False, False], [False, False]]
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


@pytest.mark.runs
@pytest.mark.own_run("recovered: kills, stops and races single processes")
def test_processes_are_killed_or_stopped_once_and_one_of_two_fails(tmp_path):
    kill, stop, error = (f"1: {kind} actor/0 in backward" for kind in ("kill", "stop", "error"))
    plan_faults(tmp_path, [Fault.of_text(kill)], 1)
    process = start(tmp_path)
    output = process.communicate()
    assert (process.returncode, *output) == (-signal.SIGKILL, "", f"fault injected: {kill}\n")
    assert names(tmp_path) == [kill]

    plan_faults(tmp_path, [Fault.of_text(fault) for fault in (kill, stop)], 1)
    process = start(tmp_path)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == signal.SIGSTOP
    os.kill(process.pid, signal.SIGCONT)
    assert (process.communicate()[0], process.returncode) == ("passed\n", 0)  # it does not kill itself again
    assert names(tmp_path) == [kill, stop]

    plan_faults(tmp_path, [Fault.of_text(fault) for fault in (kill, stop, error)], 1)
    processes = [start(tmp_path) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 1], outputs
    assert names(tmp_path) == [kill, stop, error]
