"""The `ipc` transport: what the contract of transports cannot show, some of it between processes."""

import gc
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridflow.cli.exit_codes import ExitCode, exit_code
from hybridflow.config import load_config
from hybridflow.errors import ConfigError, LostWeightSyncError, WeightSyncError
from hybridflow.rollout.weight_sync import ipc, shared_memory
from hybridflow.rollout.weight_sync.base import IN_FLIGHT, Sent
from hybridflow.rollout.weight_sync.buckets import Bucket
from hybridflow.rollout.weight_sync.fingerprint import fingerprint
from hybridflow.rollout.weight_sync.ipc import Ipc, Shared
from hybridflow.rollout.weight_sync.shared_memory import GpuHandle

SENDER = """
import os, pickle, sys
import torch
from hybridflow.config import load_config
from hybridflow.rollout.weight_sync.buckets import Bucket
from hybridflow.rollout.weight_sync.ipc import Ipc
end = Ipc(load_config(None, []))
end.join("", 0, 3)
weights = {"a": torch.arange(6000.0), "b": torch.arange(7).to(torch.bfloat16)}
sys.stdout.buffer.write(pickle.dumps(end.send(Bucket(weights, {"a": 0, "b": 0}, 4))))
sys.stdout.buffer.flush()
os.close(1)
sys.stdin.read()
"""


@contextmanager
def sending_process() -> Iterator[tuple[subprocess.Popen, Sent]]:
    """Start a process that shares two weights, and yield it with what it has sent."""
    with subprocess.Popen([sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sender:
        assert sender.stdout is not None
        yield sender, pickle.load(sender.stdout)


def end(rank: int = 1, num_receivers: int = 1) -> Ipc:
    transport = Ipc(load_config(None, []))
    transport.join("", rank, num_receivers + 1)
    return transport


@pytest.fixture(autouse=True)
def no_weights_of_earlier_tests() -> None:
    """Free weights in reference cycles, for example those of raised errors."""
    gc.collect()
    assert open_shared_memory() == mapped_shared_memory() == []


def bucket(value: float = 1.0) -> Bucket:
    tensor = torch.full((1000,), value)
    return Bucket({"w": tensor}, {"w": fingerprint(tensor)}, 1)


def open_shared_memory() -> list[str]:
    """Return this process's open anonymous files."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(descriptor))
        except FileNotFoundError:  # of the directory itself
            continue
    return [link for link in links if "hybridflow-weights" in link]


def mapped_shared_memory() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "hybridflow-weights" in line]


@pytest.mark.runs
@pytest.mark.own_run("ray: its sender is killed while it shares weights")
def test_receivers_keep_weights_of_a_killed_sender_which_is_a_lost_worker():
    with sending_process() as (sender, sent):
        received = [end(rank, 2).receive(sent).weights for rank in (1, 2)]
        assert not [name for name in os.listdir("/dev/shm") if "hybridflow-weights" in name]  # nothing with a name
        sender.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, sender.pid, os.WEXITED | os.WNOWAIT)  # a zombie from now on
        for is_reaped in (False, True):
            if is_reaped:
                sender.wait()
            with pytest.raises(LostWeightSyncError) as raised:
                end().receive(sent)
            message = str(raised.value)
            assert f"process {sender.pid}, the trainer's rank 0, exited before this rollout engine had" in message
            assert "use rollout.weight_sync" not in message
            assert exit_code(raised.value) is ExitCode.AGAIN
    for weights in received:
        assert torch.equal(weights["a"], torch.arange(6000.0))
        assert torch.equal(weights["b"], torch.arange(7).to(torch.bfloat16))
    del received, weights, raised
    gc.collect()
    assert mapped_shared_memory() == []


def test_a_living_sender_that_closed_its_memory_is_not_lost():
    sender = end(0)
    sent = sender.send(bucket())
    sender.finish()
    with pytest.raises(WeightSyncError, match=r"use rollout\.weight_sync = 'object_store'") as raised:
        end().receive(sent)
    assert not isinstance(raised.value, LostWeightSyncError)


def test_sender_holds_only_buckets_in_flight_which_can_be_received_late():
    sender, receiver = end(0), end()
    sent = []
    for number in range(6):
        sent.append(sender.send(bucket(number)))
        receiver.receive(sent[-1])
        assert len(open_shared_memory()) == len(mapped_shared_memory()) == min(number, IN_FLIGHT) + 1
    for value in range(5 - IN_FLIGHT, 6):
        assert torch.equal(receiver.receive(sent[value]).weights["w"], torch.full((1000,), float(value)))
    with pytest.raises(WeightSyncError, match="cannot be mapped"):
        receiver.receive(sent[0])
    sender.finish()
    assert open_shared_memory() == mapped_shared_memory() == []


def test_what_a_receiver_writes_stays_in_its_own_copy():
    sender, receivers = end(0, 2), [end(1, 2), end(2, 2)]
    sent = sender.send(bucket())
    first, second = (receiver.receive(sent).weights["w"] for receiver in receivers)
    first.zero_()
    assert torch.equal(second, torch.ones(1000))
    assert torch.equal(end(1, 2).receive(sent).weights["w"], torch.ones(1000))
    empty = sender.send(Bucket({"w": torch.zeros(0, 3)}, {"w": 0}, 1))
    assert end().receive(empty).weights["w"].shape == (0, 3)
    sender.finish()


def test_sender_on_another_node_or_gpu_is_an_error_that_names_both():
    sender = end(0)
    sent = sender.send(bucket())
    elsewhere = sent.contents.handles[0]._replace(inode=0)  # the same number is another process's file there
    places = {
        elsewhere: r"needs the trainer's rank 0, on host node-7, and all rollout engines, here on host .*, on one node",
        GpuHandle(
            "8f1c", ()
        ): r"the trainer is on GPU 8f1c and this rollout engine on a CPU; place both on one GPU, or "
        r"use .*broadcast",
    }
    for handle, message in places.items():
        with pytest.raises(WeightSyncError, match=message):
            end().receive(replace(sent, contents=Shared("node-7", (handle,))))
    sender.finish()


def test_a_system_without_anonymous_files_is_an_error_at_the_start(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match=r"rollout.weight_sync='ipc' needs Linux"):
        Ipc(load_config(None, []))


def test_a_copy_without_memory_is_not_an_error_of_sharing(monkeypatch):
    def lacks_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(shared_memory, "gpu_id", lambda device: "8f1c")
    monkeypatch.setattr(shared_memory, "rebuild_cuda_tensor", lacks_memory)
    with pytest.raises(torch.OutOfMemoryError):
        shared_memory.copy_gpu_memory(GpuHandle("8f1c", tuple(range(12))), torch.device("cuda", 0))


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_of_a_gpu_are_an_error_at_the_start(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
    end()  # a CPU shares its own memory
    monkeypatch.setattr(ipc, "own_device", lambda: torch.device("cuda", 0))
    with pytest.raises(ConfigError, match=f"{name}='max_split.*' is not supported with rollout.weight_sync='ipc'"):
        end()
    monkeypatch.setenv(name, "expandable_segments:False")
    end()
