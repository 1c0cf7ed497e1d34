"""Batches that have begun: their order, their waits and their files in a checkpoint."""

from types import SimpleNamespace

import pytest
import torch

from hybridflow.errors import CheckpointError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.sampling import ahead as module
from hybridflow.trainers.sampling.ahead import Ahead, save_pending
from hybridflow.trainers.sampling.generation import Begun
from hybridflow.trainers.sampling.sampled import in_order_of_groups


@pytest.fixture
def sample():
    """Return `Ahead` of a sampling with batches of one number, with a lag of 1, after its first step."""

    def begin(prompts, step):
        rows = DataProtoFuture.of(DataProto.from_dict({"values": torch.tensor([step])}))
        return Begun(step, lambda: (rows,))

    sampling = SimpleNamespace(begin=begin, finish=lambda begun, _: begun.parts, metrics={})
    ahead = Ahead(sampling, 1, total_steps=4)  # pyright: ignore[reportArgumentType]
    ahead(lambda: None, 0)
    return ahead


def test_a_batch_that_cannot_be_saved_is_an_error(sample, tmp_path):
    with pytest.raises(CheckpointError, match=r"a batch that has begun is not saved: .*absent/batch_000001"):
        save_pending(sample.pending(), tmp_path / "absent")


@pytest.mark.parametrize(("ended", "waited"), [(7.5, {"timing_s/queue_wait": 2.5}), (11.0, {"timing_s/queue_wait": 0})])
def test_a_batch_waits_from_the_end_of_its_generation(sample, monkeypatch, ended, waited):
    assert sample.take_wait() == {}  # no call of the first batch is known
    sample.pending()[0].parts[0].handles()[0].duration.note(6.0, ended)
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 10.0))
    sample(lambda: None, 1)
    assert sample.take_wait() == waited


def test_rows_that_were_read_in_parts_are_sorted_by_group_and_then_by_id():
    columns = {"group_ids": torch.tensor([1, 0, 1, 0]), "row_ids": torch.tensor([3, 5, 2, 4])}
    values = {"values": torch.tensor([0, 1, 2, 3])}
    sorted_rows = in_order_of_groups(DataProtoFuture.of(DataProto.from_dict(columns | values)))
    assert sorted_rows.get().batch["values"].tolist() == [3, 1, 2, 0]
    assert sorted(sorted_rows.columns or ()) == ["group_ids", "values"]
