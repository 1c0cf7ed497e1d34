"""Background saves from a CUDA device: its memory does not grow, and the files have the same bytes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hybridflow.checkpoint import StateCopy, read_state_into, save_sharded_state, save_state
from hybridflow.engines.process_group import join_alone

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


@pytest.fixture
def state(gpu):
    """Return 64 MiB in tensors on the device, and a step count."""
    generator = torch.Generator().manual_seed(0)
    model = {str(i): torch.randn(2048, 2048, generator=generator).to(gpu) for i in range(4)}
    return {"num_updates": 3, "model": model, "optimizer": {"0": {"step": torch.tensor(3.0, device=gpu)}}}


def files_of(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_copy_takes_no_memory_of_the_device(state, gpu, tmp_path):
    copy_of = StateCopy()
    if gpu.type == "cuda":
        torch.cuda.reset_peak_memory_stats(gpu)
        before = torch.cuda.memory_allocated(gpu)
    copy = copy_of(state)
    if gpu.type == "cuda":
        assert torch.cuda.max_memory_allocated(gpu) == before
    assert {tensor.is_pinned() for tensor in copy["model"].values()} == {gpu.type == "cuda"}
    for name, saved in (("state", state), ("copy", copy)):
        (tmp_path / name).mkdir()
        save_state(saved, tmp_path / name / "actor")
    assert files_of(tmp_path / "state") == files_of(tmp_path / "copy")
    state["model"]["0"].zero_()
    assert copy["model"]["0"].any()
    assert copy_of(state)["model"]["1"].data_ptr() == copy["model"]["1"].data_ptr()


def test_shards_on_the_host_are_written_as_those_of_the_device(state, gpu, tmp_path):
    was_initialized = dist.is_initialized()
    join_alone()
    try:
        mesh = init_device_mesh(gpu.type, (1,))
        state["model"] = {name: distribute_tensor(w, mesh, [Shard(0)]) for name, w in state["model"].items()}
        copy = StateCopy()(state)
        assert {tensor.to_local().device.type for tensor in copy["model"].values()} == {"cpu"}
        for name, saved in (("state", state), ("copy", copy)):
            (tmp_path / name).mkdir()
            save_sharded_state(saved, tmp_path / name / "actor")
        assert files_of(tmp_path / "state") == files_of(tmp_path / "copy")
        whole = {name: tensor.full_tensor().clone() for name, tensor in state["model"].items()}
        for tensor in [*state["model"].values(), state["optimizer"]["0"]["step"]]:
            tensor.zero_()
        read_state_into(state, tmp_path / "copy" / "actor")
        assert state["optimizer"]["0"]["step"].item() == 3
        assert all(torch.equal(state["model"][name].full_tensor(), tensor) for name, tensor in whole.items())
    finally:
        if not was_initialized:
            dist.destroy_process_group()
