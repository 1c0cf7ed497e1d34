"""What every worker with a model does alike: threads, kernels, saving and loading its engine."""

import os
from pathlib import Path

from hybridflow.checkpoint import load_state, save_state
from hybridflow.config import Config
from hybridflow.controller import Dispatch, Execute, Worker, register
from hybridflow.engines import TorchEngine, join_process_group
from hybridflow.kernels import use_kernels
from hybridflow.runtime import (
    bound_shape_caches,
    count_physical_cores,
    keep_freed_memory,
    set_deterministic,
    set_num_threads,
)

MODEL_COLUMNS = ("input_ids", "attention_mask", "response_mask")
"""What any model reads of a rollout batch."""


class ModelWorker(Worker):
    """A worker around one engine; `component` names its files in a checkpoint."""

    component: str
    engine: TorchEngine

    def prepare_process(self, config: Config) -> None:
        """Memory, threads, kernels and the other ranks, before a model is built: results depend on them."""
        keep_freed_memory()
        bound_shape_caches()
        threads = config.controller.threads
        set_num_threads(threads or max(1, count_physical_cores() // self.local_world_size))
        use_kernels(config.controller.compiled_kernels)
        set_deterministic(config.trainer.deterministic)
        if self.has_collectives:
            address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
            join_process_group(self.rank, self.world_size, address, port, config.controller.call_timeout_s)

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def save(self, directory: str) -> None:
        """Write the engine's state into a checkpoint directory; every rank holds the same, so rank 0 writes."""
        save_state(self.engine.state_dict(), Path(directory) / self.component)

    @register(Dispatch.ONE_TO_ALL)
    def load(self, directory: str) -> None:
        """Continue from the state that `save` wrote."""
        self.engine.load_state_dict(load_state(Path(directory) / self.component))
