"""Regression tests for known mistakes of the widely used implementation of this batch."""

import pickle
from itertools import chain

import numpy as np
import pytest
import torch

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol import DataProto, DataProtoConfig, DataProtoFuture, pad_dataproto_to_divisor, unpad_dataproto
from hybridflow.protocol.handle import HeldBatch

OPERATIONS = {
    "constructor": lambda data: DataProto(data.batch, data.non_tensor_batch, data.meta_info),
    "item": lambda data: data[0],
    "slice": lambda data: data[0:2],
    "select_idxs": lambda data: data[[0, 1]],
    "select": lambda data: data.select(),
    "select deep": lambda data: data.select(deepcopy=True),
    "rename": lambda data: data.rename("x", "y"),
    "union": lambda data: data.union(DataProto()),
    "union of empty": lambda data: DataProto().union(data),
    "concat": lambda data: DataProto.concat([data]),
    "chunk": lambda data: data.chunk(2)[1],
    "split": lambda data: data.split(1)[0],
    "repeat": lambda data: data.repeat(1),
    "sample_level_repeat": lambda data: data.sample_level_repeat([1, 1]),
    "reorder": lambda data: data.reorder([1, 0]),
    "to": lambda data: data.to("cpu"),
    "make_iterator": lambda data: next(data.make_iterator(1, 1)),
    "shuffled iterator": lambda data: next(data.make_iterator(1, 1, seed=3)),
    "pad": lambda data: pad_dataproto_to_divisor(data, 2)[0],
    "unpad": lambda data: unpad_dataproto(data, 0),
    "future": lambda data: DataProtoFuture(DataProto.concat, [HeldBatch(data)]).get(),
    "tensordict": lambda data: DataProto.from_tensordict(data.to_tensordict()),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_never_share_meta_info_or_dicts(name):
    data = DataProto.from_dict(
        {"x": torch.arange(2)}, {"o": ["a", "b"]}, {"list": [1], "dict": {"deep": [1]}, "tuple": ([1],)}
    )
    result = OPERATIONS[name](data)
    result.meta_info["new"] = 1
    result.meta_info["list"].append(2)
    result.meta_info["dict"]["deep"].append(2)
    result.meta_info["tuple"][0].append(2)
    result.non_tensor_batch["more"] = np.zeros(len(result.non_tensor_batch["o"]) if name != "item" else 1)
    result.batch["z"] = torch.zeros(result.batch.batch_size)
    assert data.meta_info == {"list": [1], "dict": {"deep": [1]}, "tuple": ([1],)}
    assert list(data.non_tensor_batch) == ["o"]
    assert list(data.batch.keys()) == ["x"]


def test_pop_does_not_share_meta_info_either():
    data = DataProto.from_dict({"x": torch.arange(2)}, meta_info={"a": [1], "b": 2})
    inner = data.meta_info["a"]
    data.pop(meta_info_keys="a").meta_info["a"].append(2)
    assert inner == [1]


def test_chunks_do_not_share_meta_info_with_each_other():
    first, second = DataProto.from_dict({"x": torch.arange(2)}, meta_info={"k": [1]}).chunk(2)
    first.meta_info["k"].append(2)
    assert second.meta_info == {"k": [1]}


def test_from_dict_does_not_write_into_the_callers_dicts():
    tensors, non_tensors, meta_info = {"x": torch.arange(2)}, {"o": ["a", "b"]}, {"k": [1]}
    data = DataProto.from_dict(tensors, non_tensors, meta_info, auto_padding=True)
    data.meta_info["k"].append(2)
    data.meta_info["new"] = 1
    data.batch["y"] = torch.zeros(2)
    assert list(tensors) == ["x"]
    assert non_tensors == {"o": ["a", "b"]}
    assert meta_info == {"k": [1]}


def test_padding_for_dispatch_does_not_change_the_callers_batch():
    data = DataProto.from_dict({"x": torch.arange(5), "row_ids": torch.arange(5)}, {"o": list("abcde")})
    padded, pad_size = pad_dataproto_to_divisor(data, 4)
    assert (len(padded), pad_size) == (8, 3)
    assert len(data) == 5
    assert data.batch["row_ids"].tolist() == [0, 1, 2, 3, 4]


def test_padding_of_a_non_blocking_call_is_removed_on_read():
    padded, pad_size = pad_dataproto_to_divisor(DataProto.from_dict({"x": torch.arange(5)}), 4)
    handles = [HeldBatch(part) for part in padded.chunk(4)]
    future = DataProtoFuture(DataProto.concat, handles, lambda data: unpad_dataproto(data, pad_size), num_rows=5)
    assert future.get().batch["x"].tolist() == [0, 1, 2, 3, 4]


def test_five_rows_in_four_chunks_are_2_1_1_1():
    data = DataProto.from_dict({"x": torch.arange(5)}, {"o": np.arange(5)}, auto_padding=True)
    parts = data.chunk(4)
    assert [part.batch["x"].tolist() for part in parts] == [[0, 1], [2], [3], [4]]
    assert [part.non_tensor_batch["o"].tolist() for part in parts] == [[0, 1], [2], [3], [4]]


def test_five_rows_in_four_chunks_with_padding_for_every_batch(monkeypatch):
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert [len(part) for part in DataProto.from_dict({"x": torch.arange(5)}).chunk(4)] == [2, 1, 1, 1]
    assert [len(part) for part in DataProto.from_dict({"x": torch.arange(2)}).chunk(4)] == [1, 1, 0, 0]


def test_concat_keeps_a_metric_that_only_some_parts_have():
    parts = [
        DataProto(meta_info={"metrics": {"loss": 1.0, "kl": 0.5}}),
        DataProto(meta_info={"metrics": {"loss": 2.0}}),
    ]
    assert DataProto.concat(parts).meta_info["metrics"] == {"loss": [1.0, 2.0], "kl": [0.5]}
    assert DataProto.concat(parts[::-1]).meta_info["metrics"] == {"loss": [2.0, 1.0], "kl": [0.5]}
    assert DataProto.concat([DataProto(), parts[1]]).meta_info["metrics"] == {"loss": [2.0]}


def test_concat_takes_any_iterable_of_batches():
    halves = DataProto.from_dict({"x": torch.arange(4)}).chunk(2)
    assert DataProto.concat(half for half in halves).batch["x"].tolist() == [0, 1, 2, 3]
    for wrong, name in ((halves[0], "DataProto"), (None, "NoneType"), ([halves[0], 3], "int")):
        with pytest.raises(BatchError, match=f"concat takes batches in a list or another iterable, got {name}; write"):
            DataProto.concat(wrong)
    with pytest.raises(BatchError, match="at least one batch"):
        DataProto.concat(iter(()))


def test_none_is_an_empty_container():
    assert DataProto(None, None, None).meta_info == {}
    assert DataProto(non_tensor_batch=None).non_tensor_batch == {}


def with_itself(value):
    items = [value]
    items.append(items)
    return items


def test_union_compares_objects_that_contain_themselves():
    def batch(value):
        return DataProto.from_dict(non_tensors={"o": [with_itself(value)]})

    assert len(batch(1).union(batch(1))) == 1
    with pytest.raises(FieldError, match="union: both batches have 'o' with different contents"):
        batch(1).union(batch(2))


def test_rename_onto_an_existing_column_is_an_error():
    data = DataProto.from_dict({"a": torch.zeros(1), "b": torch.ones(1)}, {"c": ["x"]})
    for existing in ("b", "c"):
        with pytest.raises(FieldError, match=rf"the batch already has \['{existing}'\]"):
            data.rename("a", existing)
    assert data.batch["b"].item() == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"tensors": {"x": torch.tensor([float("nan"), 1.0])}},
        lambda: {"tensors": {"x": torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16)}},
        lambda: {"non_tensors": {"x": np.array([float("nan"), 1.0])}},
        lambda: {"non_tensors": {"x": np.array([float("nan"), 1.0], dtype=np.float32)}},
        lambda: {"non_tensors": {"x": [float("nan"), "text"]}},
        lambda: {"non_tensors": {"x": [np.float32("nan"), None]}},
        lambda: {"non_tensors": {"x": [{"deep": [float("nan")]}, np.array([float("nan")])]}},
        lambda: {"meta_info": {"x": float("nan"), "y": [torch.tensor(float("nan"))]}},
    ],
)
def test_nan_equals_nan_in_every_union(make):
    DataProto.from_dict(**make()).union(DataProto.from_dict(**make()))
    DataProto.concat([DataProto.from_dict(**make()), DataProto.from_dict(**make())])


def test_make_iterator_with_a_seed_shuffles_reproducibly():
    data = DataProto.from_dict({"x": torch.arange(64)})
    orders = [
        [part.batch["x"].tolist() for part in data.make_iterator(mini_batch_size=16, epochs=2, seed=1)]
        for _ in range(2)
    ]
    assert orders[0] == orders[1]
    first, second = list(chain(*orders[0][:4])), list(chain(*orders[0][4:]))
    assert first != list(range(64))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(64))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (3, 0, 2)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool])
def test_batches_of_zero_rows_or_elements_serialize(shape, dtype, tmp_path):
    data = DataProto.from_dict({"x": torch.zeros(shape, dtype=dtype)}, {"o": [None] * shape[0], "n": np.zeros(shape)})
    data.save_to_disk(tmp_path / "batch")
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    copies = [pickle.loads(pickle.dumps(data)), pickle.loads(stream, buffers=buffers)]
    for copy in [*copies, DataProto.load_from_disk(tmp_path / "batch")]:
        assert copy.batch["x"].shape == shape
        assert copy.batch["x"].dtype == dtype
        assert copy.non_tensor_batch["o"].shape == shape[:1]
        assert copy.non_tensor_batch["n"].shape == shape


def test_arrays_of_different_lengths_are_rejected():
    with pytest.raises(BatchError, match=r"a \(2,\), b \(3,\)"):
        DataProto(non_tensor_batch={"a": np.zeros(2), "b": np.zeros(3)})
    with pytest.raises(BatchError, match=r"a \(2,\), b \(3,\)"):
        DataProto.from_dict(non_tensors={"a": [1, 2], "b": [1, 2, 3]})
