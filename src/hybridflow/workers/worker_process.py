"""Settings of a worker process that must be made before a model is built, because results depend on them."""

from hybridflow.config import Config
from hybridflow.controller import Worker
from hybridflow.engines import join_process_group
from hybridflow.models.kernels import use_kernels
from hybridflow.runtime import (
    bound_shape_caches,
    count_physical_cores,
    group_store,
    keep_freed_memory,
    preferred_dtype,
    set_deterministic,
    set_num_threads,
    use_full_float32,
    use_own_device,
)
from hybridflow.runtime.fault_points import fault_point


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
