"""The controller's cost of a call, for 1 to 4,096 ranks: dispatch of a batch and collection of the results.

    make bench-controller_scale
    .venv/bin/python benchmarks/controller_scale.py --ranks 1 64 1024

The workers are placeholders: nothing is computed, read by workers or sent. What remains is the controller's own work,
for a batch with the columns and the reads of a GRPO step. "a step" is all its calls: generation, rewards, old
log-probs, update. The garbage collector is configured as in the driver of a run.
"""

import statistics
import time

from support.arguments import parser_of, positive
from support.program import run
from support.report import Row, print_rows

from hybridflow.config import load_config
from hybridflow.controller import ClassWithInitArgs, ResourcePool, WorkerGroup
from hybridflow.controller.placeholder import PlaceholderBackend, synthetic_batch
from hybridflow.protocol import DataProto
from hybridflow.runtime.allocator import relax_garbage_collector
from hybridflow.workers import ActorRolloutWorker, RewardWorker
from hybridflow.workers.generating import DATASET_COLUMNS

ROWS_FOR_EACH_RANK = 4


def main() -> None:
    parser = parser_of(__doc__, smoke={"repeats": 1, "ranks": [1, 4]})
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 4, 16, 64, 256, 1024, 4096], metavar="N")
    arguments = parser.parse_args()
    relax_garbage_collector()
    print(f"{'ranks':>8}{'one call, ms':>16}{'per rank, us':>16}{'a step, ms':>14}")
    rows = []
    for ranks in arguments.ranks:
        call, step = measure(ranks, arguments.repeats)
        print(f"{ranks:>8}{call * 1e3:>16.2f}{call * 1e6 / ranks:>16.1f}{step * 1e3:>14.1f}", flush=True)
        rows += [Row(f"call_{ranks}", "s", call), Row(f"step_{ranks}", "s", step)]
    print_rows("controller_scale", rows, smoke=arguments.smoke)


def measure(ranks: int, repeats: int) -> tuple[float, float]:
    """Return the median seconds of one call with its result, and of the calls of a step."""
    config = load_config(None, ["rollout.group_size=4", "actor.epochs=2"])
    backend, pool = PlaceholderBackend(), ResourcePool([ranks])
    meshes = {"rollout": {"data": ranks, "tensor": 1}}
    actor = WorkerGroup(pool, ClassWithInitArgs(ActorRolloutWorker, config=config), backend, "actor_rollout", meshes)
    rewards = WorkerGroup(pool, ClassWithInitArgs(RewardWorker, config=config), backend, "reward")
    prompts = synthetic_batch([*DATASET_COLUMNS, "group_ids"], ranks * ROWS_FOR_EACH_RANK // 4 or 1)
    prompts.meta_info.clear()
    rollouts = actor.generate_sequences(prompts)
    calls, steps = [], []
    for _ in range(repeats + 1):
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
    run(main)
