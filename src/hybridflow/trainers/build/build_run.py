"""Builds any training run in steps: checks, data, run directory, workers (again if one dies meanwhile), trainer."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hybridflow.config import Config
from hybridflow.controller import ClassWithInitArgs, Role
from hybridflow.data import BatchLoader
from hybridflow.errors import ConfigError, LostWorkerError
from hybridflow.models.kernels.library import use_kernels
from hybridflow.runtime.allocator import bound_shape_caches, keep_freed_memory, relax_garbage_collector
from hybridflow.runtime.observe import get_logger
from hybridflow.runtime.observe.slow_start import named_if_slow
from hybridflow.runtime.random_state import seed_random_state
from hybridflow.runtime.threads import set_deterministic, set_num_threads, use_full_float32
from hybridflow.trainers.build.groups import build_backend, build_groups, closing_on_error, groups_of_pools
from hybridflow.trainers.build.pool_sizes import pool_sizes_of
from hybridflow.trainers.build.preconditions import require_one_rank, require_profile_steps, require_snapshot_dir
from hybridflow.trainers.build.start_report import report_parts
from hybridflow.trainers.build.token_budgets import TokenBudgets
from hybridflow.trainers.run.recovery.failures import Tries
from hybridflow.trainers.run.run_directory import RunDirectory, require_unused
from hybridflow.trainers.run.run_identity import Kind
from hybridflow.trainers.run.run_trainer import D, RunParts
from hybridflow.trainers.run.speed import LearnerWork, measured_speedometer

T = TypeVar("T")

OpenDataset = Callable[[tuple[str, ...], int, str], D]
"""A function (files, max_samples, order_by) -> dataset whose rows fit the model."""


@dataclass(frozen=True)
class TrainingKind(Generic[D, T]):
    """The differences between the kinds of training.

    `batch_key` is the configuration key of `batch_size`. `classes(total_steps)` returns the worker class of each role.
    """

    kind: Kind
    open_dataset: OpenDataset[D]
    batch_key: str
    batch_size: int
    classes: Callable[[int], Mapping[Role, ClassWithInitArgs]]
    learners: Mapping[str, LearnerWork]
    trainer: Callable[[RunParts[D]], T]


def build_run(config: Config, program: TrainingKind[D, T]) -> T:
    """Build the trainer of a run, cheap checks first. Seeds the process; writes no file yet.

    Raises ConfigError, DataError, ModelError or CheckpointError.
    """
    require_one_rank(config)
    require_snapshot_dir(config)
    require_unused(Path(config.trainer.run_dir))
    prepare_driver_process(config)
    data, trainer = config.data, config.trainer
    with named_if_slow("reading data.train_files"):
        dataset = program.open_dataset(data.train_files, 0, data.order_by)
    if program.batch_size > len(dataset):
        raise ConfigError(
            f"{program.batch_key}={program.batch_size} is larger than the data set of {len(dataset)} rows; use at most "
            f"{len(dataset)}, or more data."
        )
    order = "weighted" if config.environment.weights else data.order
    loader = BatchLoader(dataset, program.batch_size, seed=trainer.seed, order=order)
    with named_if_slow("reading data.val_files"):
        rows = config.validation.max_samples
        validation = program.open_dataset(data.val_files, rows, "") if data.val_files else None
    if trainer.val_every and not validation:
        logger.info("trainer.val_every=%d has no effect: data.val_files is empty", trainer.val_every)
    total_steps = trainer.total_steps or trainer.epochs * len(loader)
    require_profile_steps(config, total_steps)
    report_parts(config.model.path)
    with named_if_slow("checking the run on placeholders"):
        classes = program.classes(total_steps)
    with named_if_slow("hashing the models"):
        run = RunDirectory(config, program.kind)
    facts = run.start_facts["data"] = {"train_rows": len(dataset), "train_fingerprint": dataset.fingerprint}
    if validation is not None:
        facts |= {"val_rows": len(validation), "val_fingerprint": validation.fingerprint}

    def start() -> T:
        with closing_on_error(build_backend(config)) as backend:
            sizes = pool_sizes_of(config, backend, list(classes))
            fitting = sizes.fit() if sizes else config
            with named_if_slow("starting the workers and loading the models"):
                groups = build_groups(fitting, backend, classes)
            of_pools = groups_of_pools(fitting, groups, "arithmetic")
            run.record_arithmetic(facts for group in of_pools for facts in group.arithmetic())
            budgets = TokenBudgets(fitting, groups, run)
            with named_if_slow("measuring memory and speed"):
                budgets.settle()
                speedometer = measured_speedometer(fitting, program.learners, groups)
            run.start_facts["matmul_peak_flops_per_s"] = next(iter(speedometer.learners.values())).peak_flops
            data_parts = (loader, validation, total_steps, run)
            with named_if_slow("preparing the first step"):
                return program.trainer(RunParts(fitting, groups, *data_parts, speedometer, backend, budgets, sizes))

    return start_with_tries(config, start, run.start_facts)


def prepare_driver_process(config: Config) -> None:
    """Set memory, threads, kernels and random state of this process, before any computation that depends on them."""
    relax_garbage_collector()
    keep_freed_memory(
        large_blocks=config.controller.backend == "ray"
    )  # on Ray this process holds batches, but no model
    bound_shape_caches()
    set_num_threads(config.controller.threads)
    use_kernels(config.controller.compiled_kernels)
    use_full_float32()
    set_deterministic(config.trainer.deterministic)
    seed_random_state(config.trainer.seed)


logger = get_logger(__name__)


def start_with_tries(config: Config, start: Callable[[], T], facts: dict[str, Any]) -> T:
    """Return the result of `start()`, which starts a cluster and workers and stops them if it raises.

    On Ray it is called again after the loss of a worker or of the cluster, at most `recovery.max_restarts` times.
    `facts["failed_starts"]` lists the errors.
    """
    recovery = config.recovery
    tries = Tries(recovery.max_restarts if config.controller.backend == "ray" else 0, recovery.backoff_s)
    while True:
        try:
            return start()
        except LostWorkerError as error:
            if tries.is_exhausted():
                raise
            pause_s = tries.next_pause_s(0)
            logger.warning("%s", error)
            logger.warning("starting the workers again, try %d of %d", tries.count, recovery.max_restarts)
            facts.setdefault("failed_starts", []).append(str(error).partition("\n")[0])
        time.sleep(pause_s)
        seed_random_state(config.trainer.seed)
