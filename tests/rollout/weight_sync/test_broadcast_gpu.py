"""The `broadcast` transport on a GPU: a group of NCCL, of one rank on a machine with one GPU."""

import pytest
import torch

from hybridflow.config import load_config
from hybridflow.rollout.weight_sync.broadcast import Broadcast
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
