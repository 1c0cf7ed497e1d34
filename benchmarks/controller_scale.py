"""What a call costs the controller, for 1 to 4,096 ranks: dispatch of a batch and collection of the results.

    make bench-controller_scale
    .venv/bin/python benchmarks/controller_scale.py --ranks 1 64 1024

The workers are placeholders: nothing is computed, read by workers or sent, so what is left is the controller's own
work, here for a batch with the columns and the reads of a step of GRPO. "a step" is its calls: generation, rewards,
old log-probs, update. The garbage collector is set as the driver of a run sets it.
"""

import argparse
import json
import statistics
import sys
import time

from hybridflow.config import load_config
from hybridflow.controller import ClassWithInitArgs, ResourcePool, WorkerGroup
from hybridflow.controller.placeholder import PlaceholderBackend, synthetic_batch
from hybridflow.protocol import DataProto
from hybridflow.runtime import relax_garbage_collector
from hybridflow.trainers.program import PROMPT_COLUMNS
from hybridflow.workers import ActorRolloutWorker, RewardWorker

ROWS_FOR_EACH_RANK = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 4096], metavar="N")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts (5)")
    arguments = parser.parse_args()
    relax_garbage_collector()
    print(f"{'ranks':>8}{'one call, ms':>16}{'a call a rank, us':>20}{'a step, ms':>14}")
    rows = []
    for ranks in arguments.ranks:
        call, step = measure(ranks, arguments.rounds)
        print(f"{ranks:>8}{call * 1e3:>16.2f}{call * 1e6 / ranks:>20.1f}{step * 1e3:>14.1f}", flush=True)
        for name, seconds in (("call", call), ("step", step)):
            row = {"name": f"{name}_{ranks}", "unit": "s", "ours": seconds, "peer": None, "limit": None, "ratio": None}
            rows.append(row)
    print(json.dumps({"benchmark": "controller_scale", "rows": rows}))
    return 0


def measure(ranks: int, rounds: int) -> tuple[float, float]:
    """Median seconds of one call with its result read, and of the calls of a step."""
    config = load_config(None, ["rollout.group_size=4", "actor.epochs=2"])
    backend, pool = PlaceholderBackend(), ResourcePool([ranks])
    meshes = {"rollout": {"data": ranks, "tensor": 1}}
    actor = WorkerGroup(pool, ClassWithInitArgs(ActorRolloutWorker, config=config), backend, "actor_rollout", meshes)
    rewards = WorkerGroup(pool, ClassWithInitArgs(RewardWorker, config=config), backend, "reward")
    prompts = synthetic_batch([*PROMPT_COLUMNS, "group_ids"], ranks * ROWS_FOR_EACH_RANK // 4 or 1)
    prompts.meta_info.clear()
    rollouts = actor.generate_sequences(prompts)
    calls, steps = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        actor.compute_log_probs(rollouts)
        calls.append(time.perf_counter() - start)
        start = time.perf_counter()
        future = actor.generate_sequences.remote(prompts)
        batch = prompts.repeat(4, interleave=True).union(future)
        batch = batch.union(rewards.score.remote(batch))
        batch = batch.union(actor.compute_log_probs.remote(batch))
        ids = synthetic_batch(["row_ids", "advantages"], len(batch))
        ids.meta_info.clear()
        update = actor.update_actor.remote(batch.union(ids).with_meta_info({"mini_batches": [], "kl_coef": 0.0}))
        update.get(())
        scores: DataProto = batch.get(["scores", "response_mask"])
        assert len(scores) == len(batch)
        steps.append(time.perf_counter() - start)
        backend.trace.take()
    return statistics.median(calls[1:]), statistics.median(steps[1:])


if __name__ == "__main__":
    sys.exit(main())
