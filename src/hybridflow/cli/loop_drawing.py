"""The loop of a run with `trainer.lag`, for its drawing: which step's weights sample which batch.

The steps are those in which `Ahead` begins and returns batches. Without a lag there is nothing to draw.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

from hybridflow.runtime.observe.dataflow import Edge
from hybridflow.trainers.sampling.ahead import Ahead

MOST_STEPS = 5
"""Largest number of steps in a drawing."""


class LoopStep(NamedTuple):
    """A step of the loop: the batches that its weights sample, and the batch on which it trains."""

    step: int
    sampled: list[int]
    trained: int


def draw_loop(lag: int, on_new_weights: str = "wait") -> str:
    """Return a text with the first steps, up to the first whose batch is not sampled by the initial weights.

    `on_new_weights`: that of rollout, if weights come while sequences run.
    """
    lines = [
        f"    weights of step {step}: sample {_named(sampled)}, then train on batch {trained}"
        for step, sampled, trained in loop_steps(lag)
    ]
    if on_new_weights != "wait":
        lines.append(
            f'    rollout.on_new_weights = "{on_new_weights}": batches that run go on with the weights of later steps'
        )
    return "\n".join([f"loop  (trainer.lag = {lag})", *lines]) + "\n" if lag else ""


def loop_edges(lag: int) -> list[Edge]:
    """Return the same steps as edges: weights to the batches that they sample, batches to the next weights."""
    edges, name_of = [], {}
    for step, sampled, trained in loop_steps(lag) if lag else ():
        name_of |= dict.fromkeys(sampled, _named(sampled))
        edges.append((f"weights of step {step}", _named(sampled), "sample"))
        edges.append((name_of[trained], f"weights of step {step + 1}", f"train on batch {trained}"))
    return edges


def loop_steps(lag: int) -> list[LoopStep]:
    """Return the first lag + 2 steps of a run, at most `MOST_STEPS`."""
    sampled: list[int] = []
    sampling: Any = SimpleNamespace(
        begin=lambda _, step: sampled.append(step) or SimpleNamespace(step=step),
        finish=lambda batch, _: batch.step,
        metrics={},
    )
    ahead: Any = Ahead(sampling, lag, total_steps=MOST_STEPS + lag)
    steps, no_prompts = [], lambda: None
    for step in range(min(lag + 2, MOST_STEPS)):
        sampled.clear()
        trained = ahead(no_prompts, step)
        steps.append(LoopStep(step, list(sampled), trained))
    return steps


def _named(batches: list[int]) -> str:
    return f"batch {batches[0]}" if len(batches) == 1 else f"batches {batches[0]} to {batches[-1]}"
