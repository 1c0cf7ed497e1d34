import pytest
import torch

from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.errors import DispatchError, FieldError
from hybridflow.protocol import DataProto


class Comparing(Worker):
    def __init__(self):
        self.received = []

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("group_ids", "x"), writes=("mean",), keep_groups="group_ids")
    def compare(self, batch):
        groups, x = batch.batch["group_ids"], batch.batch["x"]
        self.received.append(groups.tolist())
        means = torch.stack([x[groups == group].mean() for group in groups])
        return DataProto.from_dict({"mean": means})

    @register(Dispatch.ONE_TO_ALL)
    def last_received(self):
        return self.received[-1]


def batch_of(*group_ids):
    return DataProto.from_dict({"group_ids": torch.tensor(group_ids), "x": torch.arange(float(len(group_ids)))})


@pytest.fixture
def group():
    return WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Comparing))


def test_the_rows_of_a_group_stay_on_one_rank_and_padding_is_by_whole_groups(group):
    means = group.compare(batch_of(7, 7, 7, 8, 8, 8, 9, 9, 9)).batch["mean"]
    assert group.last_received() == [[7, 7, 7, 8, 8, 8], [9, 9, 9, 7, 7, 7]]
    assert means.tolist() == [1, 1, 1, 4, 4, 4, 7, 7, 7]


def test_a_future_is_read_for_its_groups_alone(group):
    future = group.compare.remote(batch_of(1, 1, 2, 2)).union(batch_of(1, 1, 2, 2))
    assert group.compare(future).batch["mean"].tolist() == [0.5, 0.5, 2.5, 2.5]


@pytest.mark.parametrize("group_ids", [(1, 1, 2), (1, 2, 1, 2)], ids=["of different size", "apart"])
def test_groups_that_cannot_be_kept_together_are_an_error(group, group_ids):
    with pytest.raises(DispatchError, match="needs groups of equal size whose rows follow each other"):
        group.compare(batch_of(*group_ids))


def test_a_batch_without_the_column_is_an_error(group):
    with pytest.raises(FieldError, match="keeps groups of 'group_ids' on one rank"):
        group.compare(DataProto.from_dict({"x": torch.zeros(4)}))


def test_a_mode_that_splits_nothing_keeps_no_groups():
    with pytest.raises(DispatchError, match="ONE_TO_ALL splits no batch"):
        register(Dispatch.ONE_TO_ALL, keep_groups="group_ids")
