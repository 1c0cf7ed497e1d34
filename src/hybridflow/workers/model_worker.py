"""`ModelWorker`: the common part of all workers with a model: the engine, its token budget, its files."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hybridflow.checkpoint import (
    BackgroundSave,
    SavedFile,
    StateCopy,
    describe_state,
    first_difference,
    load_state,
    read_state_into,
    report_files,
    require_shared,
    save_sharded_state,
    save_state,
    saved_files,
    zeros_like_state,
)
from hybridflow.config import Config, OptimizerConfig, RoleName
from hybridflow.controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from hybridflow.controller.part_sizes import PartsOf
from hybridflow.engines import TorchEngine, TrainEngine
from hybridflow.errors import CheckpointError
from hybridflow.runtime.device import own_device
from hybridflow.runtime.memory import naming_out_of_memory
from hybridflow.workers.worker_process import DeviceWorker

TO_REPLICAS = make_nd_compute_dataproto_dispatch_fn(name="TO_REPLICAS")
"""Dispatch mode that splits rows over the data-parallel replicas; the ranks of one replica get the same rows."""

LESS_MEMORY_AT_START = (
    "use more ranks (controller.num_workers), set memory.offload = {role = 'idle' or 'host'} or lora.rank, a smaller "
    "rollout.gpu_memory_utilization, or a smaller model"
)
"""Advice if a model does not fit."""

ADAPTED_ROLES = ("actor_rollout", "actor")
"""Roles whose models train adapters if lora.rank is set."""

MODEL_COLUMNS = ("input_ids", "attention_mask", "response_mask")
"""Columns of a rollout batch that every model reads."""


def _parts_of_replicas(config: Config) -> PartsOf:
    """Return how the parts of a call with collectives are sized: all its ranks take equally long."""
    return "shares" if config.controller.parts == "measured" else "equal"


on_replicas = partial(register, TO_REPLICAS, parts=_parts_of_replicas)
"""`register` for methods whose rows are split over the data-parallel replicas."""


class ModelWorker(DeviceWorker):
    """A worker with one train engine, whose state is saved and loaded; `component` names its files in a checkpoint."""

    role: RoleName
    component: str
    engine: TrainEngine
    _save: BackgroundSave[list[SavedFile]] | None = None
    _copy_state: StateCopy | None = None

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
                merge_adapters=config.rollout.merge_adapters,
                exact=config.rollout.exact and head == "policy",
            )

    @register(Dispatch.ONE_TO_ALL)
    def find_token_budget(self, prompt_len: int, response_len: int) -> int:
        """Return `TrainEngine.find_token_budget` for the number of processes on this node."""
        return self.engine.find_token_budget(prompt_len, response_len, self.local_world_size)

    @register(Dispatch.ONE_TO_ALL)
    def set_token_budget(self, max_tokens: int) -> None:
        """Set the maximum number of tokens in a micro-batch."""
        self.engine.max_tokens = max_tokens

    @register(Dispatch.ONE_TO_ALL)
    def save(self, directory: str, in_background: bool = False) -> list[SavedFile] | None:
        """Write the engine's state into a checkpoint directory: each rank its shards, or rank 0 an unsharded state.

        Return the files that this rank wrote. `in_background`: copy the state now, write it in a thread and return
        None; `finish_save` waits for it, and the files are reported in the directory too. Raises CheckpointError.
        """
        if self.rank and not self.engine.is_sharded:
            return []
        state = self.engine.state_dict()
        if not in_background:
            return self._write(Path(directory), state)
        if self._save is not None or self._copy_state is None:  # a pending save still reads its copy
            self._copy_state = StateCopy()
        self._save = BackgroundSave(partial(self._write_and_report, Path(directory), self._copy_state(state)))
        return None

    def _write_and_report(self, directory: Path, state: Any) -> list[SavedFile]:
        saved = self._write(directory, state)
        report_files(directory, f"{self.component}_{self.rank}", saved)
        return saved

    def _write(self, directory: Path, state: Any) -> list[SavedFile]:
        path = directory / self.component
        try:
            require_shared(directory)
            write = save_sharded_state if self.engine.is_sharded else save_state
            return saved_files(directory, write(state, path))
        except OSError as error:
            raise CheckpointError(f"'{path}' cannot be written: {error}") from error

    @register(Dispatch.ONE_TO_ALL)
    def finish_save(self) -> list[SavedFile]:
        """Wait for a pending background save and return its files. Raises CheckpointError if it failed."""
        save, self._save = self._save, None
        return save.finish() if save is not None else []

    @register(Dispatch.ONE_TO_ALL)
    def abandon_step(self) -> None:
        """Discard what an unfinished step has left, before `load` goes back to an earlier state."""
        super().abandon_step()
        with suppress(CheckpointError):  # of a save that is no longer wanted
            self.finish_save()

    @register(Dispatch.ONE_TO_ALL)
    def verify(self, directory: str) -> None:
        """Compare the engine's state with the one that `load` has read, bit for bit. Raises CheckpointError."""
        path, state = Path(directory) / self.component, self.engine.state_dict()
        if self.engine.is_sharded:
            stored = zeros_like_state(state)
            read_state_into(stored, path)
        else:
            stored = load_state(path)
        if different := first_difference(state, stored):
            raise CheckpointError(
                f"{self.component}, rank {self.rank}: {different} differs from '{path}' after loading; the memory "
                "or the disk of this node is faulty."
            )

    @register(Dispatch.ONE_TO_ALL)
    def load(self, directory: str) -> None:
        """Load the state that `save` wrote, on the same or a different number of ranks. Raises CheckpointError."""
        require_shared(Path(directory))
        path = Path(directory) / self.component
        try:
            if self.engine.is_sharded:
                self.engine.load_shards(describe_state(path), lambda state: read_state_into(state, path))
            else:
                self.engine.load_state_dict(load_state(path))
        except CheckpointError as error:
            raise type(error)(f"the state '{path}' cannot be loaded: {error}") from error
