"""The run around the algorithm: steps, files, processes and where they are."""

from typing import Annotated, Literal

from pydantic import Field

from hybridflow.config.sections.base import NoneAsText, NonNegative, Positive, RoleName, Section


class TrainerConfig(Section):
    run_dir: str = Field(
        default="runs/default", description="Directory of the run: configuration, metrics, samples, checkpoints."
    )
    seed: NonNegative = Field(default=0, description="Seed of everything random in the run.")
    total_steps: NonNegative = Field(default=0, description="Training steps; 0 is epochs * steps per epoch.")
    epochs: Positive = Field(default=1, description="Passes over the training data, where total_steps is 0.")
    val_before_train: bool = Field(
        default=True, description="Validate once before the first step (if there is validation data)."
    )
    val_every: NonNegative = Field(
        default=0, description="Validate every N steps and after the last one; 0: only after the last."
    )
    save_every: NonNegative = Field(
        default=0,
        description="Save a checkpoint every N steps and after the last one; 0: only after the last, and as "
        "save_every_s says.",
    )
    save_every_s: Annotated[float, Field(ge=0)] = Field(
        default=1800.0,
        description="Save a checkpoint at the end of a step if at least N seconds passed since the last one, and with "
        "each validation; 0: only as save_every says.",
    )
    save_in_background: bool = Field(
        default=False,
        description="Write a checkpoint while the next step runs, from a copy of the state: faster, with the state "
        "twice in memory until it is written. A crash meanwhile loses that checkpoint.",
    )
    keep_checkpoints: Positive = Field(default=2, description="The newest checkpoints that are kept.")
    resume: Literal["auto", "never"] = Field(
        default="auto",
        description="auto continues from the newest checkpoint in run_dir; never wants an empty run_dir.",
    )
    trackers: tuple[Literal["tensorboard"], ...] = Field(default=(), description="Trackers besides metrics.jsonl.")
    log_samples: NonNegative = Field(
        default=4, description="Samples of each step written to samples.jsonl and shown on the console; 0 is none."
    )
    deterministic: bool = Field(default=True, description="Use deterministic kernels only.")


class ControllerConfig(Section):
    backend: Literal["local", "ray"] = Field(
        default="local", description="Where workers run: local is this process, ray a process for each rank."
    )
    num_workers: Positive = Field(
        default=1,
        description="Ranks of every role, on one node; placement.pools says it for several pools or nodes. More than "
        "one trains on ray only; generating and evaluating take turns on local.",
    )
    address: str = Field(
        default="",
        description="ray: 'auto' or HOST:PORT of a running cluster; empty is one on this machine during the run.",
    )
    cpus_per_worker: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="ray: logical CPUs that a worker process reserves; a share is fine."
    )
    call_timeout_s: Annotated[Annotated[float, Field(gt=0)] | None, NoneAsText] = Field(
        default=3600.0, description="ray: the deadline of each call on a worker, in seconds; 'none' is no deadline."
    )
    object_store_bytes: NonNegative = Field(
        default=0, description="ray: shared memory of a cluster that the run starts; 0 is Ray's choice."
    )
    compress_transfers: bool = Field(
        default=False, description="ray: zstd on batches that are sent; for slow networks between nodes."
    )
    parts: Literal["equal", "measured"] = Field(
        default="equal",
        description="How many rows each rank gets of generation, log-probs, values and scores: as many, or fewer where "
        "it was slower in the last calls. 'measured' needs trainer.deterministic = false.",
    )
    balance: Literal["rows", "groups", "none"] = Field(
        default="rows",
        description="Which rows each rank gets after generation: those that make the ranks take equally long, by the "
        "model's cost of each length; 'groups' keeps the responses to a prompt on one rank; 'none' is as they come.",
    )
    threads: NonNegative = Field(
        default=0,
        description="Threads per rank; 0 is the number of physical cores. Rounding depends on it.",
    )
    compiled_kernels: bool = Field(
        default=True,
        description="On a CPU, compute with kernels that the machine's C compiler makes at the first start. "
        "false, or no compiler: PyTorch's own, slower. Rounding depends on it.",
    )


class PlacementConfig(Section):
    pools: dict[str, tuple[Positive, ...]] = Field(
        default={},
        description="Name of each pool and its processes on each node, as in {main = [4, 4]}; "
        "empty is one pool of controller.num_workers.",
    )
    roles: dict[RoleName, str] = Field(
        default={},
        description="The pool of a role, as in {critic = 'second'}; others are on the first one. Roles of one "
        "pool share its processes and take turns.",
    )
