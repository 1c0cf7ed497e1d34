"""What every way of weights promises: what is received is what was sent, and what is not, is told.

Each test runs on each way; sender and receivers are threads where they need to meet.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.errors import WeightSyncError
from hybridflow.weight_sync import (
    Bucket,
    ByBroadcast,
    InProcess,
    Sent,
    ThroughDisk,
    ThroughObjectStore,
    WeightWay,
    fill_buckets,
    plan_buckets,
    spec_of,
)

WAYS = ("in_process", "object_store", "broadcast", "disk")
NUM_RECEIVERS = 2


def weights_like_those_of_a_model(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (40, 16), "q": (16, 16), "norm": (16,), "bias": (3,), "scalar": (), "head": (40, 16)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.fixture(params=WAYS)
def ends(request, tmp_path) -> Callable[[], tuple[WeightWay, list[WeightWay]]]:
    """A sender and its receivers, which have met."""

    def build() -> tuple[WeightWay, list[WeightWay]]:
        if request.param == "in_process":
            return InProcess(), [InProcess()]
        if request.param == "object_store":
            return ThroughObjectStore(), [ThroughObjectStore() for _ in range(NUM_RECEIVERS)]
        if request.param == "disk":
            return ThroughDisk(tmp_path / "sync"), [ThroughDisk(tmp_path / "sync") for _ in range(NUM_RECEIVERS)]
        device: dict[str, Any] = {"device": torch.device("cpu"), "timeout_s": 60}
        sender = ByBroadcast(0, NUM_RECEIVERS + 1, "127.0.0.1", **device)
        receivers = [
            ByBroadcast(rank, NUM_RECEIVERS + 1, "127.0.0.1", sender.port, **device)
            for rank in range(1, NUM_RECEIVERS + 1)
        ]
        in_threads([end.join for end in (sender, *receivers)])
        return sender, list(receivers)

    return build


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


def buckets_of(weights: dict[str, torch.Tensor], bucket_bytes: int) -> Iterator[Bucket]:
    plan = plan_buckets([spec_of(name, tensor) for name, tensor in weights.items()], bucket_bytes)
    return fill_buckets(plan, weights.items(), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 2000, 10**9])
def test_what_is_received_is_what_was_sent(ends, dtype, bucket_bytes):
    sender, receivers = ends()
    weights = weights_like_those_of_a_model(dtype)
    received: list[dict[str, torch.Tensor]] = [{} for _ in receivers]
    for bucket in buckets_of(weights, bucket_bytes):
        sent = sender.send(bucket)
        for i, arrived in enumerate(in_threads([partial(receiver.receive, sent) for receiver in receivers])):
            assert arrived.specs == bucket.specs
            assert (arrived.fingerprints, arrived.version) == (bucket.fingerprints, 3)
            received[i] |= arrived.weights
    sender.finish()
    for of_receiver in received:
        assert list(of_receiver) == list(weights)
        assert all(torch.equal(of_receiver[name], tensor) for name, tensor in weights.items())


def test_weights_that_change_afterwards_do_not_change_what_was_received(ends):
    sender, receivers = ends()
    if isinstance(sender, InProcess):
        pytest.skip("gives the tensors themselves")
    weights = weights_like_those_of_a_model()
    first = {name: tensor.clone() for name, tensor in weights.items()}
    arrived = []
    for bucket in buckets_of(weights, 3000):
        sent = sender.send(bucket)
        arrived += in_threads([partial(receiver.receive, sent) for receiver in receivers])
        for tensor in bucket.weights.values():
            tensor.zero_()
    sender.finish()
    for bucket in arrived:
        assert all(torch.equal(tensor, first[name]) for name, tensor in bucket.weights.items())


def test_a_second_sync_goes_the_same_way(ends):
    sender, receivers = ends()
    for scale in (1.0, 2.0):
        weights = {name: scale * tensor for name, tensor in weights_like_those_of_a_model().items()}
        for bucket in buckets_of(weights, 3000):
            sent = sender.send(bucket)
            for arrived in in_threads([partial(receiver.receive, sent) for receiver in receivers]):
                assert all(torch.equal(tensor, weights[name]) for name, tensor in arrived.weights.items())
        sender.finish()


def test_files_are_gone_when_all_is_received(tmp_path):
    way = ThroughDisk(tmp_path / "sync")
    for bucket in buckets_of(weights_like_those_of_a_model(), 3000):
        way.receive(way.send(bucket))
    assert len(list((tmp_path / "sync").iterdir())) == 3
    way.finish()
    assert not (tmp_path / "sync").exists()


def test_a_file_that_is_not_there_or_damaged_is_named(tmp_path):
    way = ThroughDisk(tmp_path / "sync")
    (bucket,) = buckets_of(weights_like_those_of_a_model(), 10**9)
    sent = way.send(bucket)
    with open(sent.contents, "r+b") as file:
        file.truncate(100)
    with pytest.raises(WeightSyncError, match=r"could not be read from '.*bucket_00000.safetensors'"):
        way.receive(sent)
    with pytest.raises(WeightSyncError, match="must see the trainer's directory"):
        way.receive(replace(sent, contents=str(tmp_path / "elsewhere")))


def test_a_full_disk_is_told(small_disk):
    way = ThroughDisk(small_disk / "sync")
    big = {"big": torch.zeros(2**20)}
    (bucket,) = buckets_of(big, 10**9)
    with pytest.raises(WeightSyncError, match="weights could not be written"):
        way.send(bucket)


def test_receivers_that_do_not_come_are_an_error_in_time():
    way = ByBroadcast(0, 2, "127.0.0.1", device=torch.device("cpu"), timeout_s=1)
    with pytest.raises(WeightSyncError, match=r"rank 0 of 2 could not meet the others at 127\.0\.0\.1"):
        way.join()


def altered(sent: Sent, way: str) -> None:
    """Change one bit of the contents on their way."""
    if way == "disk":
        tensors = load_file(sent.contents)
        tensors["q"].view(torch.int32)[3, 3] ^= 1
        save_file(tensors, sent.contents)
    else:
        sent.contents[100] ^= 1


@pytest.mark.parametrize("way", ["object_store", "disk"])
def test_a_bit_that_changes_on_the_way_shows_in_the_fingerprint(way, tmp_path):
    from hybridflow.weight_sync import fingerprint

    end = ThroughObjectStore() if way == "object_store" else ThroughDisk(tmp_path / "sync")
    (bucket,) = buckets_of(weights_like_those_of_a_model(), 10**9)
    sent = end.send(bucket)
    altered(sent, way)
    arrived = end.receive(sent)
    wrong = [name for name, tensor in arrived.weights.items() if fingerprint(tensor) != arrived.fingerprints[name]]
    assert len(wrong) == 1


def test_a_file_that_cannot_be_written_leaves_none_behind(tmp_path, monkeypatch):
    from hybridflow.weight_sync import disk

    sender, buckets = ThroughDisk(tmp_path / "sync"), list(buckets_of(weights_like_those_of_a_model(), 2000))
    sender.send(buckets[0])
    assert len(list((tmp_path / "sync").iterdir())) == 1

    def full(weights, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "save_file", full)
    with pytest.raises(WeightSyncError, match=r"could not be written to .*No space left"):
        sender.send(buckets[1])
    assert not (tmp_path / "sync").exists()
