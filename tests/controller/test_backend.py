"""The contract of a backend, tested on every backend, and properties of the local backend."""

import gc
import logging
import os
import pickle
import re
import time
import traceback
from pathlib import Path

import pytest
import torch

from fixtures.values import held_values
from hybridflow.controller import ClassWithInitArgs, LocalBackend, ResourcePool, Worker
from hybridflow.controller.backend import NO_TERMS
from hybridflow.errors import DispatchError, FieldError, HybridFlowError, WorkerError

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


def spawn_anew(backend, process_on_nodes, *args, **kwargs):
    classes = {"recorder": ClassWithInitArgs(Recorder, *args, **kwargs)}
    return backend.spawn(classes, ResourcePool(process_on_nodes))["recorder"]


def spawn(backend, num_ranks, *args, **kwargs):
    return spawn_anew(backend, [num_ranks], *args, **kwargs)


def start(backend, worker, method_name, args=(), kwargs=None):
    return backend.call_all([worker], method_name, [(args, kwargs or {})], [NO_TERMS])[0]


def call(backend, worker, method_name, *args, **kwargs):
    return backend.get([start(backend, worker, method_name, args, kwargs)])[0]


# The contract


@pytest.fixture(scope="module")
def started():
    """Return two recorders of a backend that several tests share, and their constructor argument."""
    running = {}

    def of(backend, *, may_be_stopped=False):
        if backend not in running:
            start = {"sizes": [1]}
            running[backend] = spawn_anew(backend, [2], start), start
        return running.pop(backend) if may_be_stopped else running[backend]

    return of


def test_workers_know_their_names_ranks_and_variables(backend, started):
    workers, _ = started(backend)
    assert [worker.name for worker in workers] == ["recorder/0", "recorder/1"]
    assert [call(backend, worker, "ranks") for worker in workers] == [(0, 2, 0, 2), (1, 2, 1, 2)]
    assert backend.running() == []  # all calls have finished
    ports = set()
    for rank, worker in enumerate(workers):
        while_built, while_called = call(backend, worker, "environment")
        assert while_built == while_called
        assert while_called["RANK"] == while_called["LOCAL_RANK"] == str(rank)
        assert while_called["WORLD_SIZE"] == while_called["LOCAL_WORLD_SIZE"] == "2"
        assert while_called["MASTER_ADDR"]
        ports.add(while_called["MASTER_PORT"])
    assert len(ports) == 1
    assert 1024 <= int(ports.pop()) < 65536


def test_callers_and_workers_have_private_copies_of_all_values(backend, started):
    (first, second), of_constructor = started(backend)
    sent = torch.zeros(3)
    result = call(backend, first, "add_one", sent)
    assert (result.tolist(), sent.tolist()) == ([1, 1, 1], [0, 0, 0])
    sent.fill_(9)
    result.fill_(9)
    assert call(backend, first, "last").tolist() == [1, 1, 1]
    handle, kept = start(backend, first, "add_one", (torch.zeros(2),)), start(backend, first, "last", ())
    call(backend, first, "add_one", kept)  # writes into what the worker has returned
    assert handle.get().tolist() == [1, 1]
    call(backend, first, "start_value")["sizes"].append(2)
    of_constructor["sizes"].append(3)
    assert [call(backend, worker, "start_value") for worker in (first, second)] == [{"sizes": [1]}] * 2
    shared = backend.put(torch.zeros(2))
    assert call(backend, first, "add_one", shared).tolist() == [1, 1]
    assert call(backend, second, "add_one", value=shared).tolist() == [1, 1]
    shared.get().fill_(5)
    assert shared.get().tolist() == [0, 0]
    for _ in range(2):
        backend.release([shared])
    for read in (shared.get, lambda: call(backend, first, "add_one", shared)):
        with pytest.raises(WorkerError, match="this result was released; keep the future"):
            read()


def test_errors_of_workers_name_the_method_and_the_worker(backend, started):
    (first, second), _ = started(backend)
    with pytest.raises(FieldError, match="needs 'values'") as caught:
        call(backend, first, "missing_column")
    assert caught.value.__notes__ == ["in Recorder.missing_column, worker recorder/0"]
    with pytest.raises(WorkerError) as caught:
        call(backend, second, "divide_by_zero")
    assert str(caught.value) == (
        "Recorder.divide_by_zero failed on worker recorder/1: ZeroDivisionError: division by zero"
    )
    assert (caught.value.role, caught.value.rank) == ("recorder", 1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert pickle.loads(pickle.dumps(caught.value)).rank == 1
    with pytest.raises(DispatchError, match=r"argument 1 of Recorder\.echo is a generator"):
        call(backend, first, "echo", 1, (n for n in [1]))


def test_a_failing_constructor_on_one_rank_fails_the_group():
    with pytest.raises(WorkerError, match=r"Recorder\.__init__ failed on worker recorder/1: ValueError: no such file"):
        spawn(LocalBackend(), 2, fail_on=1)


@pytest.mark.ray
def test_running_calls_have_the_time_of_their_start(ray_backend, started, tmp_path):
    (first, second), _ = started(ray_backend)
    before, path = time.time(), str(tmp_path / "file")
    waiting = start(ray_backend, first, "wait_for_file", [path])
    reader = start(ray_backend, second, "wait_for_file", [path, waiting])
    ((name, since),) = ray_backend.running()  # the second one waits for its argument
    assert name == first.name
    assert before <= since <= time.time()
    (tmp_path / "file").touch()
    ray_backend.wait([waiting, reader])
    assert ray_backend.running() == []


def test_calling_a_stopped_worker_raises(backend, started):
    (first, second), _ = started(backend, may_be_stopped=True)
    assert backend.is_alive(first)
    backend.shutdown([first])
    backend.shutdown([first])
    assert not backend.is_alive(first)
    assert backend.is_alive(second)
    with pytest.raises(WorkerError, match="recorder/0 was shut down"):
        call(backend, first, "ranks")


# The local backend


def test_local_rank_counts_per_node():
    workers = spawn_anew(backend := LocalBackend(), [2, 1])
    assert [call(backend, worker, "ranks") for worker in workers] == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]


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
    with pytest.raises(WorkerError, match=r"Recorder .* 2 ranks \(averaging gradients\).*process_on_nodes=\[1\]"):
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


class Closing(Worker):
    def __init__(self, closed):
        self.closed = closed

    def close(self):
        Path(self.closed).write_text(os.environ["RANK"] + Path(self.closed).read_text())
        raise MemoryError("no memory to close")


def test_a_worker_that_is_stopped_in_this_process_is_closed_once(tmp_path, caplog):
    backend, closed = LocalBackend(), tmp_path / "closed"
    closed.touch()
    workers = backend.spawn({"group": ClassWithInitArgs(Closing, str(closed))}, ResourcePool([2]))["group"]
    backend.shutdown(workers[1:])
    backend.close()  # raises no error, which would take the place of one that ended the run
    backend.close()
    assert closed.read_text() == "01"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert re.search("Closing.close failed on worker .*: MemoryError: no memory to close", caplog.text)


def test_values_without_handles_are_released():
    backend = LocalBackend()
    (worker,) = spawn(backend, 1)
    handles = [start(backend, worker, "echo", (torch.zeros(10),)), backend.put(1)]
    assert held_values(backend) == 2
    backend.release(handles[:1])
    assert held_values(backend) == 1
    del handles
    assert held_values(backend) == 0
    with pytest.raises(HybridFlowError):
        start(backend, worker, "divide_by_zero", (backend.put(1),))
    gc.collect()
    assert held_values(backend) == 0


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
