"""Which rollout engine generates which prompts, and in which order (`rollout.schedule`).

past lengths ──expected lengths──> assignment ──rows of each engine──> calls ──rows in the order of prompts
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hybridflow.algorithms import imbalance
from hybridflow.config import Config
from hybridflow.controller import WorkerGroup
from hybridflow.controller.part_sizes import MeasuredParts
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.length_history import LengthHistory, prompt_keys
from hybridflow.trainers.prompt_assignment import assign_prompts, expected_tokens, prefix_families
from hybridflow.trainers.reading import Batch, read
from hybridflow.workers.generating import ROLLOUT_MESH

_PROMPTS = ("prompts", "prompt_mask", "data_sources")


class GenerationSchedule:
    """The split of batches of prompts over the rollout engines of a group.

    With `rollout.schedule = "expected"` it learns from each batch how long the responses to each prompt are. As long as
    nothing is known, for fewer prompts than engines, and with "even", the group's own split is used.
    """

    def __init__(self, config: Config, rollout: WorkerGroup) -> None:
        self._config, self._rollout = config, rollout
        self._history = LengthHistory() if config.rollout.schedule == "expected" else None
        self._capacities: list[float] = []
        self._shares: MeasuredParts | None = None
        self._loads: list[float] = []

    def generate(self, prompts: DataProto, engines: Sequence[Sequence[int]]) -> DataProtoFuture:
        """Begin to generate with the rows of each engine by `scheduled`; return rollouts in the order of prompts."""
        if not engines:
            return self._rollout.generate_sequences.remote(prompts)
        parts = zip(self.engines, engines, strict=True)
        rollouts = [engine.generate_sequences.remote(prompts.select_idxs(rows)) for engine, rows in parts]
        if self._shares is not None:
            self._shares.note(self._loads, [[handle.duration for handle in made.handles()] for made in rollouts])
        return self._in_order(rollouts, engines)

    def begin(self, prompts: DataProto, engines: Sequence[Sequence[int]]) -> Callable[[], DataProtoFuture]:
        """Begin a batch with the rows of each engine; return a function that calls the generation of its rollouts."""
        of_engines = [prompts.select_idxs(rows) for rows in engines] or [prompts]
        workers, key = self.engines if engines else [self._rollout], {"noise_key": prompts.meta_info["noise_key"]}
        parts = zip(workers, of_engines, strict=True)
        begun = [(each, each.begin_sequences.remote(rows).with_meta_info(key)) for each, rows in parts]
        return lambda: self._in_order([each.finish_sequences.remote(rows) for each, rows in begun], engines)

    def _in_order(self, rollouts: Sequence[DataProtoFuture], engines: Sequence[Sequence[int]]) -> DataProtoFuture:
        """Return the rollouts of the engines in the order of prompts."""
        if not engines:
            return rollouts[0]
        size = self._config.rollout.group_size
        groups = np.argsort(np.concatenate(engines))  # where each prompt's group is
        rows = (groups[:, None] * size + np.arange(size)).ravel()
        return DataProtoFuture.concat(rollouts).select_rows(rows)

    def scheduled(self, prompts: DataProto) -> tuple[DataProto, list[list[int]]]:
        """Return the prompts with the schedule's columns, and the rows of each engine.

        No rows: split the batch evenly, in its order. The columns are `expected_lengths` and `engine_ids` (-1: none).
        """
        if self._history is None:
            return prompts, []
        sources = prompts.non_tensor_batch["data_sources"].tolist()
        keys = prompt_keys(prompts.batch["prompts"], prompts.batch["prompt_mask"], sources)
        expected = self._history.expected(keys, sources)
        prompts = prompts.union(DataProto.from_dict({"expected_lengths": torch.tensor(expected, dtype=torch.float32)}))
        if not self._history or not 1 < len(self.engines) <= len(prompts):
            return prompts.union(DataProto.from_dict({"engine_ids": torch.full((len(prompts),), -1)})), []
        mask = prompts.batch["prompt_mask"].bool()
        tokens = [ids[own].tolist() for ids, own in zip(prompts.batch["prompts"], mask, strict=True)]
        costs = expected_tokens(mask.sum(-1).numpy(), expected, self._config.rollout.group_size)
        engines = assign_prompts(costs.tolist(), prefix_families(tokens), self._read_capacities())
        self._loads = [float(costs[rows].sum()) for rows in engines]
        return prompts.union(DataProto.from_dict({"engine_ids": _engine_ids(engines)})), engines

    def note(self, batch: Batch) -> dict[str, float]:
        """Learn the response lengths of a batch with responses; return the metrics `schedule/...`."""
        if self._history is None:
            return {}
        columns = DataProtoFuture.of(batch).columns or ()
        scheduled = [name for name in ("engine_ids", "expected_lengths") if name in columns]
        data = read(batch, [*_PROMPTS, "group_ids", "response_mask", *scheduled])
        groups, first, group_of = np.unique(data.batch["group_ids"].numpy(), return_index=True, return_inverse=True)
        tokens = data.batch["response_mask"].sum(-1).numpy()
        lengths = np.bincount(group_of, weights=tokens) / np.bincount(group_of)
        prompts = data.select_idxs(first)
        sources = prompts.non_tensor_batch["data_sources"].tolist()
        keys = prompt_keys(prompts.batch["prompts"], prompts.batch["prompt_mask"], sources)
        self._history.note(keys, sources, lengths.tolist())
        metrics = {}
        if "expected_lengths" in scheduled and (expected := prompts.batch["expected_lengths"].numpy()).all():
            metrics["schedule/length_error"] = float(np.abs(expected - lengths).mean() / lengths.mean())
        if "engine_ids" in scheduled and (engine_ids := prompts.batch["engine_ids"].numpy()).min() >= 0:
            size = self._config.rollout.group_size
            costs = expected_tokens(prompts.batch["prompt_mask"].sum(-1).numpy(), lengths, size).tolist()
            num_engines = int(engine_ids.max()) + 1
            as_scheduled = [np.flatnonzero(engine_ids == engine) for engine in range(num_engines)]
            even = np.array_split(np.arange(len(groups)), num_engines)
            metrics["schedule/imbalance_even"] = imbalance(costs, [rows.tolist() for rows in even])
            metrics["schedule/imbalance"] = imbalance(costs, [rows.tolist() for rows in as_scheduled])
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; empty with "even"."""
        if self._history is None:
            return {}
        return {"lengths": self._history.state_dict(), "capacities": list(self._capacities)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; one that was saved with "even" has no lengths. Raises CheckpointError."""
        if self._history is not None and "lengths" in state:
            self._history.load_state_dict(state["lengths"])
            self._capacities = list(state["capacities"])

    @cached_property
    def engines(self) -> Sequence[WorkerGroup]:
        """The workers of each rollout engine."""
        return self._rollout.replicas(ROLLOUT_MESH)

    def _read_capacities(self) -> list[float]:
        """Return the capacity of each engine for load.

        It is the memory for keys and values, read once; if parts are measured, the speed of the engine; equal if the
        run is deterministic.
        """
        if self._config.controller.parts == "measured":
            self._shares = self._shares or MeasuredParts(len(self.engines))
            if self._shares.update():
                self._rollout.shares.record("generate_sequences", self._shares.shares)
            return self._shares.shares.values
        if len(self._capacities) != len(self.engines):  # none yet, or those of a checkpoint with other engines
            self._capacities = [1.0] * len(self.engines)
            if not self._config.trainer.deterministic:
                free = [float(min(engine.free_cache_bytes())) for engine in self.engines]
                self._capacities = free if min(free) > 0 else self._capacities
        return self._capacities


def _engine_ids(engines: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the number of the engine (prompts,) of each prompt."""
    ids = torch.zeros(sum(map(len, engines)), dtype=torch.int64)
    for engine, rows in enumerate(engines):
        ids[rows] = engine
    return ids
