"""Keys of the run: steps, validation, checkpoints, processes and their placement."""

from typing import Annotated, Literal

from pydantic import Field

from hybridflow.config.sections.base import (
    NoneAsText,
    NonNegative,
    Positive,
    RoleName,
    Section,
    UserFunction,
    named_or_user,
)

TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class TrainerConfig(Section):
    """Steps, validation, checkpoints and logs of a run."""

    run_dir: Annotated[str, Field(min_length=1)] = Field(
        default="runs/default", description="Directory of the run: configuration, metrics, samples, checkpoints."
    )
    seed: NonNegative = Field(default=0, description="Seed of all random numbers of the run.")
    total_steps: NonNegative = Field(default=0, description="Training steps; 0: epochs * steps per epoch.")
    epochs: Positive = Field(default=1, description="Passes over the training data, if total_steps is 0.")
    lag: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0,
        description="Sample a batch with weights that are N steps old: generation in a separate pool then overlaps "
        "training. 0: newest weights. N above 0 needs a correction, such as algorithm.rollout_weights.",
    )
    stream: bool = Field(
        default=False,
        description="Process a batch (scores, log-probs, gradients) in parts, as groups of responses finish; work "
        "on the whole batch follows the last part. Bits differ from a step on the whole batch.",
    )
    val_before_train: bool = Field(
        default=True, description="Validate before the first step, if there are data.val_files."
    )
    val_every: NonNegative = Field(
        default=0, description="Validate every N steps and after the last one; 0: only after the last."
    )
    save_every: NonNegative = Field(
        default=0,
        description="Save a checkpoint every N steps and after the last one; 0: only after the last one, and by "
        "save_every_s.",
    )
    save_every_s: Annotated[float, Field(ge=0)] = Field(
        default=1800.0,
        description="Save a checkpoint at the end of a step if at least N seconds passed since the last one, and "
        "with each validation; 0: only by save_every.",
    )
    save_in_background: bool = Field(
        default=False,
        description="Write a checkpoint while the next step runs: faster, but the host holds a copy of the state "
        "(in pinned memory with a GPU). A crash during the write loses that checkpoint only.",
    )
    keep_checkpoints: Positive = Field(
        default=2, description="Number of newest checkpoints to keep; older ones are deleted."
    )
    resume: Literal["auto", "never"] = Field(
        default="auto",
        description="auto: continue from the newest checkpoint in run_dir; never: start anew, run_dir must be empty.",
    )
    trackers: tuple[Annotated[TrackerName | UserFunction, named_or_user(TrackerName)], ...] = Field(
        default=(), description="Trackers in addition to metrics.jsonl; a class of your own gets run_dir and config."
    )
    log_samples: NonNegative = Field(
        default=4,
        description="Responses of each step in samples.jsonl: failed rewards (at most half), the best and the "
        "worst, then the first response to each prompt; 0: none.",
    )
    log_tokens: NonNegative = Field(
        default=512, description="Tokens of a sample that are kept with their log-probs and advantages; 0: none."
    )
    profile_steps: tuple[Positive, ...] = Field(
        default=(),
        description="Steps for which PyTorch's profiler writes a Chrome trace, and on a GPU a memory snapshot, into "
        "run_dir/profile. They are slower, with the same results.",
    )
    profile_ranks: tuple[NonNegative, ...] = Field(
        default=(0,), description="Ranks of each pool that are profiled in profile_steps."
    )
    deterministic: bool = Field(
        default=True,
        description="Use only deterministic kernels, and a seed for each response of vLLM. false: vLLM samples "
        "without seeds, so a response depends on concurrent requests.",
    )


class ControllerConfig(Section):
    """Worker processes, their threads and the calls to them."""

    backend: Literal["local", "ray"] = Field(
        default="local", description="Where workers run: in this process (local), or one process per rank on Ray (ray)."
    )
    num_workers: Annotated[int, Field(gt=0, le=65536)] = Field(
        default=1,
        description="Ranks of every role on one node; use placement.pools for several pools or nodes. Training with "
        "more than one needs backend = 'ray'; on local, ranks generate and evaluate one after another.",
    )
    address: str = Field(
        default="",
        description="ray: 'auto' or HOST:PORT of a running cluster; empty: start one on this machine for the run.",
    )
    cpus_per_worker: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="ray: logical CPUs that each worker process reserves; fractions are allowed."
    )
    gpus_per_worker: Annotated[float, Field(ge=0.01, le=1)] = Field(
        default=1.0,
        description="ray: share of a GPU that each worker process with a model reserves. 0.5: two pools of one "
        "process share a GPU, as rollout.weight_sync = 'ipc' requires.",
    )
    call_timeout_s: Annotated[Annotated[float, Field(gt=0)] | None, NoneAsText] = Field(
        default=3600.0,
        description="ray: deadline of each call to a worker, in seconds since its start or the last progress of its "
        "process (a micro-batch, a decoding step, ...); 'none': no deadline.",
    )
    heartbeat_timeout_s: Annotated[Annotated[float, Field(gt=0)] | None, NoneAsText] = Field(
        default=60.0,
        description="ray: seconds without a heartbeat after which a stopped or unreachable worker process counts as "
        "lost; a busy one counts as lost after ten times as long. 'none': never.",
    )
    report_after_s: Annotated[Annotated[float, Field(gt=0)] | None, NoneAsText] = Field(
        default=60.0,
        description="ray: seconds without progress after which a wait for workers logs which processes wait for "
        "which, with their stacks; 'none': never.",
    )
    object_store_bytes: NonNegative = Field(
        default=0, description="ray: object store of a cluster that the run starts, in bytes; 0: Ray's default."
    )
    compress_transfers: bool = Field(
        default=False, description="ray: compress batches with zstd; for slow networks between nodes."
    )
    parts: Literal["equal", "measured"] = Field(
        default="equal",
        description="Number of rows that each rank gets: equal, or measured (fewer for slower ranks in generation, "
        "scoring and training; needs trainer.deterministic = false).",
    )
    balance: Literal["rows", "groups", "none"] = Field(
        default="rows",
        description="Load balancing of rows over ranks after generation, by the compute cost of their lengths: rows "
        "(each separately), groups (keep a prompt's responses on one rank) or none (keep the order).",
    )
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0, description="CPU threads per rank; 0: the number of physical cores. The number affects rounding."
    )
    environment: dict[str, str] = Field(
        default={},
        description="Environment variables of the worker processes, as in {NCCL_DEBUG = 'INFO'}; variables of a rank "
        "(RANK, WORLD_SIZE, MASTER_ADDR, ...) are set by the backend.",
    )
    compiled_kernels: bool = Field(
        default=True,
        description="On a CPU, use kernels compiled by the machine's C compiler at the first start. false, or "
        "without a compiler: PyTorch's slower kernels. Affects rounding.",
    )


class PlacementConfig(Section):
    """Resource pools and the roles on them."""

    pools: dict[str, tuple[Positive, ...]] = Field(
        default={},
        description="Resource pools by name, with the number of processes on each node, as in {main = [4, 4]}; "
        "empty: one pool of controller.num_workers processes.",
    )
    roles: dict[RoleName, str] = Field(
        default={},
        description="Pool of each role, as in {critic = 'second'}; other roles use the first pool. Roles in one "
        "pool share its processes and run one after another.",
    )
    min_processes: dict[str, Positive] = Field(
        default={},
        description="ray: fewest processes of a pool, as in {rollout = 1}. With fewer nodes, at the start or after "
        "a loss, the run uses the processes that fit, but at least this number, and adds processes when there is "
        "room again. Other pools need all their processes.",
    )


class RecoveryConfig(Section):
    """Recovery inside a run: what happens when a worker dies, hangs or runs out of memory."""

    max_restarts: NonNegative = Field(
        default=3,
        description="ray: after the loss of a worker, start new workers and continue from the last snapshot or "
        "checkpoint; stop after N failed tries of a step. 0: stop at the first failure.",
    )
    snapshot_every: NonNegative = Field(
        default=1,
        description="ray: take a snapshot of the training state for recovery every N steps, in the background; 0: "
        "recover from the last checkpoint.",
    )
    snapshot_dir: str = Field(
        default="",
        description="Directory of snapshots; empty: shared memory (/dev/shm) if all workers are on the controller's "
        "node, otherwise run_dir/snapshots.",
    )
    standby: bool = Field(
        default=False,
        description="ray: keep one standby process without a model for each rank, to replace it sooner if it is lost.",
    )
    backoff_s: Annotated[float, Field(ge=0, le=86400)] = Field(
        default=1.0,
        description="Pause before the second restart of a failed step, in seconds; it doubles with each further "
        "restart, up to 10 minutes, and varies by a quarter.",
    )
