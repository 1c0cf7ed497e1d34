"""Batches that have begun: their order, their waits and their files in a checkpoint."""

from types import SimpleNamespace

import pytest
import torch

from hybridflow.errors import CheckpointError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers import ahead as module
from hybridflow.trainers.ahead import Ahead, describe_pending, save_pending
from hybridflow.trainers.begun import Begun, in_order_of_groups


def batch(value):
    return DataProtoFuture.of(DataProto.from_dict({"values": torch.tensor([value])}))


def value_of(parts):
    (part,) = parts
    return int(part.get("values").batch["values"])


def ahead(lag, total_steps):
    """Return `Ahead` of a sampling that records its calls, and the calls."""
    calls = []
    sampling = SimpleNamespace(
        begin=lambda prompts, step: calls.append(("begin", prompts, step)) or Begun(step, (batch(step),)),
        score=lambda begun: calls.append(("score", begun.step)) or begun.parts,
    )
    return Ahead(sampling, lag, total_steps), calls  # pyright: ignore[reportArgumentType]


def test_each_batch_begins_once_in_order_and_lag_steps_early():
    sample, calls = ahead(2, total_steps=4)
    prompts, lengths = iter("abcdef"), []
    for step in range(4):
        assert value_of(sample(lambda: next(prompts), step)) == step
        lengths.append(sample.metrics["sampling/queue_length"])
    assert lengths == [2, 2, 1, 0]
    assert calls == [
        *(("begin", "a", 0), ("begin", "b", 1), ("begin", "c", 2), ("score", 0)),
        *(("begin", "d", 3), ("score", 1), ("score", 2), ("score", 3)),
    ]
    assert sample.pending() == []
    assert next(prompts) == "e"


def test_restored_batches_are_the_saved_ones(tmp_path):
    sample, _ = ahead(2, total_steps=9)
    sample(lambda: None, 0)
    save_pending(sample.pending(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"batch_00000{n}.safetensors" for n in (1, 2)]
    restored, calls = ahead(2, total_steps=9)
    restored.restore(SimpleNamespace(directory=tmp_path), describe_pending(sample.pending()))
    assert value_of(restored(lambda: "p", 1)) == 1
    assert calls == [("begin", "p", 3), ("score", 1)]
    with pytest.raises(CheckpointError, match=r"a batch that has begun is not saved: .*absent/batch_000001"):
        save_pending(sample.pending(), tmp_path / "absent")


@pytest.mark.parametrize(("ended", "waited"), [(7.5, {"timing_s/queue_wait": 2.5}), (11.0, {"timing_s/queue_wait": 0})])
def test_a_batch_waits_from_the_end_of_its_generation(monkeypatch, ended, waited):
    sample, _ = ahead(1, total_steps=4)
    sample(lambda: None, 0)
    assert sample.take_wait() == {}  # no call of the first batch is known
    sample.pending()[0].parts[0].handles()[0].duration.note(6.0, ended)
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 10.0))
    sample(lambda: None, 1)
    assert sample.take_wait() == waited


def test_rows_that_were_read_in_parts_are_sorted_by_group_and_then_by_id():
    columns = {"group_ids": torch.tensor([1, 0, 1, 0]), "row_ids": torch.tensor([3, 5, 2, 4])}
    assert in_order_of_groups(DataProtoFuture.of(DataProto.from_dict(columns))).tolist() == [3, 1, 2, 0]
