import pytest
import torch

from hybridflow.controller import ClassWithInitArgs, Dispatch, Worker, WorkerGroup, register
from hybridflow.protocol import DataProto

pytestmark = pytest.mark.ray


class Echo(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, writes=("x", "words"))
    def echo(self, batch):
        return batch


@pytest.mark.slow
def test_compressed_batches_are_smaller_and_arrive_unchanged(ray_backend):
    from hybridflow.controller.ray import RayBackend, RayResourcePool

    batch = DataProto.from_dict(
        {"x": torch.arange(4).repeat_interleave(50_000).reshape(4, -1)}, {"words": list("abcd")}
    )
    with RayBackend(compress=True) as backend:  # on the cluster that the process is connected to
        group = WorkerGroup(RayResourcePool([2]), ClassWithInitArgs(Echo), backend)
        future = group.echo.remote(batch)
        result = group.echo(future)
        assert torch.equal(result.batch["x"], batch.batch["x"])
        assert result.non_tensor_batch["words"].tolist() == ["a", "b", "c", "d"]
        result.batch["x"] += 1
        events = backend.trace.take()
    whole = batch.batch["x"].nbytes
    assert 0 < sum(event.bytes_out for event in events if event.kind == "send") < whole / 20
    assert all(0 < event.bytes_out < whole / 20 for event in events if event.kind == "call")
