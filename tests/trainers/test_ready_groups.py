"""Batches of the groups that finish next (issue 43 removes them): calls of each engine, their bias, any order."""

import pytest
import torch

from hybridflow.config import load_config
from hybridflow.controller import ClassWithInitArgs, ResourcePool, WorkerGroup
from hybridflow.controller.placeholder import PlaceholderBackend, synthetic_batch
from hybridflow.protocol import DataProto
from hybridflow.trainers.length_bias import LengthBias
from hybridflow.trainers.ready_groups import ReadyGroups
from hybridflow.trainers.stages import with_group_ids
from hybridflow.workers import InFlightRolloutWorker
from hybridflow.workers.generating import DATASET_COLUMNS

pytestmark = pytest.mark.exhaustive
GROUP_SIZE = 2


def config_of(batch_size, lag=2):
    """Return a configuration with order "ready"."""
    return load_config(
        None,
        [
            *("rollout.order=ready", "rollout.on_new_weights=retract", "trainer.deterministic=false"),
            *("algorithm.rollout_weights=token", "controller.backend=ray", "placement.roles.rollout=generate"),
            *("placement.pools={learn=[1],generate=[1]}", f"rollout.group_size={GROUP_SIZE}", f"trainer.lag={lag}"),
            f"data.train_batch_size={batch_size}",
        ],
    )


@pytest.mark.parametrize(
    ("num_prompts", "num_engines", "sizes"), [(6, 1, [6]), (6, 2, [3, 3]), (7, 3, [3, 2, 2]), (2, 3, [1, 1])]
)
def test_each_engine_gives_a_batch_as_many_groups_as_it_began(num_prompts, num_engines, sizes):
    backend = PlaceholderBackend()
    group = WorkerGroup(
        ResourcePool([num_engines]),
        ClassWithInitArgs(InFlightRolloutWorker, config=config_of(num_prompts)),
        backend,
        meshes={"rollout": {"data": num_engines, "tensor": 1}},
    )
    prompts = with_group_ids(synthetic_batch(DATASET_COLUMNS, num_prompts))
    prompts.meta_info = {"noise_key": [0, 0, 5]}
    finish = ReadyGroups(group).begin(prompts)
    calls = [(event.worker, event.method) for event in backend.trace.take() if event.kind == "call"]
    workers = [f"InFlightRolloutWorker/{rank}" for rank in range(len(sizes))]
    assert calls == [(worker, "begin_sequences") for worker in workers]
    (part,) = finish()
    calls = [(event.worker, event.method) for event in backend.trace.take() if event.kind == "call"]
    assert calls == [(worker, "next_ready_sequences") for worker in workers]
    assert [len(rows) for rows in (handle.get() for handle in part.handles())] == [GROUP_SIZE * n for n in sizes]
    assert part.meta_info["noise_key"] == [0, 0, 5]


def test_batches_trained_on_are_compared_with_those_that_began():
    def trained(*groups):
        ids = torch.tensor([group for group, _ in groups]).repeat_interleave(2)
        lengths = torch.tensor([length for _, of_group in groups for length in of_group])
        return DataProto.from_dict({"group_ids": ids, "response_mask": torch.arange(20) < lengths[:, None]})

    # Batches 0, 1 and 2 begin with the groups 0 and 1, 2 and 3, 4 and 5; group 1 is long.
    bias, restored = LengthBias(config_of(2, lag=1)), LengthBias(config_of(2, lag=1))
    assert bias.note(trained((0, (2, 4)), (2, (3, 3))), 0) == {"ready/late_share": 0.0}
    restored.load_state_dict(bias.state_dict())
    for each in (bias, restored):
        assert each.note(trained((3, (5, 5)), (4, (1, 3))), 1) == {"ready/late_share": 0.0}
        assert each.note(trained((5, (6, 6)), (1, (20, 12))), 2) == {
            "ready/late_share": 0.5,
            "ready/compared_batches": 1,
            "ready/length_trained": 12 / 4,
            "ready/length_begun": 38 / 4,
            "ready/tokens_behind": 26,
        }
