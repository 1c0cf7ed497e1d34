"""Estimate memory and time of a run of `hybridflow train` on each rank, without its weights and without a device.

One line per role, in GiB, while it works, and the largest need of each pool, in which one role works and the others
keep what is resident. The estimate is for GPUs unless --device cpu, and for the GPU of this machine, or one of 8 GiB
without it, unless --gpu-memory. With memory.max_tokens_per_micro_batch = "auto" it is the least: a micro-batch of one
sequence. For GPUs, the last lines estimate the seconds of a step under assumptions that they name. docs/gpu.md
describes the formulas.
"""

import argparse
from dataclasses import asdict

from hybridflow.cli.arguments import add_recipe_arguments, config_of, number
from hybridflow.cli.output import aligned

GIB = 2**30

KEYS = (
    *("model.path", "model.dtype", "model.gradient_checkpointing", "memory.max_tokens_per_micro_batch"),
    *("memory.offload", "parallel.tensor", "parallel.replicas", "parallel.expert", "lora.rank"),
    *("controller.num_workers", "placement.pools"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a recipe with its overrides, and the device."""
    add_recipe_arguments(parser)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="device of the ranks (default: gpu)")
    parser.add_argument(
        "--gpu-memory",
        type=number(float, lambda gib: 0 < gib < 2**20, "GiB of one GPU, such as 80"),
        default=0,
        metavar="GIB",
        help="memory of each GPU: a larger one holds more logits at once (default: that of this machine's GPU)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the estimate."""
    from hybridflow.models.hub import with_local_files
    from hybridflow.trainers import estimate_memory, need_of_pools, step_estimate

    config = with_local_files(config_of(args), weights=False)
    estimates = estimate_memory(config, args.device, int(args.gpu_memory * GIB))
    if not estimates:
        return 0  # each role was reported
    lines = [["", "ranks", *asdict(estimates[0].memory), "total"]]
    for estimate in estimates:
        parts = [*asdict(estimate.memory).values(), estimate.memory.total]
        lines.append([estimate.name, str(estimate.ranks), *(f"{part / GIB:.2f}" for part in parts)])
    print("\n".join(aligned(lines)))
    for pool, need in need_of_pools(estimates).items():
        print(f"pool {pool}: {need / GIB:.2f} GiB on each rank")
    if args.device == "gpu":
        print("\n".join(step_estimate(config)))
    return 0
