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


@pytest.mark.parametrize(("auto_padding", "copies"), [(False, []), (True, [7, 7, 7])])
def test_groups_stay_on_one_rank_and_padding_adds_whole_groups(group, auto_padding, copies):
    batch = batch_of(7, 7, 7, 8, 8, 8, 9, 9, 9)
    batch.auto_padding = auto_padding
    assert group.compare(batch).batch["mean"].tolist() == [1, 1, 1, 4, 4, 4, 7, 7, 7]
    assert group.last_received() == [[7, 7, 7, 8, 8, 8], [9, 9, 9, *copies]]


def test_only_the_group_column_of_a_future_is_read(group):
    future = group.compare.remote(batch_of(1, 1, 2, 2)).union(batch_of(1, 1, 2, 2))
    assert group.compare(future).batch["mean"].tolist() == [0.5, 0.5, 2.5, 2.5]


@pytest.mark.parametrize("group_ids", [(1, 1, 2), (1, 2, 1, 2)], ids=["of different size", "apart"])
def test_uneven_or_scattered_groups_are_an_error(group, group_ids):
    with pytest.raises(DispatchError, match="requires groups of equal size with adjacent rows"):
        group.compare(batch_of(*group_ids))


def test_a_batch_without_the_column_is_an_error(group):
    with pytest.raises(FieldError, match="keeps groups of 'group_ids' on one rank"):
        group.compare(DataProto.from_dict({"x": torch.zeros(4)}))
