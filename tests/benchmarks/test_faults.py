"""Planned faults: each kind fires once, in its step, phase and worker, also across processes and restarts."""

import errno
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from support.faults import Fault, Plan, fired_faults, flip_bit, kinds_at, phases_of, plan_faults

from hybridflow.config import load_config
from hybridflow.rollout.weight_sync.buckets import Bucket
from hybridflow.runtime.fault_points import FAULTS_VARIABLE, current_worker, fault_point
from hybridflow.runtime.partial_tensor import PartialTensor, contents_of

ON_RAY = ["controller.backend=ray", "controller.num_workers=2"]
POOLS = ["controller.backend=ray", "placement.pools={learn=[2],generate=[3]}", "placement.roles.rollout=generate"]


@pytest.fixture
def plan(tmp_path):
    """Return a function that plans faults and returns the plan as a process reads it."""

    def plan(*texts, **options):
        plan_faults(tmp_path, texts, **options)
        return Plan(tmp_path / "faults")

    return plan


def names(directory):
    return [row["fault"] for row in fired_faults(directory)]


def fails_at(plan, phase, worker="actor/0", target=None):
    with pytest.raises(RuntimeError, match="injected by the fault"):
        plan.inject(phase, worker, target)


def test_an_entry_is_parsed_and_written_back():
    fault = Fault.of_text(" 12:kill   critic/3 in  backward ")
    assert fault == Fault(12, "kill", "critic/3", "backward")
    assert Fault.of_text(str(fault)) == fault


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("3: kill actor_rollout/0 at backward", "is not 'STEP: KIND WORKER in PHASE'"),
        ("1: kill actor_rollout/0 in backwards", "'backwards' is not a phase; phases: start, generate"),
        ("1: kil actor_rollout/0 in backward", "kinds in this phase: kill, stop, delay, memory, error"),
        ("1: disk actor_rollout/0 in backward", "kinds in this phase: kill, stop, delay, memory, error"),
    ],
)
def test_a_bad_entry_is_an_error_with_what_is_valid(plan, entry, reason):
    with pytest.raises(ValueError, match=reason):
        plan(entry)


@pytest.mark.parametrize(
    ("overrides", "role", "phases"),
    [
        (ON_RAY, "actor_rollout", "start generate forward backward optimizer sync_send sync_receive save"),
        (["controller.backend=ray"], "actor_rollout", "start generate backward optimizer save"),
        (POOLS, "actor_rollout", "start forward backward optimizer sync_send save"),
        (POOLS, "rollout", "start generate sync_receive"),
        (ON_RAY, "reward", "start score save"),
        ([*ON_RAY, "reward.model_path=m"], "reward", "start score forward"),
        ([*ON_RAY, "algorithm.advantage=gae"], "critic", "start forward backward optimizer save"),
        (ON_RAY, "reference", "start forward"),
        (ON_RAY, "driver", "step publish log"),
    ],
)
def test_phases_of_a_role_follow_the_configuration(overrides, role, phases):
    assert " ".join(phases_of(load_config(None, overrides), role)) == phases


def test_only_the_rank_that_sends_weights_to_another_pool_can_corrupt_them():
    config = load_config(None, POOLS)
    assert "corrupt" in kinds_at(config, "actor_rollout/0", "sync_send")
    assert "corrupt" not in kinds_at(config, "actor_rollout/1", "sync_send")
    assert "corrupt" in kinds_at(load_config(None, ON_RAY), "actor_rollout/1", "sync_send")


def test_a_fault_fires_once_in_its_step_phase_and_worker(plan, tmp_path):
    name = "2: error actor/0 in backward"
    planned = plan(name)
    planned.inject("step", "driver", 1)
    planned.inject("backward", "actor/0", None)
    planned.inject("step", "driver", 2)
    planned.inject("forward", "actor/0", None)
    planned.inject("backward", "actor/1", None)
    assert names(tmp_path) == []
    fails_at(planned, "backward")
    planned.inject("backward", "actor/0", None)
    (row,) = fired_faults(tmp_path)
    assert row.pop("time") <= time.time()
    assert row == {"fault": name, "step": 2, "worker": "actor/0", "phase": "backward", "kind": "error"}


def test_a_missed_fault_fires_later_and_at_the_start_only_its_own(plan, tmp_path):
    planned = plan("1: error actor/0 in save", "3: error actor/0 in start", "3: error actor/0 in forward", next_step=3)
    planned.inject("forward", "actor/0", None)
    fails_at(planned, "start")
    assert names(tmp_path) == ["3: error actor/0 in start"]
    planned.inject("step", "driver", 5)
    fails_at(planned, "save")
    assert fired_faults(tmp_path)[-1]["step"] == 5


def test_faults_fire_as_often_as_planned_also_after_a_restart(plan, tmp_path):
    twice, other = "1: error actor/0 in score", "1: error actor/0 in forward"
    for _ in range(2):
        planned = plan(twice, twice, other)
        planned.inject("step", "driver", 1)
        fails_at(planned, "score")
    planned = plan(twice, twice, other)
    planned.inject("step", "driver", 1)
    planned.inject("score", "actor/0", None)
    assert names(tmp_path) == [twice] * 2


def test_a_fault_of_the_driver_fires_at_the_begin_of_a_step(plan):
    planned = plan("2: error driver in step")
    planned.inject("step", "driver", 1)
    fails_at(planned, "step", "driver", 2)
    planned.inject("step", "driver", 2)


def test_memory_disk_and_delay_act_as_the_system_does(plan, monkeypatch):
    slept = []
    monkeypatch.setattr("support.faults.time", SimpleNamespace(sleep=slept.append, time=time.time))
    planned = plan("1: memory actor/0 in forward", "1: disk actor/0 in save", "1: delay actor/0 in score", delay_s=7.5)
    planned.inject("step", "driver", 1)
    with pytest.raises(torch.OutOfMemoryError):
        planned.inject("forward", "actor/0", None)
    with pytest.raises(OSError, match="No space left on device") as error:
        planned.inject("save", "actor/0", None)
    assert error.value.errno == errno.ENOSPC
    for _ in range(2):
        planned.inject("score", "actor/0", None)
    assert slept == [7.5]


def test_corrupt_waits_for_a_fault_point_with_something_to_corrupt(plan, tmp_path):
    planned = plan("1: corrupt actor/0 in save")
    planned.inject("step", "driver", 1)
    planned.inject("save", "actor/0", None)
    file = tmp_path / "state"
    file.write_bytes(b"ab")
    for _ in range(2):
        planned.inject("save", "actor/0", file)
    assert file.read_bytes() == b"ac"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_bit_is_flipped_in_a_copy_of_one_weight(dtype):
    tensor = torch.ones(3, 2, dtype=dtype)
    bucket = Bucket({"a": tensor}, {})
    flip_bit(bucket)
    assert (bucket.weights["a"] != tensor).tolist() == [[True, False], [False, False], [False, False]]
    assert torch.equal(tensor, torch.ones(3, 2, dtype=dtype))


def test_a_bit_is_flipped_in_the_part_of_a_weight_that_is_in_memory():
    whole = torch.arange(6.0).view(3, 2)
    part = PartialTensor(whole.shape, whole.dtype, "a", ((0, 1), (0, 2)), whole[:1])
    bucket = Bucket({"a": part}, {})
    flip_bit(bucket)
    assert isinstance(bucket.weights["a"], PartialTensor)
    assert (contents_of(bucket.weights["a"]) != whole[:1]).sum() == 1
    assert torch.equal(whole, torch.arange(6.0).view(3, 2))


def test_fault_points_follow_the_plan_that_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.setenv(FAULTS_VARIABLE, plan_faults(tmp_path, ["1: error actor/0 in backward"]))
    fault_point("step", 1)
    fault_point("backward")
    token = current_worker.set("actor/0")
    with pytest.raises(RuntimeError, match="injected by the fault '1: error actor/0 in backward'"):
        fault_point("backward")
    fault_point("backward")
    current_worker.reset(token)


PROGRAM = """
from hybridflow.runtime.fault_points import current_worker, fault_point

fault_point("step", 1)
current_worker.set("actor/0")
fault_point("backward")
print("passed", flush=True)
"""


def start(hook):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), FAULTS_VARIABLE: hook}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.runs
@pytest.mark.own_run("recovered: kills, stops and races single processes")
def test_processes_are_killed_or_stopped_once_and_one_of_two_fails(tmp_path):
    kill, stop, error = (f"1: {kind} actor/0 in backward" for kind in ("kill", "stop", "error"))
    process = start(plan_faults(tmp_path, [kill]))
    output = process.communicate()
    assert (process.returncode, output[0]) == (-signal.SIGKILL, "")
    assert output[1].endswith(f"fault injected: {kill}\n")
    assert names(tmp_path) == [kill]

    process = start(plan_faults(tmp_path, [kill, stop]))
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == signal.SIGSTOP
    os.kill(process.pid, signal.SIGCONT)
    assert (process.communicate()[0], process.returncode) == ("passed\n", 0)  # it does not kill itself again
    assert names(tmp_path) == [kill, stop]

    hook = plan_faults(tmp_path, [kill, stop, error])
    processes = [start(hook) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 1], outputs
    assert names(tmp_path) == [kill, stop, error]
