"""A node behind a slow link: steps that avoid it, steps that use it, and what a weight sync over it costs.

A Ray cluster of three nodes on this machine: that of the driver, which trains, and two that can generate. A link that
delays each packet by 25 ms (support/delayed_link.py) leads to one of these, which comes first in the order of
addresses. The demo's GRPO (2.6M parameters, 16 prompts with 4 responses) trains in three runs, one after another:

  measured   controller.parts = "measured": the engine is placed on the node with the fast link
  equal      controller.parts = "equal": it is placed on the first node, behind the slow link
  undelayed  "equal" on a cluster whose links have no delay

Figures are medians over the steps after the first two. `limit` of `step_seconds` is `undelayed`. The time of a weight
sync over the slow link, less that over a fast one, is shown in round trips of the link.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from support.arguments import parser_of, positive
from support.countdown import configured, write_task
from support.delayed_link import ALSO_NEAR, FAR, NEAR, Namespaces, delayed_link
from support.environments import RAY
from support.errors import BenchmarkError
from support.program import run
from support.report import Row, print_rows

from hybridflow.observability import read_jsonl

DELAY_S = 0.025
WARM_UP = 2
LARGEST_LOSS = 0.1
"""The wanted time of a step beyond that without a slow link."""
START_TIMEOUT_S = 60.0
CHANGES = (
    *("data.train_batch_size=16", "rollout.group_size=4", "actor.mini_batch_size=16", "data.val_files=[]"),
    *("trainer.val_every=0", "trainer.val_before_train=false", "trainer.save_every=1000", "trainer.save_every_s=0"),
    *("trainer.deterministic=false", "controller.backend=ray", "recovery.max_restarts=0"),
    *("placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate"),
)


def main() -> None:
    parser = parser_of(__doc__, None, smoke={"steps": 1, "warm_up": 0})
    parser.add_argument("--steps", type=positive, default=10, metavar="N", help="steps that are measured (default: 10)")
    parser.set_defaults(warm_up=WARM_UP)
    args = parser.parse_args()
    steps = args.warm_up + args.steps
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_task(directory, sft_steps=2, problems=8)
        rows: dict[str, list[dict[str, Any]]] = {}
        for delay_s, runs in ((DELAY_S, ("measured", "equal")), (0.0, ("undelayed",))):
            with delayed_link(delay_s) as namespaces, cluster(namespaces) as environment:
                for name in runs:
                    print(f"{name}: {steps} steps", file=sys.stderr, flush=True)
                    parts = "measured" if name == "measured" else "equal"
                    changes = [
                        f"trainer.total_steps={steps}",
                        f"model.path={directory}/model",
                        f"controller.threads={args.threads or 1}",
                    ]
                    changes += [*CHANGES, f"controller.parts={parts}", f"controller.address={NEAR}:6379"]
                    config = configured("countdown_grpo", directory, name, changes)
                    train(namespaces, environment, directory / f"{name}.toml", config.trainer.run_dir, changes)
                    rows[name] = read_jsonl(directory / name / "metrics.jsonl")[-args.steps :]
    print_rows("slow_link", figures(rows), smoke=args.smoke)


def figures(rows: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Return the figures from the metrics of the runs."""
    seconds = {name: median(row["timing_s/step"] for row in of_run) for name, of_run in rows.items()}
    sync = {name: median(row["timing_s/weight_sync"] for row in of_run) for name, of_run in rows.items()}
    measured, equal, undelayed = (seconds[name] for name in ("measured", "equal", "undelayed"))
    return [
        Row("step_seconds", "s", measured, equal, undelayed, equal / measured),
        Row("step_loss", "share", measured / undelayed - 1, limit=LARGEST_LOSS),
        Row("sync_seconds", "s", sync["measured"], sync["equal"], sync["undelayed"], sync["equal"] / sync["measured"]),
        Row("sync_round_trips", "count", (sync["equal"] - sync["undelayed"]) / (2 * DELAY_S)),
    ]


def train(namespaces: Namespaces, environment: dict[str, str], recipe: Path, run: str, changes: list[str]) -> None:
    """Train in the near namespace. Raises BenchmarkError if the run fails."""
    command = [sys.executable, "-m", "hybridflow", "train", str(recipe), *changes, f"trainer.run_dir={run}"]
    command = namespaces.command(namespaces.near, command)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"a run exited with status {done.returncode}: {done.stderr[-2000:]}")


@contextmanager
def cluster(namespaces: Namespaces) -> Iterator[dict[str, str]]:
    """Start a Ray cluster with two nodes in the near namespace and one in the far; yield the environment of its runs.

    Each node has one processor. The cluster ends with the block.
    """
    directory = Path(f"/tmp/hfl{os.getpid() % 10**6}")  # paths of sockets are short
    directory.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= RAY | {"RAY_TMPDIR": str(directory)}
    nodes = (
        (namespaces.near, [f"--node-ip-address={NEAR}", "--head", "--port=6379", "--include-dashboard=false"]),
        (namespaces.far, [f"--node-ip-address={FAR}", f"--address={NEAR}:6379"]),
        (namespaces.near, [f"--node-ip-address={ALSO_NEAR}", f"--address={NEAR}:6379"]),
    )
    ray_start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    ray_start += ["--object-store-memory=100000000", "--dashboard-agent-listen-port=0"]
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
        for number, (namespace, options) in enumerate(nodes):
            output = undo.enter_context((directory / f"{number}.txt").open("wb"))
            command = namespaces.command(namespace, [*ray_start, *options])
            node = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            undo.callback(node.wait)
            undo.callback(node.terminate)
            # one after another: nodes that start together take the same names of sockets
            wait_for_nodes(namespaces, environment, number + 1)
        yield environment


NUM_NODES = """
import ray
ray.init(address="auto", log_to_driver=False, configure_logging=False)
print(sum(node["Alive"] for node in ray.nodes()))
"""


def wait_for_nodes(namespaces: Namespaces, environment: dict[str, str], count: int) -> None:
    """Wait until the cluster has so many nodes."""
    deadline = time.monotonic() + START_TIMEOUT_S
    command = namespaces.command(namespaces.near, [sys.executable, "-c", NUM_NODES])
    address = {"RAY_ADDRESS": f"{NEAR}:6379"}
    while time.monotonic() < deadline:
        done = subprocess.run(command, env=environment | address, capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.split()[-1:] == [str(count)]:
            return
        time.sleep(0.5)
    raise BenchmarkError(f"the cluster has no {count} nodes after {START_TIMEOUT_S:.0f} s: {done.stderr[-1000:]}")


if __name__ == "__main__":
    run(main)
