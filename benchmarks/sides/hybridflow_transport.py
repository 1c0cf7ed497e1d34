"""hybridflow's side of `benchmarks/transport.py`: worker groups on its own Ray cluster."""

import ray
import torch
from support.serve import Channel

import hybridflow
from hybridflow.controller import Dispatch, Worker, register
from hybridflow.controller.ray import RayBackend, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from hybridflow.protocol import DataProto
from hybridflow.runtime.allocator import keep_freed_memory
from hybridflow.runtime.threads import set_num_threads
from sides.transport_batch import COLUMNS, checksum
from sides.transport_rows import (
    OBJECT_STORE_BYTES,
    Empty,
    TransportSide,
    dump_out_of_band,
    load_out_of_band,
)


class TransportWorker(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, reads=COLUMNS, writes=("sums",), rows="one")
    def sums(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"sums": torch.tensor([checksum(batch)])})

    sums_late = sums

    @register(Dispatch.DP_COMPUTE_PROTO, reads=COLUMNS, writes=COLUMNS)
    def give_back(self, batch: DataProto) -> DataProto:
        self.last = checksum(batch)
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("x",))
    def same(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO)
    def keep(self, batch: DataProto) -> None:
        self.part = batch

    @register(Dispatch.DP_COMPUTE_PROTO, writes=COLUMNS, blocking=False)
    def kept(self, batch: DataProto) -> DataProto:
        return self.part

    @register(Dispatch.ONE_TO_ALL)
    def last_sums(self) -> list[int]:
        return getattr(self, "last", [])


def main() -> None:
    channel = Channel()
    keep_freed_memory(large_blocks=True)  # as the driver of a run does
    threads, workers = set_num_threads(channel.options["threads"]), channel.options["workers"]
    with RayBackend(num_cpus=2 * workers, object_store_bytes=OBJECT_STORE_BYTES, threads=1) as backend:
        groups = tuple(
            RayWorkerGroup(RayResourcePool([workers]), RayClassWithInitArgs(TransportWorker), name, backend=backend)
            for name in ("first", "second")
        )
        empties = [ray.remote(Empty).options(num_cpus=0).remote() for _ in range(workers)]
        ray.get([actor.empty.remote() for actor in empties])
        side = TransportSide(DataProto, channel.options, groups, empties, ray.get, dump_out_of_band, load_out_of_band)
        channel.ready(threads, hybridflow=hybridflow.__version__, torch=torch.__version__, ray=ray.__version__)
        side.serve(channel)


if __name__ == "__main__":
    main()
