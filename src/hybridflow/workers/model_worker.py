"""`ModelWorker`: the common part of all workers with a model: building their engine."""

from typing import Literal

from hybridflow.config import Config, OptimizerConfig, RoleName
from hybridflow.controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from hybridflow.controller.part_sizes import PartsOf
from hybridflow.engines import TorchEngine, TrainEngine
from hybridflow.runtime import naming_out_of_memory, own_device
from hybridflow.workers.saving import SavingWorker

TO_REPLICAS = make_nd_compute_dataproto_dispatch_fn(name="TO_REPLICAS")
"""Dispatch mode that splits rows over the data-parallel replicas; the ranks of one replica get the same rows."""

LESS_MEMORY_AT_START = (
    "use more ranks (controller.num_workers), set memory.offload = {role = 'idle' or 'host'} or lora.rank, a smaller "
    "rollout.gpu_memory_utilization, or a smaller model"
)
"""What to change if a model does not fit."""

ADAPTED_ROLES = ("actor_rollout", "actor")
"""Roles whose models train adapters if lora.rank is set."""

MODEL_COLUMNS = ("input_ids", "attention_mask", "response_mask")
"""Columns of a rollout batch that every model reads."""


def parts_of_replicas(config: Config) -> PartsOf:
    """Return how the parts of a call with collectives are sized: all its ranks take equally long."""
    return "shares" if config.controller.parts == "measured" else "equal"


class ModelWorker(SavingWorker):
    """A worker with one train engine."""

    role: RoleName

    def build_engine(
        self,
        config: Config,
        path: str,
        head: Literal["policy", "value"],
        optimizer: OptimizerConfig | None = None,
        total_updates: int = 1,
    ) -> TrainEngine:
        """Build the engine of this role; all other code of the workers uses only the `TrainEngine` Protocol."""
        with naming_out_of_memory(f"the start of {self.role}, loading '{path}'", own_device(), LESS_MEMORY_AT_START):
            return TorchEngine(
                path,
                head,
                model=config.model,
                memory=config.memory,
                optimizer=optimizer,
                total_updates=total_updates,
                parallel=config.parallel,
                offload=config.memory.offload.get(self.role),
                lora=config.lora if self.role in ADAPTED_ROLES else None,
                seed=config.trainer.seed,
            )

    @register(Dispatch.ONE_TO_ALL)
    def find_token_budget(self, prompt_len: int, response_len: int) -> int:
        """Return `TrainEngine.find_token_budget` for the number of processes on this node."""
        return self.engine.find_token_budget(prompt_len, response_len, self.local_world_size)

    @register(Dispatch.ONE_TO_ALL)
    def set_token_budget(self, max_tokens: int) -> None:
        """Set the maximum number of tokens in a micro-batch."""
        self.engine.max_tokens = max_tokens
