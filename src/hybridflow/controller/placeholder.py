"""`PlaceholderBackend`: workers that compute nothing.

A call checks its arguments and returns synthetic columns, with the shapes and types of the glossary. A program can be
run, and its dataflow inspected, before a device is used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hybridflow.controller.backend import CallTerms, PerRank, WorkerRef
from hybridflow.controller.class_with_init_args import ClassWithInitArgs
from hybridflow.controller.columns import sources_of
from hybridflow.controller.local import LocalBackend, LocalHandle, LocalWorker
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker_side import checked_output
from hybridflow.errors import FieldError
from hybridflow.protocol import FIELDS, DataProto, DataProtoFuture
from hybridflow.protocol.future import change_each
from hybridflow.runtime.observe import TraceEvent

PROMPT_LEN, RESPONSE_LEN = 2, 3
"""Prompt and response length of synthetic columns, in tokens."""

_LENGTHS = {
    "prompt_len": PROMPT_LEN,
    "response_len": RESPONSE_LEN,
    "response_len|1": RESPONSE_LEN,
    "seq_len": PROMPT_LEN + RESPONSE_LEN,
}
_DICTIONARIES = ("extra_infos", "reward_extras")


class PlaceholderBackend(LocalBackend):
    """A backend that runs no worker. `lengths`: sizes of axes that the glossary does not fix, by axis name."""

    def __init__(self, lengths: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self._lengths = lengths or {}
        self._outputs: dict[tuple[str, int], DataProto] = {}

    def spawn(
        self, classes: Mapping[str, ClassWithInitArgs], resource_pool: ResourcePool
    ) -> dict[str, list[LocalWorker]]:
        """Return a worker for each rank of each class, with the class in place of an object of it."""
        ranks = range(resource_pool.world_size)
        spawned = {name: [LocalWorker(f"{name}/{rank}", name, rank, {}) for rank in ranks] for name in classes}
        for name, workers in spawned.items():
            for worker in workers:
                worker.instance = classes[name].cls
        return spawned

    def call_all(
        self, workers: Sequence[WorkerRef], method_name: str, per_rank: PerRank, terms: Sequence[CallTerms]
    ) -> list[LocalHandle]:
        """Return synthetic outputs; the arguments are not read, as their columns are known."""
        handles = []
        for worker, (args, kwargs), own_terms in zip(workers, per_rank, terms, strict=True):
            assert isinstance(worker, LocalWorker)
            where = f"{worker.instance.__name__}.{method_name}"
            given = (*args, *kwargs.values())
            values = [change_each(value, DataProtoFuture, DataProtoFuture.narrow) for value in given]
            output = self._output(where, own_terms, values, worker.rank)
            self.trace.record(TraceEvent("call", where, worker.name, "", 0.0, 0.0, sources=sources_of(values)))
            handles.append(LocalHandle(output, where, self.trace))
        return handles

    def _output(self, where: str, terms: CallTerms, values: Sequence[Any], rank: int) -> DataProto | None:
        """Return synthetic columns; the ranks of a call share them, as readers get private copies."""
        values = [value.get() if isinstance(value, LocalHandle) else value for value in values]
        batches = [value for value in values if isinstance(value, DataProto | DataProtoFuture)]
        if not batches or terms.columns is None:
            return None
        if terms.columns.writes is None:
            raise FieldError(
                f"{where} does not declare the columns it returns, so no synthetic output can be made; add "
                f"writes=(...) to its @register."
            )
        factor = terms.columns.rows_per_row
        num_rows = 1 if factor is None else factor * (terms.num_rows or len(batches[0]))
        num_rows *= bool(terms.columns.writes)
        kept = [name for name in terms.columns.writes if factor and name in (terms.columns.reads or ())]
        if kept:  # such as ids that name the rows
            read = DataProtoFuture.of(batches[0]).get(kept).select(meta_info_keys=()).repeat(factor, interleave=True)
            others = [name for name in terms.columns.writes if name not in kept]
            return synthetic_batch(others, num_rows, self._lengths).union(read) if terms.is_read else None
        if (where, num_rows) not in self._outputs:
            output = synthetic_batch(terms.columns.writes, num_rows, self._lengths)
            self._outputs[where, num_rows] = checked_output(output, replace(terms, is_read=True), rank)
        return self._outputs[where, num_rows] if terms.is_read else None


def synthetic_batch(columns: Sequence[str], num_rows: int, lengths: Mapping[str, int] | None = None) -> DataProto:
    """Return rows with the named columns, in the shapes and types of the glossary.

    A column that the glossary lacks gets one float32 number per row. `lengths`: sizes of axes, by axis name.
    """
    tensors, arrays = {}, {}
    lengths = {**_LENGTHS, **(lengths or {})}
    for name in columns:
        field = FIELDS.get(name)
        if field is not None and not field.is_tensor:
            arrays[name] = np.empty(num_rows, dtype=object)
            arrays[name][:] = [{} if name in _DICTIONARIES else "" for _ in range(num_rows)]
            continue
        shape = [num_rows, *(lengths[axis] for axis in (field.shape[1:] if field else ()))]
        dtype: Any = field.dtype if field else torch.float32
        rows = torch.arange(1, num_rows + 1).reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
        tensors[name] = torch.ones(shape, dtype=dtype) if "mask" in name else rows.to(dtype).clone()
    return DataProto.from_dict(tensors, arrays, {"metrics": {}})
