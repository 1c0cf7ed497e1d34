"""Batches of the groups that finish next, of any batch that has begun (`rollout.order = "ready"`).

    begun         batch 0: a b C    batch 1: d e f    batch 2: g h i        C is long
    trained on    a b d             e f g             C h i                 three groups, as they finish

Each engine gives a batch as many groups as it began for one, so that each group is trained on once.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from hybridflow.controller import WorkerGroup
from hybridflow.controller.part_sizes import even_sizes
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.workers.generating import ROLLOUT_MESH


class ReadyGroups:
    """Generates with the engines of a worker group."""

    def __init__(self, rollout: WorkerGroup) -> None:
        self._engines = rollout.replicas(ROLLOUT_MESH)

    def begin(
        self, prompts: DataProto, assigned: Sequence[Sequence[int]] = ()
    ) -> Callable[[], tuple[DataProtoFuture, ...]]:
        """Begin to generate the responses to `prompts`, split evenly over the engines; all batches are of equal size.

        Return a function that calls the generation of a batch: `group_size` rows for each prompt, with the columns of
        their own prompts, engine by engine. `assigned` is empty.
        """
        assert not assigned, "counts of an engine must not change"
        engines = self._engines[: len(prompts)]
        shares = pairwise(accumulate(even_sizes(len(prompts), len(engines)), initial=0))
        begun = [
            engine.begin_sequences.remote(prompts.slice(*share)) for engine, share in zip(engines, shares, strict=True)
        ]
        noise_key = {"noise_key": prompts.meta_info["noise_key"]}

        def finish_next() -> tuple[DataProtoFuture]:
            rows = [engine.next_ready_sequences.remote(places) for engine, places in zip(engines, begun, strict=True)]
            return (DataProtoFuture.concat(rows).with_meta_info(noise_key),)

        return finish_next
