"""The contract of every transport: receivers get the bytes that were sent, or an error.

Each test runs on each transport; sender and receivers run in threads if they have to connect.
"""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from hybridflow.config import Config, RolloutConfig, load_config
from hybridflow.errors import LostWeightSyncError, WeightSyncError
from hybridflow.rollout.weight_sync import broadcast, disk
from hybridflow.rollout.weight_sync.base import WeightTransport
from hybridflow.rollout.weight_sync.broadcast import Broadcast
from hybridflow.rollout.weight_sync.buckets import Bucket, fill_buckets, plan_buckets, spec_of
from hybridflow.rollout.weight_sync.disk import Disk
from hybridflow.rollout.weight_sync.in_process import InProcess
from hybridflow.rollout.weight_sync.transports import TRANSPORTS, build_sending_transport

NUM_RECEIVERS = 2


def configured(run_dir: object, *overrides: str) -> Config:
    return load_config(None, [f"trainer.run_dir={run_dir}", "controller.call_timeout_s=120", *overrides])


def test_table_has_every_configurable_transport_and_removes_old_buckets(tmp_path):
    assert set(get_args(RolloutConfig.model_fields["weight_sync"].annotation)) == set(TRANSPORTS)
    (tmp_path / "weight_sync").mkdir()  # of a killed run
    (tmp_path / "weight_sync" / "bucket_00000.safetensors").touch()
    sender = build_sending_transport(configured(tmp_path, "rollout.weight_sync=broadcast"))
    assert isinstance(sender, Broadcast)
    assert not (tmp_path / "weight_sync").exists()


def weights_like_those_of_a_model(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (40, 16), "q": (16, 16), "norm": (16,), "bias": (3,), "scalar": (), "head": (40, 16)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        results[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture(params=["in_process", *TRANSPORTS])
def ends(request, tmp_path) -> tuple[WeightTransport, list[WeightTransport]]:
    """Build a connected sender and its receivers."""
    if request.param == "in_process":
        return InProcess(), [InProcess()]
    sender, *receivers = (TRANSPORTS[request.param](configured(tmp_path)) for _ in range(NUM_RECEIVERS + 1))
    store = sender.new_store()
    ranks = enumerate((sender, *receivers))
    in_threads([partial(end.join, store, rank, NUM_RECEIVERS + 1) for rank, end in ranks])
    return sender, receivers


def buckets_of(weights: dict[str, torch.Tensor], bucket_bytes: int = 10**9) -> Iterator[Bucket]:
    plan = plan_buckets([spec_of(name, tensor) for name, tensor in weights.items()], bucket_bytes)
    return fill_buckets(plan, weights.items(), 3)


def test_received_weights_equal_sent_ones_in_several_syncs(ends):
    sender, receivers = ends
    for dtype, bucket_bytes in ((torch.float32, 1), (torch.bfloat16, 2000), (torch.float32, 10**9)):
        weights = weights_like_those_of_a_model(dtype)
        first = {name: tensor.clone() for name, tensor in weights.items()}
        received: list[dict[str, torch.Tensor]] = [{} for _ in receivers]
        for bucket in buckets_of(weights, bucket_bytes):
            sent = sender.send(bucket)
            for i, arrived in enumerate(in_threads([partial(receiver.receive, sent) for receiver in receivers])):
                assert arrived.specs == bucket.specs
                assert (arrived.fingerprints, arrived.version) == (bucket.fingerprints, 3)
                received[i] |= arrived.weights
            if not isinstance(sender, InProcess):  # which passes the tensors without a copy
                for tensor in bucket.weights.values():
                    tensor.zero_()  # later changes do not change what was received
        sender.finish()
        for of_receiver in received:
            assert list(of_receiver) == list(weights)
            assert all(torch.equal(of_receiver[name], tensor) for name, tensor in first.items())


class LateCommunicator:
    """A process group that connects in its first collective, as NCCL does: all ranks must take part before it ends."""

    def __init__(self, group: Any, everyone: threading.Barrier) -> None:
        self._group, self._everyone, self._is_connected = group, everyone, False

    def broadcast(self, *arguments: Any) -> Any:
        if not self._is_connected:
            self._everyone.wait(timeout=60)
            self._is_connected = True
        return self._group.broadcast(*arguments)


def test_a_late_communicator_does_not_block_the_sender(tmp_path, monkeypatch):
    build, everyone = broadcast._build_group, threading.Barrier(NUM_RECEIVERS + 1)
    monkeypatch.setattr(broadcast, "_build_group", lambda *arguments: LateCommunicator(build(*arguments), everyone))
    ends = [Broadcast(configured(tmp_path)) for _ in range(NUM_RECEIVERS + 1)]
    store = ends[0].new_store()
    in_threads([partial(end.join, store, rank, len(ends)) for rank, end in enumerate(ends)])
    (bucket,) = buckets_of(weights_like_those_of_a_model())
    sent = ends[0].send(bucket)  # before any receiver starts
    arrived = in_threads([partial(end.receive, sent) for end in ends[1:]])
    ends[0].finish()
    assert all(torch.equal(each.weights["q"], bucket.weights["q"]) for each in arrived)


def test_a_broadcast_has_two_buckets_in_flight_and_waits_for_all_at_the_end(tmp_path):
    transport, waited = Broadcast(configured(tmp_path)), []

    def start(packed, options):
        return SimpleNamespace(wait=lambda: waited.append(len(packed[0])))

    transport._group = SimpleNamespace(broadcast=start)
    for count in (1, 2, 3):
        transport.send(Bucket({"w": torch.zeros(100 * count)}, {"w": 0}, 1))
    assert len(waited) == 1
    transport.finish()
    assert waited == sorted(waited)
    assert len(waited) == 3

    def fail():
        raise RuntimeError("no connection")

    aborted = []
    transport._group = SimpleNamespace(
        broadcast=lambda *_: SimpleNamespace(wait=fail), abort=lambda: aborted.append("the kernels")
    )
    transport.send(Bucket({"w": torch.zeros(1)}, {"w": 0}, 1))
    with pytest.raises(LostWeightSyncError, match="the broadcast of a weight bucket failed: no connection"):
        transport.finish()
    assert aborted == ["the kernels"]
    with pytest.raises(LostWeightSyncError, match="not connected, because an earlier sync failed"):
        transport.send(Bucket({"w": torch.zeros(1)}, {"w": 0}, 1))


LARGE = {"w": torch.arange(8e6)}
"""More bytes than the kernel buffers of a connection."""


def test_the_sync_after_an_abandoned_one_connects_anew(tmp_path):
    config = configured(tmp_path)
    sender, *receivers = (Broadcast(config) for _ in range(3))
    for version in range(2):  # the first one is abandoned with two buckets under way
        store = sender.new_store()
        ranks = [(sender, 0), *((receiver, rank) for rank, receiver in enumerate(receivers, 1))]
        in_threads([partial(end.join, store, rank, 3) for end, rank in ranks])
        messages = [sender.send(Bucket(LARGE, {"w": 0}, version)) for _ in range(2)]
        if version == 0:
            sender.close()
            sender = Broadcast(config)
    for sent in messages:
        for arrived in in_threads([partial(receiver.receive, sent) for receiver in receivers]):
            assert torch.equal(arrived.weights["w"], LARGE["w"])
    sender.finish()


RECEIVER = """
import os, signal, sys
from torch.distributed import FileStore
from hybridflow.config import load_config
from hybridflow.rollout.weight_sync.broadcast import Broadcast
from hybridflow.runtime.rendezvous import provide_stores

provide_stores(lambda name: FileStore(name, 2), "")
Broadcast(load_config(None, [])).join(sys.argv[1], 1, 2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_receiver_that_is_killed_is_an_error_of_the_sender(fork_server, tmp_path, monkeypatch):
    receiver = fork_server.start(["-c", RECEIVER, tmp_path / "store"], environment=os.environ)
    monkeypatch.setattr(broadcast, "open_store", lambda name: FileStore(name, 2))
    sender = Broadcast(configured(tmp_path))
    sender.join(str(tmp_path / "store"), 0, 2)
    receiver.communicate()
    sender.send(Bucket(LARGE, {"w": 0}, 1))
    with pytest.raises(LostWeightSyncError, match="the broadcast of a weight bucket failed"):
        sender.finish()
    assert receiver.returncode == -9


def test_files_are_removed_when_all_are_received_or_a_write_fails(tmp_path, monkeypatch):
    transport, buckets = Disk(configured(tmp_path)), list(buckets_of(weights_like_those_of_a_model(), 3000))
    for bucket in buckets:
        transport.receive(transport.send(bucket))
    assert len(list((tmp_path / "weight_sync").iterdir())) == 3
    transport.finish()
    assert not (tmp_path / "weight_sync").exists()
    transport.send(buckets[0])

    def full(weights, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "save_file", full)
    with pytest.raises(WeightSyncError, match=r"could not be written to .*No space left"):
        transport.send(buckets[1])
    assert not (tmp_path / "weight_sync").exists()


def test_missing_or_damaged_file_is_named_in_error(tmp_path):
    transport = Disk(configured(tmp_path))
    (bucket,) = buckets_of(weights_like_those_of_a_model())
    sent = transport.send(bucket)
    with open(sent.contents, "r+b") as file:
        file.truncate(100)
    with pytest.raises(WeightSyncError, match=r"could not be read from '.*bucket_00000.safetensors'"):
        transport.receive(sent)
    with pytest.raises(WeightSyncError, match="must have access to the trainer's directory"):
        transport.receive(replace(sent, contents=str(tmp_path / "elsewhere")))


def test_disk_transport_does_not_write_through_a_link(tmp_path):
    (tmp_path / "weight_sync").mkdir()
    (tmp_path / "target").write_text("precious")
    (tmp_path / "weight_sync" / "bucket_00000.safetensors").symlink_to(tmp_path / "target")
    (bucket, *_) = buckets_of(weights_like_those_of_a_model())
    with pytest.raises(WeightSyncError, match=r"bucket_00000\.safetensors' is a symbolic link, not a regular file"):
        Disk(configured(tmp_path)).send(bucket)
    assert (tmp_path / "target").read_text() == "precious"


def test_missing_receivers_are_an_error_after_the_timeout(tmp_path):
    transport = Broadcast(configured(tmp_path, "controller.call_timeout_s=1"))
    with pytest.raises(WeightSyncError, match=r"rank 0 of 2 could not connect to the other ranks for the weight sync"):
        transport.join(transport.new_store(), 0, 2)
