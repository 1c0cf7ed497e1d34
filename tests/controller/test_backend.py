"""The contract of a backend, tested on every backend, and properties of the local backend."""

import gc
import logging
import os
import pickle
import time
import traceback

import numpy as np
import pytest
import torch

from hybridflow.controller import ClassWithInitArgs, LocalBackend, ResourcePool, Worker
from hybridflow.controller.backend import NO_TERMS
from hybridflow.errors import DispatchError, FieldError, HybridFlowError, WorkerError
from hybridflow.protocol import DataProto

SPMD_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Recorder(Worker):
    def __init__(self, start=None, fail_on=-1):
        if self.rank == fail_on:
            raise ValueError("no such file")
        self.start, self.kept = start, []
        self.seen = {name: os.environ.get(name) for name in SPMD_VARIABLES}

    def environment(self):
        return self.seen, {name: os.environ.get(name) for name in SPMD_VARIABLES}

    def ranks(self):
        return self.rank, self.world_size, self.local_rank, self.local_world_size

    def add_one(self, value):
        self.kept.append(value)
        value += 1
        return value

    def last(self):
        return self.kept[-1]

    def echo(self, *args, **kwargs):
        return args, kwargs

    def start_value(self):
        return self.start

    def divide_by_zero(self):
        return 1 / 0

    def missing_column(self):
        raise FieldError("needs 'values'")

    def wait_for_file(self, path, value=None):
        while not os.path.exists(path):
            time.sleep(0.01)
        return value

    def meet(self):
        self.require_collectives("averaging gradients")


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def backend(request):
    return LocalBackend() if request.param == "local" else request.getfixturevalue("ray_backend")


_running = {}


def spawn(backend, num_ranks, *args, **kwargs):
    """Return recorders; if they are processes, reuse those of an earlier test with the same arguments."""
    if isinstance(backend, LocalBackend):
        return spawn_anew(backend, [num_ranks], *args, **kwargs)
    key = f"{num_ranks} {args} {kwargs}"
    if key not in _running:
        _running[key] = spawn_anew(backend, [num_ranks], *args, **kwargs)
    return _running[key]


def spawn_anew(backend, process_on_nodes, *args, name="recorder", **kwargs):
    return backend.spawn({name: ClassWithInitArgs(Recorder, *args, **kwargs)}, ResourcePool(process_on_nodes))[name]


def start(backend, worker, method_name, args=(), kwargs=None):
    return backend.call_all([worker], method_name, [(args, kwargs or {})], [NO_TERMS])[0]


def call(backend, worker, method_name, *args, **kwargs):
    return backend.get([start(backend, worker, method_name, args, kwargs)])[0]


# The contract


def test_workers_are_named_by_group_and_rank(backend):
    assert [worker.name for worker in spawn(backend, 2)] == ["recorder/0", "recorder/1"]


def test_workers_know_their_rank_and_local_rank(backend):
    assert [call(backend, worker, "ranks") for worker in spawn(backend, 2)] == [(0, 2, 0, 2), (1, 2, 1, 2)]


def test_finished_calls_are_not_running(backend):
    for worker in spawn(backend, 2):
        call(backend, worker, "ranks")
    assert backend.running() == []


@pytest.mark.ray
def test_running_calls_have_the_time_of_their_start(ray_backend, tmp_path):
    first, second = spawn(ray_backend, 2)
    before, path = time.time(), str(tmp_path / "file")
    waiting = start(ray_backend, first, "wait_for_file", [path])
    reader = start(ray_backend, second, "wait_for_file", [path, waiting])
    ((name, since),) = ray_backend.running()  # the second one waits for its argument
    assert name == first.name
    assert before <= since <= time.time()
    (tmp_path / "file").touch()
    ray_backend.wait([waiting, reader])
    assert ray_backend.running() == []


def test_local_rank_counts_per_node():
    workers = spawn_anew(backend := LocalBackend(), [2, 1])
    assert [call(backend, worker, "ranks") for worker in workers] == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]


def test_spmd_variables_are_set_during_construction_and_calls(backend):
    workers = spawn(backend, 2)
    ports = set()
    for rank, worker in enumerate(workers):
        while_built, while_called = call(backend, worker, "environment")
        assert while_built == while_called
        assert while_called["RANK"] == str(rank)
        assert while_called["WORLD_SIZE"] == while_called["LOCAL_WORLD_SIZE"] == "2"
        assert while_called["LOCAL_RANK"] == str(rank)
        assert while_called["MASTER_ADDR"]
        ports.add(while_called["MASTER_PORT"])
    assert len(ports) == 1
    assert 1024 <= int(ports.pop()) < 65536


def test_arguments_are_private_copies_of_the_worker(backend):
    (worker,) = spawn(backend, 1)
    sent = torch.zeros(3)
    assert call(backend, worker, "add_one", sent).tolist() == [1, 1, 1]
    assert sent.tolist() == [0, 0, 0]
    sent.fill_(9)
    assert call(backend, worker, "last").tolist() == [1, 1, 1]


def test_results_are_private_copies_of_the_caller(backend):
    (worker,) = spawn(backend, 1)
    result = call(backend, worker, "add_one", np.zeros(3))
    result[:] = 9
    assert call(backend, worker, "last").tolist() == [1, 1, 1]


def test_later_writes_by_the_worker_do_not_change_a_result(backend):
    (worker,) = spawn(backend, 1)
    handle = start(backend, worker, "add_one", (torch.zeros(2),))
    kept = start(backend, worker, "last", ())
    call(backend, worker, "add_one", kept)
    assert handle.get().tolist() == [1, 1]


def test_every_rank_gets_its_own_copy_of_constructor_arguments(backend):
    start = {"sizes": [1]}
    first, second = spawn(backend, 2, start)
    call(backend, first, "start_value")["sizes"].append(2)
    assert call(backend, second, "start_value") == {"sizes": [1]}
    start["sizes"].append(3)
    assert call(backend, first, "start_value") == {"sizes": [1]}


def test_a_handle_argument_arrives_as_its_value(backend):
    first, second = spawn(backend, 2)
    shared = backend.put(torch.zeros(2))
    assert call(backend, first, "add_one", shared).tolist() == [1, 1]
    assert call(backend, second, "add_one", value=shared).tolist() == [1, 1]
    assert shared.get().tolist() == [0, 0]


def test_getting_twice_returns_two_copies(backend):
    handle = backend.put(torch.zeros(2))
    handle.get().fill_(5)
    assert handle.get().tolist() == [0, 0]


def test_a_released_value_cannot_be_read(backend):
    handle = backend.put(1)
    backend.release([handle])
    backend.release([handle])
    with pytest.raises(WorkerError, match="this result was released"):
        handle.get()


def test_calling_a_stopped_worker_raises(backend):
    first, second = spawn_anew(backend, [2])
    assert backend.is_alive(first)
    backend.shutdown([first])
    backend.shutdown([first])
    assert not backend.is_alive(first)
    assert backend.is_alive(second)
    with pytest.raises(WorkerError, match="recorder/0 was shut down"):
        call(backend, first, "ranks")


def test_a_hybridflow_error_keeps_its_type(backend):
    (worker,) = spawn(backend, 1)
    with pytest.raises(FieldError, match="needs 'values'") as caught:
        call(backend, worker, "missing_column")
    assert caught.value.__notes__ == ["in Recorder.missing_column, worker recorder/0"]


def test_other_errors_become_worker_errors_that_name_the_worker(backend):
    worker = spawn(backend, 2)[1]
    with pytest.raises(WorkerError) as caught:
        call(backend, worker, "divide_by_zero")
    assert str(caught.value) == (
        "Recorder.divide_by_zero failed on worker recorder/1: ZeroDivisionError: division by zero"
    )
    assert (caught.value.role, caught.value.rank) == ("recorder", 1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert pickle.loads(pickle.dumps(caught.value)).rank == 1


def test_a_failing_constructor_on_one_rank_fails_the_group(backend):
    with pytest.raises(WorkerError, match=r"Recorder\.__init__ failed on worker recorder/1: ValueError: no such file"):
        spawn(backend, 2, fail_on=1)


def test_error_names_an_argument_that_cannot_be_copied(backend):
    (worker,) = spawn(backend, 1)
    with pytest.raises(DispatchError, match=r"argument 1 of Recorder\.echo is a generator"):
        call(backend, worker, "echo", 1, (n for n in [1]))


# The local backend


def test_environment_is_restored_after_calls_and_errors(monkeypatch):
    monkeypatch.setenv("RANK", "77")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    before = dict(os.environ)
    backend = LocalBackend()
    worker = spawn(backend, 2)[1]
    assert dict(os.environ) == before
    call(backend, worker, "ranks")
    assert dict(os.environ) == before
    with pytest.raises(WorkerError):
        call(backend, worker, "divide_by_zero")
    assert dict(os.environ) == before


def test_traceback_ends_at_the_failing_line():
    backend = LocalBackend()
    (worker,) = spawn(backend, 1)
    with pytest.raises(WorkerError) as caught:
        start(backend, worker, "divide_by_zero", ())
    cause = caught.value.__cause__
    assert cause is not None
    last = traceback.extract_tb(cause.__traceback__)[-1]
    assert (last.filename, last.name, last.line) == (__file__, "divide_by_zero", "return 1 / 0")


def test_local_backend_allows_collectives_only_for_one_rank():
    backend = LocalBackend()
    first, _ = spawn(backend, 2)
    with pytest.raises(WorkerError, match="ranks one after another"):
        call(backend, first, "meet")
    (alone,) = spawn(backend, 1)
    assert call(backend, alone, "meet") is None


class Group(Worker):
    def sum(self):
        self.require_collectives("a sum")
        torch.distributed.init_process_group("gloo")
        total = torch.ones(2)
        torch.distributed.all_reduce(total)
        torch.distributed.destroy_process_group()
        return total


def test_torch_distributed_initializes_in_a_single_rank():
    backend = LocalBackend()
    (worker,) = backend.spawn({"group": ClassWithInitArgs(Group)}, ResourcePool([1]))["group"]
    assert call(backend, worker, "sum").tolist() == [1, 1]


def test_values_without_handles_are_released():
    backend = LocalBackend()
    (worker,) = spawn(backend, 1)
    handles = [start(backend, worker, "echo", (torch.zeros(10),)), backend.put(1)]
    assert backend.num_objects == 2
    backend.release(handles[:1])
    assert backend.num_objects == 1
    del handles
    assert backend.num_objects == 0
    with pytest.raises(HybridFlowError):
        start(backend, worker, "divide_by_zero", (backend.put(1),))
    gc.collect()
    assert backend.num_objects == 0


def test_a_slice_is_sent_without_the_rest_of_its_batch():
    backend = LocalBackend()
    (worker,) = spawn(backend, 1)
    part = DataProto.from_dict(tensors={"x": torch.zeros(1000, 4)}).slice(0, 10)
    (received,), _ = call(backend, worker, "echo", part)
    assert received.batch["x"].untyped_storage().nbytes() == 10 * 4 * 4


def test_memory_is_logged_around_each_call_at_debug_level(caplog, monkeypatch):
    backend = LocalBackend()
    (worker,) = spawn(backend, 1)
    caplog.set_level(logging.INFO, logger="hybridflow")
    call(backend, worker, "ranks")
    assert not caplog.records
    caplog.set_level(logging.DEBUG, logger="hybridflow")
    call(backend, worker, "ranks")
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(":")[0] for message in messages] == [
        "before Recorder.ranks, rank 0",
        "after Recorder.ranks, rank 0",
    ]
    assert all("resident" in message for message in messages)
