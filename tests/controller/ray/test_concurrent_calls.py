"""Workers that run several calls at the same time, each in its own thread."""

import threading
import time

import pytest
import torch

from hybridflow.controller import ClassWithInitArgs, Dispatch, LocalBackend, ResourcePool, Worker, WorkerGroup, register
from hybridflow.controller.colocate import spawn_colocated
from hybridflow.errors import DispatchError, WorkerError, WorkerTimeoutError
from hybridflow.protocol import DataProto


class Judge(Worker):
    concurrent_calls = 4

    def __init__(self):
        self.lock, self.running, self.most, self.four = threading.Lock(), 0, 0, threading.Barrier(4)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("y",))
    def judge(self, batch):
        return DataProto.from_dict({"y": batch.batch["x"] + 1})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("y",))
    def judge_with_three_others(self, batch):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.four.wait()
        time.sleep(0.1)  # a fifth call would arrive
        with self.lock:
            self.running -= 1
        return self.judge(batch)

    @register(Dispatch.ONE_TO_ALL)
    def at_the_same_time(self):
        return self.most, torch.get_num_threads()

    @register(Dispatch.ONE_TO_ALL)
    def meet(self):
        self.require_collectives("averaging")

    @register(Dispatch.ONE_TO_ALL)
    def hang(self):
        time.sleep(1000)


class Plain(Worker):
    pass


class Zero(Worker):
    concurrent_calls = 0


def batch_of(number):
    return DataProto.from_dict({"x": torch.tensor([number])})


@pytest.mark.slow
@pytest.mark.ray
def test_concurrent_calls_sets_the_number_of_simultaneous_calls(ray_backend):
    with WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Judge), ray_backend, "judge") as group:
        futures = [group.judge_with_three_others.remote(batch_of(number)) for number in range(8)]
        assert [int(future.get().batch["y"]) for future in futures] == list(range(1, 9))
        ((most, threads),) = group.at_the_same_time()
    assert most == 4
    assert threads == (ray_backend.threads or threads)


@pytest.mark.slow
@pytest.mark.ray
def test_a_result_is_readable_while_an_older_call_runs(ray_backend):
    from hybridflow.controller.ray import RayBackend

    with RayBackend(call_timeout_s=1.0) as backend:
        group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Judge), backend, "judge")
        hanging = group.hang.remote()
        backend.call_timeout_s = 120.0
        assert int(group.judge(batch_of(1)).batch["y"]) == 2
        with pytest.raises(WorkerTimeoutError, match=r"Judge\.hang on judge, rank 0, has been running for"):
            hanging.get()


def test_the_local_backend_runs_concurrent_workers_at_once():
    with WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Judge), LocalBackend(), "judge") as group:
        assert int(group.judge.remote(batch_of(4)).get().batch["y"]) == 5
        with pytest.raises(WorkerError, match="runs 4 calls at the same time, in an order that differs between ranks"):
            group.meet()


def test_roles_that_share_a_process_cannot_be_concurrent():
    classes = {"judge": ClassWithInitArgs(Judge), "plain": ClassWithInitArgs(Plain)}
    with pytest.raises(DispatchError, match=r"cannot share a process with 'plain'.*give 'judge' a separate pool"):
        spawn_colocated(ResourcePool([1]), classes, LocalBackend())


def test_concurrent_calls_must_be_positive():
    with pytest.raises(DispatchError, match=r"Zero\.concurrent_calls=0 is invalid: expected an integer of 1 or more"):
        WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Zero))
