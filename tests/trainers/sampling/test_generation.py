"""Generation in parts on several engines: which groups are in a part, and the order of the calls."""

import numpy as np
import pytest
import torch

from hybridflow.config import load_config
from hybridflow.controller import ClassWithInitArgs, ResourcePool, WorkerGroup
from hybridflow.controller.placeholder import PlaceholderBackend, synthetic_batch
from hybridflow.protocol import DataProto
from hybridflow.trainers.sampling.generation import MOST_STREAMED_PARTS, StreamedBatches, streamed_part_sizes
from hybridflow.workers import RolloutWorker
from hybridflow.workers.generating import DATASET_COLUMNS


def generate(num_prompts, num_engines):
    """Return parts of prompts on engines, and the calls; placeholders end in order."""
    backend = PlaceholderBackend()
    group = WorkerGroup(
        ResourcePool([num_engines]),
        ClassWithInitArgs(RolloutWorker, config=load_config(None, ["rollout.group_size=2"])),
        backend,
        meshes={"rollout": {"data": num_engines, "tensor": 1}},
    )
    columns = {"group_ids": torch.arange(num_prompts)}
    prompts = synthetic_batch(DATASET_COLUMNS, num_prompts).union(DataProto.from_dict(columns))
    prompts.meta_info = {"noise_key": [0, 0, 5]}
    generation = StreamedBatches(group)
    parts = generation.take(generation.begin(prompts))
    return parts, [(event.worker, event.method) for event in backend.trace.take() if event.kind == "call"]


@pytest.mark.parametrize(
    ("num_prompts", "num_engines", "sizes"),
    [
        (16, 1, [3, 3, 2, 2, 2, 2, 1, 1]),
        (20, 2, [4, 4] + [2] * 6),
        (7, 2, [2, 2, 2, 1]),
        (2, 2, [2]),
        (3, 4, [3]),
        (1, 1, [1]),
    ],
)
def test_a_part_joins_the_parts_of_all_engines(num_prompts, num_engines, sizes):
    parts, _ = generate(num_prompts, num_engines)
    assert [len(part) for part in parts] == [2 * size for size in sizes]
    assert len(parts) <= MOST_STREAMED_PARTS
    assert {tuple(part.get("group_ids").meta_info["noise_key"]) for part in parts} == {(0, 0, 5)}


def test_parts_shrink_towards_the_end():
    assert streamed_part_sizes(8) == [1] * 8
    assert streamed_part_sizes(32) == [7, 6, 5, 4, 4, 3, 2, 1]
    for num_groups in range(1, 300):
        sizes = streamed_part_sizes(num_groups)
        assert (sum(sizes), len(sizes)) == (num_groups, min(8, num_groups))
        assert sizes == sorted(sizes, reverse=True)
        assert min(sizes) >= 1


def test_all_calls_of_an_engine_are_queued_at_once():
    _, calls = generate(5, 2)
    for worker, count in (("RolloutWorker/0", 3), ("RolloutWorker/1", 2)):
        assert [m for w, m in calls if w == worker] == ["begin_sequences", *["next_sequences"] * count]


def test_an_engine_without_prompts_takes_part_but_its_rows_are_not_read():
    parts, calls = generate(1, 3)
    assert [method for _, method in calls] == ["begin_sequences"] * 3 + ["next_sequences"] * 3
    assert [len(part) for part in parts] == [2]
    assert parts[0].get("group_ids").batch["group_ids"].tolist() == [0, 0]
    assert isinstance(parts[0].get("ground_truths").non_tensor_batch["ground_truths"], np.ndarray)
