"""The machine: versions, peaks, and which collectives take tensors of the GPU."""

import contextlib
import importlib.util
import sys
import time
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gpu_session.record import Teller
from gpu_session.timing import NOMINAL_FLOPS, copy_bandwidth, is_gpu, product_flops
from hybridflow.config import load_config
from hybridflow.rollout.weight_sync.broadcast import Broadcast
from hybridflow.rollout.weight_sync.buckets import Bucket
from hybridflow.runtime.device import own_device

PACKAGES = ("torch", "triton", "transformers", "flash_attn", "flash_attn_3", "vllm", "ray", "trl", "peft")


class PythonStore(Store):
    """A store of one process, written in Python as the one in the storage of a Ray cluster is."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if not self.check(keys):
            raise dist.DistStoreError(f"the only rank has not set {keys}")

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None


def probe(teller: Teller) -> None:
    """Tell versions, the device, its bandwidth and its peak, and whether gloo takes its tensors."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    versions["flash_attn_interface"] = str(importlib.util.find_spec("flash_attn_interface") is not None)
    device = own_device()
    if is_gpu():
        properties = torch.cuda.get_device_properties(device)
        versions |= {"device": properties.name, "CUDA": str(torch.version.cuda), "NCCL": str(torch.cuda.nccl.version())}
        versions |= {
            "memory_GiB": f"{properties.total_memory / 2**30:.1f}",
            "cuDNN": str(torch.backends.cudnn.version()),
        }
    teller.note("versions", python=sys.version.split()[0], **versions)
    teller.figure("copy, read and written", copy_bandwidth() / 1e12, "TB/s")
    compared = {"limit": NOMINAL_FLOPS / 1e12, "against": "nominal"}
    teller.figure("product of bfloat16 matrices of 8,192", product_flops() / 1e12, "TFLOP/s", **compared)
    group = dist.ProcessGroupGloo(PythonStore(), 0, 1, timedelta(seconds=10))
    for name in ("allreduce", "broadcast", "allgather"):
        tensor = torch.ones(4, device=device)
        try:
            if name == "allgather":
                group.allgather([[torch.empty_like(tensor)]], [tensor]).wait()
            else:
                getattr(group, name)([tensor]).wait()
            answer = "yes"
        except Exception as error:  # which collectives gloo has for a GPU is the question
            answer = f"no: {error}"[:200]
        teller.note(f"gloo {name} with tensors of {device.type}: {answer}")


def nccl(teller: Teller) -> None:
    """Form an NCCL group of one rank on a store that is written in Python, and send weights through the project's."""
    device = own_device()
    tensor = torch.arange(1000.0, device=device)
    if is_gpu():
        torch.cuda.set_device(device)
        group = dist.ProcessGroupNCCL(PythonStore(), 0, 1, dist.ProcessGroupNCCL.Options())
    else:
        group = dist.ProcessGroupGloo(PythonStore(), 0, 1, timedelta(seconds=10))
    for name in ("allreduce", "broadcast"):
        getattr(group, name)([tensor]).wait()
        if not torch.equal(tensor.cpu(), torch.arange(1000.0)):
            raise RuntimeError(f"{name} of one rank changed its tensor")
    teller.note(f"{type(group).__name__} of one rank on a Python store: allreduce and broadcast are right")
    transport = Broadcast(load_config(None, ["controller.call_timeout_s=60"]))
    transport.join(transport.new_store(), 0, 1)
    weight = torch.zeros(2**28 if is_gpu() else 2**20, dtype=torch.uint8, device=device)
    for index in range(3):  # of which the first connects
        start = time.perf_counter()
        transport.send(Bucket({"w": weight}, {"w": 1}, index))
        transport.finish()
        seconds = time.perf_counter() - start
    teller.figure("broadcast of one rank", weight.numel() / seconds / 1e9, "GB/s")
