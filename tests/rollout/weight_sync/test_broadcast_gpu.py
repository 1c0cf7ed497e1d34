"""The `broadcast` transport on a GPU: a group of NCCL, of one rank on a machine with one GPU."""

import os

import pytest
import torch

from hybridflow.config import load_config
from hybridflow.rollout.weight_sync.broadcast import BLOCKING_WAIT, Broadcast
from hybridflow.rollout.weight_sync.buckets import Bucket

pytestmark = pytest.mark.gpu


def test_group_of_one_connects_and_sends(gpu):
    transport = Broadcast(load_config(None, ["controller.call_timeout_s=60"]))
    transport.join(transport.new_store(), 0, 1)
    weights = {"w": torch.arange(1000.0, device=gpu)}
    for version in range(3):
        sent = transport.send(Bucket(weights, {"w": 1}, version))
        assert sent.version == version
    transport.finish()
    assert transport._device.type == gpu.type


def test_a_sync_ends_when_the_device_has_sent_the_buckets(gpu, monkeypatch):
    monkeypatch.setenv(BLOCKING_WAIT, "0")
    transport = Broadcast(load_config(None, ["controller.call_timeout_s=60"]))
    transport.join(transport.new_store(), 0, 1)
    assert os.environ[BLOCKING_WAIT] == "0"  # for other groups
    if gpu.type == "cuda":
        torch.cuda._sleep(2 * 10**9)  # about a second
    transport.send(Bucket({"w": torch.arange(1000.0, device=gpu)}, {"w": 1}, 0))
    ((work, _),) = transport._in_flight
    transport.finish()
    assert work.is_completed()
    transport.close()
