import pytest
import torch

from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.stage_calls import StageCalls


class Echo(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, writes=("x",))
    def generate_sequences(self, batch):
        return batch


@pytest.fixture
def group():
    return WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Echo))


def test_every_call_returns_a_future(group):
    future = StageCalls(group).generate_sequences(DataProto.from_dict({"x": torch.tensor([1, 2])}))
    assert isinstance(future, DataProtoFuture)
    assert future.get("x").batch["x"].tolist() == [1, 2]


def test_a_method_that_does_not_exist_is_the_groups_own_error(group):
    with pytest.raises(AttributeError, match="has no method 'compute_values'"):
        StageCalls(group).compute_values()
