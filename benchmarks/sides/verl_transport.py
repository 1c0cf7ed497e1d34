"""verl's side of `benchmarks/transport.py`: worker groups on its own Ray cluster."""

import tempfile
from importlib.metadata import version

import ray
import torch
from support.serve import Channel
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from sides.transport_batch import checksum
from sides.transport_rows import (
    OBJECT_STORE_BYTES,
    Empty,
    TransportSide,
    dump_in_band,
    load_in_band,
)


class TransportWorker(Worker):
    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def sums(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"sums": torch.tensor([checksum(batch)])})

    @register(Dispatch.DP_COMPUTE_PROTO, materialize_futures=False)
    def sums_late(self, batch):
        return DataProto.from_dict({"sums": torch.tensor([checksum(batch.get())])})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def give_back(self, batch: DataProto) -> DataProto:
        self.last = checksum(batch)
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO)
    def same(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO)
    def keep(self, batch: DataProto) -> DataProto:
        self.part = batch
        return batch.select([], [])

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def kept(self, batch: DataProto) -> DataProto:
        return self.part

    @register(Dispatch.ONE_TO_ALL)
    def last_sums(self) -> list[int]:
        return getattr(self, "last", [])


def main() -> None:
    channel = Channel()
    threads, workers = channel.options["threads"], channel.options["workers"]
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="ray") as directory:
        ray.init(
            address="local",
            num_cpus=100,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            _temp_dir=directory,
            _node_ip_address="127.0.0.1",
        )
        groups = tuple(
            RayWorkerGroup(
                RayResourcePool([workers], use_gpu=False, name_prefix=name),
                RayClassWithInitArgs(ray.remote(TransportWorker)),
                name_prefix=name,
            )
            for name in ("first", "second")
        )
        empties = [ray.remote(Empty).options(num_cpus=0).remote() for _ in range(workers)]
        ray.get([actor.empty.remote() for actor in empties])
        side = TransportSide(DataProto, channel.options, groups, empties, ray.get, dump_in_band, load_in_band)
        channel.ready(threads, verl=version("verl"), torch=torch.__version__, ray=ray.__version__)
        side.serve(channel)
        ray.shutdown()


if __name__ == "__main__":
    main()
