"""The reward worker: scores responses with reward functions, one score for each row."""

from collections.abc import Callable
from pathlib import Path

from hybridflow.checkpoint import CheckpointStore, SavedFile, load_state, require_shared, save_state, saved_files
from hybridflow.config import Config
from hybridflow.controller import Dispatch, Worker, register
from hybridflow.environments.processes.closure import Closure
from hybridflow.environments.rewards import RewardResult, RewardRunner, RewardScorer
from hybridflow.environments.rewards.journal import RewardJournal
from hybridflow.environments.rewards.table import QUICK, TABLE
from hybridflow.protocol import DataProto
from hybridflow.protocol.meta_info import NOISE_KEY
from hybridflow.runtime.alike import require_alike
from hybridflow.runtime.fault_points import fault_point
from hybridflow.runtime.random_state import (
    capture_random_state,
    restore_random_state,
    seed_random_state,
    unchanged_random_state,
)
from hybridflow.runtime.random_streams import derive_seed

SCORED_COLUMNS = ("solution_texts", "data_sources", "ground_truths", "extra_infos", "raw_prompts")
SCORE_COLUMNS = ("scores", "reward_failed", "reward_timed_out", "reward_extras")


def score_columns(config: Config) -> tuple[str, ...]:
    """Return the columns that `score` computes; with `reward.weights`, also `reward_components`."""
    return (*SCORE_COLUMNS, "reward_components") if config.reward.weights else SCORE_COLUMNS


def build_runner(config: Config, closure: Closure | None = None) -> RewardRunner | None:
    """Build the processes for reward.function, or for slow functions of the table; None to call it in this process."""
    reward = config.reward
    if config.environment.classes:  # their processes call it
        return None
    source, _, name = reward.function.rpartition(":")
    is_quick = source.startswith("hybridflow.") and name in {function.__name__ for function in QUICK}
    if not reward.processes or is_quick:
        return None
    return RewardRunner(
        reward.function or TABLE,
        num_processes=reward.processes,
        timeout_s=reward.timeout_s,
        memory_bytes=reward.memory_bytes,
        kwargs=reward.kwargs,
        concurrency=reward.concurrency,
        closure=closure,
    )


class RewardWorker(Worker):
    """A worker that scores with `reward.function`, or with the function of each row's data source.

    `closure`: the function, if reward.function names one of a Python program.
    """

    def __init__(self, config: Config, closure: Closure | None = None) -> None:
        fault_point("start")
        if self.rank == 0 or self.has_collectives:  # ranks that share a process are seeded once, by rank 0
            seed_random_state(derive_seed(config.trainer.seed, self.rank) if self.rank else config.trainer.seed)
        self.config, reward = config, config.reward
        self.runner, self.journal = build_runner(config, closure), None
        if self.runner and reward.function:
            self.runner.start()  # raises errors of the function's module now
        if self.runner and config.trainer.run_dir:
            self.journal = RewardJournal(
                Path(config.trainer.run_dir) / "rewards",
                self.rank,
                [self.runner.name, self.runner.kwargs, self.runner.kind.source],
                failures=reward.on_error == "zero",
            )
        function = closure.function() if closure and not self.runner else reward.function
        num_rows = config.data.train_batch_size * config.rollout.group_size
        self.scorer = RewardScorer(
            "" if config.environment.classes else function,
            on_error=reward.on_error,
            error_score=reward.error_score,
            max_failure_rate=reward.max_failure_rate,
            weights=reward.weights,
            kwargs=reward.kwargs,
            concurrency=reward.concurrency,
            runner=self.runner,
            journal=self.journal,
            rows_of_step=num_rows / self.world_size if config.trainer.stream else 0.0,
        )

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=SCORED_COLUMNS,
        writes=score_columns,
        parts=lambda config: config.controller.parts,
    )
    def score(self, batch: DataProto) -> DataProto:
        """Compute `scores`, flags of failed and timed-out rows, and the extra values returned for each row."""
        return result_columns(self._begin(batch, step=step_of(batch))())

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=SCORED_COLUMNS,
        writes=lambda config: (*score_columns(config), "answers"),
    )
    def score_validation(self, batch: DataProto) -> DataProto:
        """Compute the columns of `score` and `answers` for validation, without changing the random state."""
        with unchanged_random_state():
            result = self._begin(batch)()
        return result_columns(result).union(DataProto.from_dict({}, {"answers": result.answers}))

    def _begin(self, batch: DataProto, step: int | None = None) -> Callable[[], RewardResult]:
        """Begin to score, see `RewardScorer.begin`."""
        fault_point("score")
        columns = {name: column.tolist() for name, column in batch.non_tensor_batch.items()}
        return self.scorer.begin(
            *(columns[name] for name in SCORED_COLUMNS),
            seed_keys=tuple(batch.meta_info.get(NOISE_KEY, (self.config.trainer.seed,))),
            step=step,
        )

    @register(Dispatch.ONE_TO_ALL)
    def save(self, directory: str, in_background: bool = False) -> list[SavedFile]:
        """Write the random state, which reward functions may use, into a checkpoint directory, in the foreground.

        Return the files that this rank wrote. Raises CheckpointError.
        """
        require_shared(Path(directory))
        files = save_state({"random": capture_random_state()}, self._state_file(directory))
        if self.journal and self.rank == 0:
            checkpoints = CheckpointStore(Path(self.config.trainer.run_dir) / "checkpoints").list()
            self.journal.forget_before(min(checkpoints, default=0))
        return saved_files(Path(directory), files)

    @register(Dispatch.ONE_TO_ALL)
    def abandon_step(self) -> None:
        """Forget the unfinished step; its outcomes in the journal are known when it is repeated."""
        if self.journal:
            self.journal.reopen()

    @register(Dispatch.ONE_TO_ALL)
    def finish_save(self) -> None:
        """Do nothing: `save` has written everything."""

    @register(Dispatch.ONE_TO_ALL)
    def load(self, directory: str) -> None:
        """Restore the random state that `save` wrote; a rank without a saved state starts from its seed."""
        file = self._state_file(directory)
        if file.with_suffix(".json").exists():
            state = load_state(file)
            require_alike(state, {"random": {}}, f"the state '{file}'")
            restore_random_state(state["random"], f"the state '{file}'['random']")

    @register(Dispatch.ONE_TO_ALL)
    def verify(self, directory: str) -> None:
        """Do nothing: the random state has no other copy to compare it with."""

    def _state_file(self, directory: str) -> Path:
        return Path(directory) / (f"reward_{self.rank}" if self.rank else "reward")


def step_of(batch: DataProto) -> int | None:
    """Return the step whose journal the outcomes of a batch belong to; None without one."""
    noise_key = batch.meta_info.get(NOISE_KEY)
    return noise_key[-1] if noise_key else None


def result_columns(result: RewardResult) -> DataProto:
    """Return the columns of a result."""
    tensors = {"scores": result.scores, "reward_failed": result.failed, "reward_timed_out": result.timed_out}
    if result.components is not None:
        tensors["reward_components"] = result.components
    return DataProto.from_dict(tensors, {"reward_extras": result.extras})
