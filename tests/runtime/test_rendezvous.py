"""Which errors mean that another rank of a collective operation is lost."""

import pytest
import torch.distributed as dist

from hybridflow.controller.worker_side import NamingErrors
from hybridflow.errors import LostWorkerError, WorkerError
from hybridflow.runtime.rendezvous import is_lost_peer

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:897."


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError(GLOO), True),
        (dist.DistNetworkError("no answer"), True),
        (dist.DistBackendError("NCCL watchdog"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(GLOO), False),
        (RuntimeError("x" * 400 + GLOO), False),
    ],
    ids=str,
)
def test_an_error_of_a_collective_operation_means_a_lost_rank(error, is_lost):
    assert is_lost_peer(error) == is_lost
    naming = NamingErrors("Policy.update", "actor/1", "actor", 1)
    with pytest.raises(WorkerError, match=r"Policy\.update failed on worker actor/1: ") as caught, naming:
        raise error
    assert isinstance(caught.value, LostWorkerError) == is_lost
    assert ("another rank died or timed out" in str(caught.value)) == is_lost
