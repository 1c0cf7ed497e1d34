"""Generation that is read in parts, as groups of responses finish (trainer.stream).

    engine 0     begin, next, next, next         part j has the groups that finish as the j-th of each engine
    engine 1     begin, next, next, next

All calls are queued at once: an engine does not wait for the controller between the parts. Which groups are in a part
depends on the lengths of responses, not on time, so that equal seeds give equal parts.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np

from hybridflow.controller import WorkerGroup
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.workers.generating import ROLLOUT_MESH

PARTS = 8
"""Number of parts of a batch, or the number of prompts of an engine if that is smaller."""


class StreamedGeneration:
    """Generates with the engines of a worker group."""

    def __init__(self, rollout: WorkerGroup) -> None:
        self._engines = rollout.replicas(ROLLOUT_MESH)

    def __call__(self, prompts: DataProto, assigned: Sequence[Sequence[int]] = ()) -> tuple[DataProtoFuture, ...]:
        """Begin to generate; return the parts, each with the groups of all engines that finish next.

        Rows have the columns of the prompts; the responses to a prompt are adjacent. The arguments are those of
        `begin`.
        """
        return self.begin(prompts, assigned)()

    def begin(
        self, prompts: DataProto, assigned: Sequence[Sequence[int]] = ()
    ) -> Callable[[], tuple[DataProtoFuture, ...]]:
        """Begin to generate; return a function that calls the generation of the parts.

        `prompts` have `group_ids`. `assigned`: the rows of each engine; empty: the prompts are split evenly, in order.
        """
        if not assigned:
            assigned = [rows.tolist() for rows in np.array_split(np.arange(len(prompts)), len(self._engines))]
        # An engine without prompts gets one too, since loading weights may need all ranks; nothing reads its responses.
        own = [prompts.select_idxs(rows or [0]) for rows in assigned]
        noise_key = {"noise_key": prompts.meta_info["noise_key"]}
        parts = zip(self._engines, own, strict=True)
        begun = [(engine, engine.begin_sequences.remote(rows).with_meta_info(noise_key)) for engine, rows in parts]

        def parts_of_all() -> tuple[DataProtoFuture, ...]:
            parts_of = [self._parts(engine, places) for engine, places in begun]
            used = [parts for parts, rows in zip(parts_of, assigned, strict=True) if rows]
            joined = [[part for part in parts if part is not None] for parts in zip_longest(*used)]
            return tuple(DataProtoFuture.concat(parts).with_meta_info(noise_key) for parts in joined)

        return parts_of_all

    def _parts(self, engine: WorkerGroup, places: DataProtoFuture) -> list[DataProtoFuture]:
        """Call the generation of the parts of an engine; it needs only the number of `places`, and that they began."""
        return [engine.next_sequences.remote(places.slice(0, size)) for size in part_sizes(len(places))]


def part_sizes(num_groups: int) -> list[int]:
    """Return the number of groups in each part of an engine's groups: at least one, and fewer towards the end.

    The sizes fall about linearly. The groups that finish last are the longest, and nothing is generated while the ranks
    train on the last part, so that it should be small.
    """
    num_parts = min(PARTS, num_groups)
    ends = np.arange(num_parts + 1) / num_parts
    more = np.diff(np.rint((num_groups - num_parts) * ends * (2 - ends))).astype(int)
    return [1 + size for size in sorted(more.tolist(), reverse=True)]
