"""The process of a worker: settings that results depend on, and the measurement and the profile of its device."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hybridflow.config import Config
from hybridflow.controller import Dispatch, Worker, register
from hybridflow.engines import join_process_group
from hybridflow.models.kernels.arithmetic import arithmetic
from hybridflow.models.kernels.library import use_kernels
from hybridflow.models.loading import DTYPES
from hybridflow.runtime.allocator import bound_shape_caches, keep_freed_memory
from hybridflow.runtime.device import preferred_dtype, use_own_device
from hybridflow.runtime.fault_points import fault_point
from hybridflow.runtime.matmul_peak import measure_flops_now, peak_flops
from hybridflow.runtime.rendezvous import group_store
from hybridflow.runtime.threads import count_physical_cores, set_deterministic, set_num_threads, use_full_float32


def prepare_worker_process(worker: Worker, config: Config) -> Config:
    """Set memory options, threads, kernels and determinism of the process, and join the group's process group.

    Returns the configuration with the dtype of model.dtype = "auto", which a run has settled before for all workers.
    """
    fault_point("start")
    use_own_device()
    keep_freed_memory()
    bound_shape_caches()
    set_num_threads(config.controller.threads or max(1, count_physical_cores() // worker.local_world_size))
    use_kernels(config.controller.compiled_kernels)
    use_full_float32()
    set_deterministic(config.trainer.deterministic)
    rank, world_size = (worker.rank, worker.world_size) if worker.has_collectives else (0, 1)
    join_process_group(rank, world_size, group_store(), config.controller.call_timeout_s)
    return config.with_dtype(preferred_dtype())


MOST_ALLOCATIONS = 100_000
"""Newest allocations and frees that a memory snapshot keeps."""


class DeviceWorker(Worker):
    """Base class of workers that compute on a device. A process has one profile at a time, of all its roles."""

    @register(Dispatch.ONE_TO_ALL)
    def begin_profile(self, ranks: tuple[int, ...]) -> None:
        """Begin to profile the process of each of these ranks; on CUDA also record its allocations."""
        global _running
        if self.rank not in ranks or _running is not None:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        _running = self.rank, profile(activities=activities)
        _running[1].start()

    @register(Dispatch.ONE_TO_ALL)
    def end_profile(self, directory: str, role: str) -> None:
        """Write the profile of the process into a directory, if this rank has begun one.

        Files: `<role>_<rank>.json.gz`, a Chrome trace, and on CUDA `<role>_<rank>.memory.pickle`, a memory snapshot.
        """
        global _running
        if _running is None or _running[0] != self.rank:
            return
        (_, running), _running = _running, None
        running.stop()
        Path(directory).mkdir(parents=True, exist_ok=True)
        file = Path(directory) / f"{role}_{self.rank}.json.gz"
        file.unlink(missing_ok=True)  # a link would be followed
        running.export_chrome_trace(str(file))
        if torch.cuda.is_available():
            snapshot = file.with_name(f"{role}_{self.rank}.memory.pickle")
            snapshot.unlink(missing_ok=True)
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)

    @register(Dispatch.ONE_TO_ALL)
    def abandon_step(self) -> None:
        """Discard what an unfinished step has left, before the run goes back to an earlier state."""

    @register(Dispatch.ONE_TO_ALL)
    def arithmetic(self) -> dict[str, str]:
        """Return what decides how the results of this process are rounded."""
        return arithmetic()

    @register(Dispatch.ONE_TO_ALL)
    def measure_peak(self, dtype: str) -> float:
        """Return the matrix-product peak of this rank's device in FLOP/s, measured while the other ranks measure too.

        It is 0 on a rank that shares its process with rank 0.
        """
        return peak_flops(DTYPES[dtype]) if self.has_collectives or self.rank == 0 else 0.0

    @register(Dispatch.ONE_TO_ALL)
    def measure_speed(self, dtype: str) -> float:
        """Return how fast this rank's device multiplies matrices now, in FLOP/s; 0 if there is no memory for them."""
        try:
            return measure_flops_now(DTYPES[dtype])
        except torch.OutOfMemoryError:
            return 0.0


_running: tuple[int, profile] | None = None
"""The rank that began the profile of this process, and the profile."""
