"""Countdown with each `trainer.lag`: does a run on older samples learn as much, with a correction and without?

The warm start of the demo is trained once; GRPO of the demo then runs from it with every lag and seed, in one process,
since what a lag means does not depend on where it runs. Only updates in flight need a second process, on Ray.

  lag_0, lag_1, lag_4     PPO's ratio, clipped, to the log-probs of the rollout (actor.old_log_probs_from = "rollout")
  lag_4_in_flight         the same with running sequences that go on with new weights (on_new_weights = "retract")
  lag_4_decoupled         decoupled PPO (actor.policy_loss = "decoupled-ppo")
  lag_4_weights           importance weights of each token, truncated at 2 (algorithm.rollout_weights = "token")
  lag_4_without           the same with all weights truncated to 1, so that nothing corrects for older samples

The figures are the greedy accuracy on held-out problems after the last step, by seed; the ratio compares the mean with
that of the first row.
"""

import logging
import statistics
import tempfile
import time
from pathlib import Path

from support.arguments import names_in, parser_of, positive
from support.countdown import reinforce, warm_start, write_task
from support.program import run
from support.report import Row, print_rows, print_table

RATIO = "actor.old_log_probs_from=rollout"
WEIGHTS = ("algorithm.rollout_weights=token", "algorithm.rollout_weight_outside=truncate")
IN_FLIGHT = (
    *("rollout.on_new_weights=retract", "controller.backend=ray"),
    *("placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate"),
)
ROWS = {
    "lag_0": ("trainer.lag=0", RATIO),
    "lag_1": ("trainer.lag=1", RATIO),
    "lag_4": ("trainer.lag=4", RATIO),
    "lag_4_in_flight": ("trainer.lag=4", RATIO, *IN_FLIGHT),
    "lag_4_decoupled": ("trainer.lag=4", "actor.policy_loss=decoupled-ppo"),
    "lag_4_weights": ("trainer.lag=4", *WEIGHTS),
    "lag_4_without": ("trainer.lag=4", *WEIGHTS, "algorithm.rollout_weight_bounds=[1.0, 1.0]"),
}


def main() -> None:
    smoke = {"seeds": 1, "steps": 2, "sft_steps": 2, "problems": 8, "only": ("lag_0", "lag_1")}
    parser = parser_of(__doc__, None, smoke={**smoke, "changes": ["data.train_batch_size=4", "rollout.group_size=2"]})
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs of each row (default: 3)")
    parser.add_argument("--steps", type=positive, default=60, metavar="N", help="steps of GRPO (default: 60)")
    parser.add_argument("--sft-steps", type=positive, default=700, metavar="N", help="of the warm start (default: 700)")
    parser.add_argument("--problems", type=positive, default=512, metavar="N", help="for validation (default: 512)")
    parser.add_argument("--only", type=names_in(list(ROWS)), default=tuple(ROWS), metavar="ROW,...", help="these rows")
    parser.set_defaults(changes=[])
    args = parser.parse_args()
    logging.disable(logging.INFO)
    accuracies: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        common = [f"controller.threads={args.threads or 0}"]
        write_task(directory, args.sft_steps, args.problems)
        warm_start(directory, [*common, f"trainer.total_steps={args.sft_steps}"])
        for name in args.only:
            start = time.perf_counter()
            changes = [*common, *ROWS[name], *args.changes, f"trainer.total_steps={args.steps}"]
            accuracies[name] = [
                reinforce(directory, f"{name}_{seed}", seed, changes)[-1]["val/accuracy"] for seed in range(args.seeds)
            ]
            print(f"{name}: {accuracies[name]} in {time.perf_counter() - start:.0f} s", flush=True)
    means = {name: statistics.mean(of_seeds) for name, of_seeds in accuracies.items()}
    first = means[args.only[0]]
    print_table(
        f"greedy accuracy after {args.steps} steps",
        ("", *(f"seed {seed}" for seed in range(args.seeds)), "mean"),
        [(name, *(f"{value:.3f}" for value in (*accuracies[name], means[name]))) for name in accuracies],
    )
    rows = [
        Row(name, "accuracy", mean, peer=first, ratio=mean / first if first else None) for name, mean in means.items()
    ]
    rows += [
        Row(f"{name}_seed_{seed}", "accuracy", value)
        for name, of_seeds in accuracies.items()
        for seed, value in enumerate(of_seeds)
    ]
    print_rows("lag_learning", rows, smoke=args.smoke)


if __name__ == "__main__":
    run(main)
