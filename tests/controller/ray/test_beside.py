"""Methods that run in a second thread of their process, beside calls that are running or queued."""

import threading

import pytest
import torch

from hybridflow.controller import ClassWithInitArgs, Dispatch, LocalBackend, ResourcePool, Worker, WorkerGroup, register
from hybridflow.errors import WorkerTimeoutError
from hybridflow.protocol import DataProto


class Engine(Worker):
    beside = frozenset({"load"})

    def __init__(self):
        self.loaded, self.condition = [], threading.Condition()

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("y",))
    def generate_after_loads(self, batch):
        """Wait until as many loads have come as the batch says."""
        wanted = int(batch.batch["x"].max())
        with self.condition:
            assert self.condition.wait_for(lambda: len(self.loaded) >= wanted, 120)
        return DataProto.from_dict({"y": batch.batch["x"]})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("x",))
    def load(self, batch):
        with self.condition:
            self.loaded.append(int(batch.batch["x"]))
            self.condition.notify_all()
        return batch

    @register(Dispatch.ONE_TO_ALL)
    def state(self):
        return self.loaded, threading.current_thread().name, torch.get_num_threads()

    @register(Dispatch.ONE_TO_ALL)
    def hang(self):
        threading.Event().wait(1000)


def batch_of(number):
    return DataProto.from_dict({"x": torch.tensor([number])})


@pytest.mark.slow
@pytest.mark.ray
def test_calls_beside_run_in_order_while_other_calls_run_or_wait(ray_backend):
    with WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Engine), ray_backend, "engine") as group:
        first = group.generate_after_loads.remote(batch_of(3))
        loads = [group.load.remote(batch_of(number)) for number in range(1, 4)]
        second = group.generate_after_loads.remote(loads[-1])  # reads the result of a call beside
        assert int(second.get().batch["y"]) == 3
        assert int(first.get().batch["y"]) == 3
        (state,) = group.state()
    assert state[0] == [1, 2, 3]
    assert state[2] == (ray_backend.threads or state[2])


@pytest.mark.slow
@pytest.mark.ray
def test_a_call_beside_has_a_deadline_of_its_own(ray_backend):
    from hybridflow.controller.ray import RayBackend

    with RayBackend(call_timeout_s=1.0) as backend:
        group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Engine), backend, "engine")
        hanging = group.execute_all_async("hang")
        backend.call_timeout_s = 120.0
        assert group.load(batch_of(1)).batch["x"].tolist() == [1]
        with pytest.raises(WorkerTimeoutError, match=r"Engine\.hang on engine, rank 0, has been running for"):
            backend.wait(hanging)


def test_in_one_process_calls_beside_run_one_after_another():
    group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Engine), LocalBackend())
    group.load(DataProto.from_dict({"x": torch.tensor([4, 5])}))
    assert [state[0] for state in group.state()] == [[4], [5]]
