"""When the responses to a batch of prompts are generated: at once, or beside others, as a whole or in parts.

    Generation            begin                       take
    WholeBatches          generate                    the batch, when it is generated
    RunningBatches        begin in each engine        finish: the batch, of sequences that may have run for long
    StreamedBatches       begin in each engine        next, next, next: parts, in the order in which groups finish

Calls return futures. Which groups are in a part depends on the lengths of responses, not on time, so that equal seeds
give equal parts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np

from hybridflow.config import Config
from hybridflow.controller import WorkerGroup
from hybridflow.controller.mesh import ROLLOUT_MESH
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.protocol.meta_info import NOISE_KEY

MOST_STREAMED_PARTS = 8
"""Number of parts of a batch, or the number of prompts of an engine if that is smaller."""


@dataclass(frozen=True)
class Ticket:
    """A batch that has begun. `prompts`: one row each. `begun`: what the calls of its engines return."""

    prompts: DataProto
    begun: Sequence[DataProtoFuture]


class Begun:
    """A batch of step `step` whose generation has begun: `group_size` rows for each prompt.

    `take` calls the generation of what is left and returns the parts. They have scores if rewards run in processes of
    their own; others are scored when they are read. `greedy`: the greedy response to each prompt, if the advantage
    estimator compares with its score.
    """

    def __init__(
        self, step: int, take: Callable[[], tuple[DataProtoFuture, ...]], greedy: DataProtoFuture | None = None
    ) -> None:
        self.step, self.greedy, self._take = step, greedy, take

    @cached_property
    def parts(self) -> tuple[DataProtoFuture, ...]:
        """The parts of the batch; the first reading calls the generation."""
        return self._take()


class Generation(Protocol):
    """Generates `group_size` responses to each prompt, with the weights that the engines have when a batch begins."""

    def begin(self, prompts: DataProto) -> Ticket:
        """Begin a batch; `prompts` have `group_ids` and `meta_info[NOISE_KEY]`, which also names the batch."""
        ...

    def take(self, ticket: Ticket) -> tuple[DataProtoFuture, ...]:
        """Return the rows of a batch, once, in one part or several, with the columns of their prompts."""
        ...


def generation_of(config: Config, rollout: WorkerGroup) -> Generation:
    """Return the generation that a configuration asks for."""
    if config.trainer.stream:
        return StreamedBatches(rollout)
    return RunningBatches(config, rollout) if config.updates_in_flight else WholeBatches(config, rollout)


class WholeBatches:
    """Generates one batch after another."""

    def __init__(self, config: Config, rollout: WorkerGroup) -> None:
        self._config, self._rollout = config, rollout

    def begin(self, prompts: DataProto) -> Ticket:
        """Generate the responses."""
        return Ticket(prompts, [self._rollout.generate_sequences.remote(prompts)])

    def take(self, ticket: Ticket) -> tuple[DataProtoFuture, ...]:
        """Return the batch, in the order of its prompts."""
        (rollouts,) = ticket.begun
        return (response_rows(ticket.prompts, self._config, self._config.rollout.group_size).union(rollouts),)


class RunningBatches(WholeBatches):
    """Generates batches side by side: sequences of several run in an engine at a time."""

    def begin(self, prompts: DataProto) -> Ticket:
        """Begin in all engines, each with its share of the prompts."""
        return Ticket(prompts, [_begin(self._rollout, prompts)])

    def take(self, ticket: Ticket) -> tuple[DataProtoFuture, ...]:
        """Generate what is left of the batch, and return it in the order of its prompts."""
        (begun,) = ticket.begun
        return super().take(Ticket(ticket.prompts, [self._rollout.finish_sequences.remote(begun)]))


class StreamedBatches:
    """Generates batches in parts (trainer.stream): part j has the groups that finish as the j-th of each engine.

        engine 0     begin, next, next, next
        engine 1     begin, next, next, next

    All calls are queued at once: an engine does not wait for the controller between the parts.
    """

    def __init__(self, rollout: WorkerGroup) -> None:
        self._engines = rollout.replicas(ROLLOUT_MESH)

    def begin(self, prompts: DataProto) -> Ticket:
        """Begin in each engine, with equal numbers of prompts, in their order."""
        shares = np.array_split(np.arange(len(prompts)), len(self._engines))
        # An engine without prompts gets one too, since loading weights may need all ranks; nothing reads its responses.
        own = [prompts.select_idxs(rows.tolist() or [0]) for rows in shares]
        return Ticket(prompts, [_begin(engine, rows) for engine, rows in zip(self._engines, own, strict=True)])

    def take(self, ticket: Ticket) -> tuple[DataProtoFuture, ...]:
        """Return the parts: rows have the columns of the prompts, and the responses to a prompt are adjacent."""
        engines = min(len(self._engines), len(ticket.prompts))  # those with prompts of their own
        of_engines = [_parts(*each) for each in zip(self._engines, ticket.begun, strict=True)][:engines]
        together = [[part for part in parts if part is not None] for parts in zip_longest(*of_engines)]
        noise_key = _noise_key(ticket.prompts)
        return tuple(DataProtoFuture.concat(parts).with_meta_info(noise_key) for parts in together)


def _begin(engines: WorkerGroup, prompts: DataProto) -> DataProtoFuture:
    return engines.begin_sequences.remote(prompts).with_meta_info(_noise_key(prompts))


def _noise_key(prompts: DataProto) -> dict[str, Any]:
    return {NOISE_KEY: prompts.meta_info[NOISE_KEY]}


def _parts(engine: WorkerGroup, begun: DataProtoFuture) -> list[DataProtoFuture]:
    """Call the generation of the parts of an engine; it needs only the number of rows, and that they began."""
    return [engine.next_sequences.remote(begun.slice(0, size)) for size in streamed_part_sizes(len(begun))]


def streamed_part_sizes(num_groups: int) -> list[int]:
    """Return the number of groups in each part of an engine's groups: at least one, and fewer towards the end.

    The sizes fall about linearly. The groups that finish last are the longest, and nothing is generated while the ranks
    train on the last part, so that it should be small.
    """
    num_parts = min(MOST_STREAMED_PARTS, num_groups)
    # Sizes that fall linearly to 0 add up to x * (2 - x) at the share x of the parts; each part has one group more.
    ends = np.arange(num_parts + 1) / num_parts
    more = np.diff(np.rint((num_groups - num_parts) * ends * (2 - ends))).astype(int)
    return [1 + size for size in sorted(more.tolist(), reverse=True)]


def response_rows(prompts: DataProto, config: Config, group_size: int) -> DataProto:
    """Return a row for each row of the responses to the prompts, `group_size` for each; episodes have own prompts."""
    if config.environment.classes:
        tensors = sorted({*prompts.batch.keys()} - {"prompts", "prompt_mask"})
        prompts = prompts.select(tensors, sorted({*prompts.non_tensor_batch} - {"prompt_texts"}))
    return prompts.repeat(group_size * config.rows_per_episode, interleave=True)
