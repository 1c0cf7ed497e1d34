"""Generation of batches that begin, run side by side, and are read in parts or as a whole."""

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

from hybridflow.config import Config
from hybridflow.controller import Dispatch, register
from hybridflow.protocol import DataProto
from hybridflow.runtime import free_device_memory, own_device
from hybridflow.workers.begun_batches import BegunBatches
from hybridflow.workers.generating import (
    DATASET_COLUMNS,
    ROLLOUT_COLUMNS,
    TO_ENGINES,
    GeneratingWorker,
    noise_key,
)


def begun_columns(config: Config) -> tuple[str, ...]:
    """Return the columns of prompts that come back with the responses of a batch that is read in parts."""
    scheduled = ("expected_lengths", "engine_ids") if config.rollout.schedule == "expected" else ()
    return (*DATASET_COLUMNS, "group_ids", *scheduled)


class PartwiseGeneratingWorker(GeneratingWorker):
    """A base class of workers whose batches begin before they are read."""

    @register(TO_ENGINES, reads=begun_columns, writes=("group_ids",))
    def begin_sequences(self, prompts: DataProto) -> DataProto:
        """Begin to generate `rollout.group_size` responses for each prompt; return the `group_ids`.

        `next_sequences` and `finish_sequences` return the responses.
        """
        self._begun.begin(noise_key(prompts), prompts, self.requests_of(prompts, self.config.rollout))
        return prompts.select(["group_ids"], [])

    @register(
        TO_ENGINES,
        reads=("group_ids",),
        writes=lambda config: (*ROLLOUT_COLUMNS, *begun_columns(config)),
        rows=lambda config: config.rollout.group_size,
    )
    def next_sequences(self, places: DataProto) -> DataProto:
        """Return those prompts that finish next, each with its responses: as many prompts as `places` has rows.

        `places`: any rows of a batch that has begun. The `group_ids` of the result name its prompts.
        """
        with self.generating():
            prompts, completions = self._begun.next(noise_key(places), len(places))
        rows = self.rollouts_of(prompts, completions, self.config.rollout.group_size)
        return prompts.select(meta_info_keys=()).repeat(self.config.rollout.group_size, interleave=True).union(rows)

    @register(Dispatch.ONE_TO_ALL)
    def free_cache_bytes(self) -> int:
        """Return the memory that keys and values may take now, in bytes; 0 on a CPU without rollout.kv_cache_bytes."""
        rollout, device = self.config.rollout, own_device()
        if rollout.kv_cache_bytes or device.type != "cuda":
            return rollout.kv_cache_bytes
        return int(rollout.gpu_memory_utilization * free_device_memory(device))

    @register(
        TO_ENGINES,
        reads=("group_ids",),
        writes=ROLLOUT_COLUMNS,
        rows=lambda config: config.rollout.group_size,
    )
    def finish_sequences(self, begun: DataProto) -> DataProto:
        """Return the responses to all prompts of a batch that has begun, in order.

        `begun`: the result of `begin_sequences`, with the same `meta_info["noise_key"]`.
        """
        with self.generating():
            prompts, completions = self._begun.rest(noise_key(begun))
        return self.rollouts_of(prompts, completions, self.config.rollout.group_size)

    @register(Dispatch.ONE_TO_ALL)
    def abandon_step(self) -> None:
        """Discard what an unfinished step has left: batches that have begun, and a weight sync."""
        self._begun.abandon()
        self.rollout.abandon_loading()
        super().abandon_step()

    def generating(self) -> AbstractContextManager[None]:
        """Return a context in which begun batches take steps; it does nothing here."""
        return nullcontext()

    def between_steps(self) -> None:
        """Do what must be done between two steps of begun batches; nothing here."""

    @cached_property
    def _begun(self) -> BegunBatches:
        return BegunBatches(self.rollout, self.ready_to_generate, self.between_steps)
