"""The `ipc` transport on a GPU: several processes share its memory."""

import gc
import pickle
import subprocess
import sys

import pytest
import torch

from hybridflow.config import load_config
from hybridflow.rollout.weight_sync.buckets import Bucket
from hybridflow.rollout.weight_sync.fingerprint import fingerprint
from hybridflow.rollout.weight_sync.ipc import Ipc

pytestmark = pytest.mark.gpu

RECEIVER = """
import pickle, sys
import torch
from hybridflow.config import load_config
from hybridflow.rollout.weight_sync.fingerprint import fingerprint
from hybridflow.rollout.weight_sync.ipc import Ipc
end, rank = Ipc(load_config(None, [])), int(sys.argv[1])
end.join("", rank, 3)
if sys.argv[2] == "cpu":
    end._device = torch.device("cpu")
kept = []
while (line := sys.stdin.buffer.readline()).strip():
    bucket = end.receive(pickle.loads(bytes.fromhex(line.decode())))
    kept.append(bucket)
    equal = [fingerprint(w) == bucket.fingerprints[n] for bucket in kept for n, w in bucket.weights.items()]
    print(all(equal), flush=True)
"""

SIZE = 2**22


def allocated(gpu: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if gpu.type == "cuda" else 0


def test_receivers_read_what_the_sender_wrote_and_its_memory_is_released(gpu):
    sender = Ipc(load_config(None, []))
    sender._device = gpu
    sender.join("", 0, 3)
    before = allocated(gpu)
    command = [sys.executable, "-c", RECEIVER]
    receivers = [
        subprocess.Popen([*command, str(rank), gpu.type], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in (1, 2)
    ]
    try:
        for number in range(6):
            weight = torch.full((SIZE,), float(number), device=gpu)
            expected = fingerprint(torch.full((SIZE,), number + 0.5))
            if gpu.type == "cuda":
                torch.cuda._sleep(10**8)  # the receiver must wait for the work that precedes the copy
            sent = sender.send(Bucket({"w": weight.add_(0.5)}, {"w": expected}, 1))
            for receiver in receivers:
                assert receiver.stdin is not None
                receiver.stdin.write(pickle.dumps(sent).hex() + "\n")
                receiver.stdin.flush()
            for receiver in receivers:
                assert receiver.stdout is not None
                assert receiver.stdout.readline() == "True\n"
        del weight
        assert allocated(gpu) - before <= 4 * SIZE * 3  # the buckets in flight and the last one
        sender.finish()
        assert allocated(gpu) - before <= 0
    finally:
        for receiver in receivers:
            receiver.communicate()
    assert [receiver.returncode for receiver in receivers] == [0, 0]
