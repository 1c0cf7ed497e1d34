"""Batches of the groups that finish next, of any batch that has begun (`rollout.order = "ready"`).

    begun         batch 0: a b C    batch 1: d e f    batch 2: g h i        C is long
    trained on    a b d             e f g             C h i                 three groups, as they finish

Each engine gives a batch as many groups as it began for one, so that each group is trained on once.
"""

from functools import cached_property
from itertools import accumulate, pairwise

from hybridflow.controller import WorkerGroup
from hybridflow.controller.part_sizes import even_sizes
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.in_flight import Running
from hybridflow.workers.generating import ROLLOUT_MESH


class RunningReady(Running):
    """A batch of the groups that finish next; see `begin_in_flight`."""

    @cached_property
    def parts(self) -> tuple[DataProtoFuture]:
        """The batch: `group_size` rows for each prompt, with the columns of their own prompts, engine by engine."""
        shares = _shares(self.rollout, len(self.prompts))
        rows = [engine.next_ready_sequences.remote(self.begun.slice(*share)) for engine, share in shares]
        return (DataProtoFuture.concat(rows).with_meta_info({"noise_key": self.prompts.meta_info["noise_key"]}),)


def begin_in_flight(rollout: WorkerGroup, prompts: DataProto, step: int, order: str) -> Running:
    """Begin to generate the responses to `prompts`, split evenly over the engines.

    `order`: `rollout.order`; with "ready" all batches are of equal size.
    """
    if order == "sampled":
        return Running(step, rollout, rollout.begin_sequences.remote(prompts), prompts)
    shares = _shares(rollout, len(prompts))
    begun = [engine.begin_sequences.remote(prompts.slice(*share)) for engine, share in shares]
    return RunningReady(step, rollout, DataProtoFuture.concat(begun), prompts)


def _shares(rollout: WorkerGroup, num_prompts: int) -> list[tuple[WorkerGroup, tuple[int, int]]]:
    """Return each engine that gets prompts, with its first prompt and the one after its last."""
    engines = rollout.replicas(ROLLOUT_MESH)[:num_prompts]
    ends = accumulate(even_sizes(num_prompts, len(engines)), initial=0)
    return list(zip(engines, pairwise(ends), strict=True))
