import copy
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol import DataProto, DataProtoItem


def wrong(value: Any) -> Any:
    """Return a value of a type that the signature does not allow, without a type error."""
    return value


def batch_of_three() -> DataProto:
    return DataProto.from_dict(
        tensors={"input_ids": torch.tensor([[1, 2], [3, 4], [5, 6]]), "scores": torch.tensor([0.5, 1.5, 2.5])},
        non_tensors={"raw_prompts": ["a", "b", "c"]},
        meta_info={"epoch": 7},
    )


def test_from_dict_takes_tensors_arrays_and_lists():
    data = batch_of_three()
    assert len(data) == 3
    assert data.batch.batch_size == torch.Size([3])
    assert data.non_tensor_batch["raw_prompts"].dtype == object
    assert data.meta_info == {"epoch": 7}


def test_list_of_lists_becomes_one_entry_per_row():
    data = DataProto.from_dict(non_tensors={"pairs": [[1, 2], [3, 4], [5, 6]]})
    assert data.non_tensor_batch["pairs"].shape == (3,)
    assert data.non_tensor_batch["pairs"][1] == [3, 4]


def test_from_single_dict_sorts_by_type():
    data = DataProto.from_single_dict({"a": torch.zeros(2, 3), "b": np.array(["x", "y"], dtype=object)}, {"k": 1})
    assert list(data.batch.keys()) == ["a"]
    assert list(data.non_tensor_batch) == ["b"]
    assert data.meta_info == {"k": 1}
    with pytest.raises(FieldError, match="'c': 'list'"):
        DataProto.from_single_dict({"c": [1, 2]})


def test_batch_may_lack_tensors_arrays_or_all_columns():
    assert len(DataProto()) == 0
    assert len(DataProto(meta_info={"metrics": {"loss": 1.0}})) == 0
    only_arrays = DataProto.from_dict(non_tensors={"x": np.arange(4)})
    assert only_arrays.batch is None
    assert [len(part) for part in only_arrays.chunk(2)] == [2, 2]
    assert only_arrays.repeat(2).non_tensor_batch["x"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    only_tensors = DataProto.from_dict({"x": torch.arange(4)})
    assert only_tensors.select_idxs([3, 0]).batch["x"].tolist() == [3, 0]
    assert [len(part) for part in DataProto(meta_info={"k": 1}).chunk(2)] == [0, 0]


def test_unequal_numbers_of_rows_raise_with_columns_and_shapes():
    with pytest.raises(BatchError, match=r"x \(3, 1\).*y \(2,\)"):
        DataProto.from_dict({"x": torch.zeros(3, 1)}, {"y": np.zeros(2)})
    with pytest.raises(BatchError, match=r"'x': \(3,\), 'y': \(2,\)"):
        DataProto.from_dict({"x": torch.zeros(3), "y": torch.zeros(2)})
    with pytest.raises(BatchError, match="same number of rows"):
        DataProto.from_dict(non_tensors={"x": [1, 2], "y": [1]})


def test_batch_needs_exactly_one_batch_dimension():
    with pytest.raises(BatchError, match="exactly one batch dimension"):
        DataProto(TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2, 3]))
    with pytest.raises(BatchError, match="exactly one batch dimension"):
        DataProto(TensorDict({"x": torch.zeros(2, 3)}, batch_size=[]))
    with pytest.raises(BatchError, match="num_batch_dims=2"):
        DataProto.from_dict({"x": torch.zeros(2, 3)}, num_batch_dims=2)


def test_malformed_column_is_named_in_the_error():
    with pytest.raises(BatchError, match=r"use DataProto\.from_dict"):
        DataProto(wrong({"x": torch.zeros(2)}))
    with pytest.raises(FieldError, match=r"non_tensor_batch\['x'\] is a list"):
        DataProto(non_tensor_batch=wrong({"x": [1, 2]}))
    with pytest.raises(FieldError, match="no dimension"):
        DataProto(non_tensor_batch={"x": np.array(3)})
    with pytest.raises(FieldError, match="0-dimensional tensor"):
        DataProto.from_dict({"x": torch.tensor(3)})
    with pytest.raises(FieldError, match=r"tensors\['x'\] is a list"):
        DataProto.from_dict(wrong({"x": [1, 2]}))
    with pytest.raises(FieldError, match="both batch and non_tensor_batch"):
        DataProto.from_dict({"x": torch.zeros(2)}, {"x": np.zeros(2)})
    with pytest.raises(BatchError, match="must be dicts"):
        DataProto(meta_info=wrong([1]))
    with pytest.raises(FieldError, match="nested, sparse or quantized"):
        DataProto.from_dict({"x": torch.zeros(2, 2).to_sparse()})
    with pytest.raises(FieldError, match=r"batch\['x'\] is a TensorDict"):
        DataProto(TensorDict({"x": TensorDict({"y": torch.zeros(2)}, [2])}, [2]))


@pytest.mark.parametrize(
    "operation",
    [
        lambda data: data[0],
        lambda data: data[0:2],
        lambda data: data[[0, 1]],
        lambda data: data.select(),
        lambda data: data.pop("input_ids"),
        lambda data: data.rename("input_ids", "ids"),
        lambda data: data.union(DataProto.from_dict({"new": torch.zeros(3)})),
        lambda data: DataProto.concat([data, data]),
        lambda data: data.chunk(1),
        lambda data: data.split(2),
        lambda data: data.repeat(2),
        lambda data: data.sample_level_repeat([1, 1, 1]),
        lambda data: data.reorder([2, 1, 0]),
        lambda data: data.to("cpu"),
        lambda data: list(data.make_iterator(3, 1)),
        lambda data: data.padding(1),
        lambda data: data.to_tensordict(),
        lambda data: copy.copy(data),
        lambda data: data.__reduce_ex__(5),
    ],
)
def test_every_operation_rejects_an_inconsistent_batch(operation):
    data = batch_of_three()
    data.non_tensor_batch["raw_prompts"] = np.array(["a", "b", "c", "d"], dtype=object)
    with pytest.raises(BatchError, match="same number of rows"):
        operation(data)


def test_check_consistency_detects_later_changes_of_the_batch():
    data = batch_of_three()
    data.check_consistency()
    data.non_tensor_batch["late"] = np.zeros(5)
    with pytest.raises(BatchError, match=r"late \(5,\)"):
        data.check_consistency()


def test_integer_index_returns_an_item_without_batch_dimension():
    item = batch_of_three()[1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["input_ids"].tolist() == [3, 4]
    assert item.batch["scores"].item() == 1.5
    assert item.non_tensor_batch == {"raw_prompts": "b"}
    assert item.meta_info == {"epoch": 7}


def test_iterating_yields_every_row_as_an_item():
    assert [item.non_tensor_batch["raw_prompts"] for item in batch_of_three()] == ["a", "b", "c"]


def test_select_keeps_all_columns_of_a_kind_that_is_not_named():
    data = batch_of_three().select(batch_keys=["scores"])
    assert list(data.batch.keys()) == ["scores"]
    assert list(data.non_tensor_batch) == ["raw_prompts"]
    assert data.meta_info == {"epoch": 7}
    data = batch_of_three().select("scores", [], [])
    assert list(data.batch.keys()) == ["scores"]
    assert data.non_tensor_batch == {}
    assert data.meta_info == {}


def test_select_of_no_tensors_keeps_the_number_of_rows():
    assert len(batch_of_three().select([], [])) == 3


def test_missing_name_raises_with_the_available_names():
    data = batch_of_three()
    with pytest.raises(FieldError, match="batch has no 'values'; it has 'input_ids', 'scores'"):
        data.select(batch_keys=["values", "scores"])
    with pytest.raises(FieldError, match="non_tensor_batch has no 'x'"):
        data.select(non_tensor_batch_keys="x")
    with pytest.raises(FieldError, match="meta_info has no 'x'"):
        data.select(meta_info_keys=["x"])


def test_select_shares_tensors_unless_deepcopy():
    data = DataProto.from_dict({"x": torch.zeros(2)}, {"o": [[1], [2]]}, {"a": np.zeros(2)})
    data.select().batch["x"][0] = 1
    assert data.batch["x"].tolist() == [1, 0]
    deep = data.select(deepcopy=True)
    deep.batch["x"][1] = 5
    deep.non_tensor_batch["o"][0].append(9)
    deep.meta_info["a"][0] = 9
    assert data.batch["x"].tolist() == [1, 0]
    assert data.non_tensor_batch["o"][0] == [1]
    assert data.meta_info["a"][0] == 0


def test_pop_removes_from_this_batch_and_returns_what_it_removed():
    data = batch_of_three()
    popped = data.pop("input_ids", ["raw_prompts"], "epoch")
    assert popped.batch["input_ids"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert popped.non_tensor_batch["raw_prompts"].tolist() == ["a", "b", "c"]
    assert popped.meta_info == {"epoch": 7}
    assert list(data.batch.keys()) == ["scores"]
    assert data.non_tensor_batch == {}
    assert data.meta_info == {}


def test_pop_of_several_columns_and_of_the_last_one():
    data = batch_of_three()
    assert sorted(data.pop(["input_ids", "scores"]).batch.keys()) == ["input_ids", "scores"]
    assert len(data) == 3
    assert len(data.pop()) == 0


def test_pop_of_a_missing_name_removes_nothing():
    data = batch_of_three()
    with pytest.raises(FieldError, match="'values'"):
        data.pop(["input_ids"], None, ["values"])
    assert sorted(data.batch.keys()) == ["input_ids", "scores"]


def test_rename_of_tensors_and_arrays_keeps_order_and_contents():
    data = batch_of_three().rename(["input_ids", "raw_prompts"], ["ids", "texts"])
    assert list(data.batch.keys()) == ["ids", "scores"]
    assert data.batch["ids"][0].tolist() == [1, 2]
    assert data.non_tensor_batch["texts"].tolist() == ["a", "b", "c"]
    assert list(batch_of_three().rename("scores", "points").batch.keys()) == ["input_ids", "points"]


def test_rename_can_swap_two_columns():
    data = DataProto.from_dict({"a": torch.tensor([1]), "b": torch.tensor([2])}).rename(["a", "b"], ["b", "a"])
    assert (data.batch["a"].item(), data.batch["b"].item()) == (2, 1)


def test_rename_rejects_missing_columns_and_unequal_lists():
    with pytest.raises(FieldError, match="has no 'x'"):
        batch_of_three().rename("x", "y")
    with pytest.raises(FieldError, match="2 old names and 1 different new"):
        batch_of_three().rename(["input_ids", "scores"], ["x", "x"])


def test_chunk_returns_equal_views():
    data = DataProto.from_dict({"x": torch.arange(6)}, {"o": list("abcdef")}, {"k": 1})
    parts = data.chunk(3)
    assert [part.batch["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part.non_tensor_batch["o"].tolist() for part in parts] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert all(part.meta_info == {"k": 1} for part in parts)
    assert parts[1].batch["x"].data_ptr() == data.batch["x"].data_ptr() + 2 * 8


def test_chunk_of_uneven_rows_needs_padding_enabled():
    data = DataProto.from_dict({"x": torch.arange(5)}, {"o": np.arange(5)})
    with pytest.raises(BatchError, match="5 rows do not make 2 equal parts"):
        data.chunk(2)
    with pytest.raises(BatchError, match="chunks=0 is invalid: must be at least 1"):
        data.chunk(0)
    with pytest.raises(BatchError, match=r"chunks=2\.0 is invalid: must be an integer"):
        data.chunk(wrong(2.0))


def test_split_by_size_has_a_shorter_last_part():
    data = DataProto.from_dict({"x": torch.arange(5)}, {"o": np.arange(5)})
    assert [part.batch["x"].tolist() for part in data.split(2)] == [[0, 1], [2, 3], [4]]
    assert [len(part) for part in data.split(9)] == [5]
    assert [len(part) for part in data[0:0].split(2)] == [0]
    with pytest.raises(BatchError, match="split_size"):
        data.split(0)


def test_concat_is_the_inverse_of_chunk_and_split():
    data = DataProto.from_dict({"x": torch.arange(6)}, {"o": np.arange(6)}, {"k": 1})
    for parts in (data.chunk(3), data.split(4)):
        whole = DataProto.concat(parts)
        assert whole.batch["x"].tolist() == [0, 1, 2, 3, 4, 5]
        assert whole.non_tensor_batch["o"].tolist() == [0, 1, 2, 3, 4, 5]
        assert whole.meta_info == {"k": 1}


def test_repeat_interleaves_or_tiles():
    data = DataProto.from_dict({"x": torch.tensor([[1, 2], [3, 4]])}, {"o": ["a", "b"], "n": np.eye(2)})
    beside = data.repeat(2, interleave=True)
    assert beside.batch["x"].tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert beside.non_tensor_batch["o"].tolist() == ["a", "a", "b", "b"]
    assert beside.non_tensor_batch["n"].tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
    after = data.repeat(repeat_times=2, interleave=False)
    assert after.batch["x"].tolist() == [[1, 2], [3, 4], [1, 2], [3, 4]]
    assert after.non_tensor_batch["o"].tolist() == ["a", "b", "a", "b"]
    assert after.non_tensor_batch["n"].tolist() == [[1, 0], [0, 1], [1, 0], [0, 1]]


def test_repeat_zero_times_returns_no_rows():
    data = DataProto.from_dict({"x": torch.zeros(2, 3)}, {"o": ["a", "b"]})
    for interleave in (True, False):
        empty = data.repeat(0, interleave)
        assert len(empty) == 0
        assert empty.batch["x"].shape == (0, 3)
    with pytest.raises(BatchError, match="repeat_times=-1"):
        data.repeat(-1)


@pytest.mark.parametrize("times", [[2, 0, 1], (2, 0, 1), np.array([2, 0, 1]), torch.tensor([2, 0, 1])])
def test_sample_level_repeat_takes_a_count_per_row(times):
    data = batch_of_three().sample_level_repeat(times)
    assert data.batch["scores"].tolist() == [0.5, 0.5, 2.5]
    assert data.non_tensor_batch["raw_prompts"].tolist() == ["a", "a", "c"]


@pytest.mark.parametrize("times", [[1, 1], [1, 1, -1], [1.0, 1.0, 1.0], 2])
def test_sample_level_repeat_rejects_invalid_counts(times):
    with pytest.raises(BatchError, match="one integer >= 0 for each of the 3 rows"):
        batch_of_three().sample_level_repeat(times)


def test_reorder_returns_the_rows_in_another_order():
    data = batch_of_three()
    turned = data.reorder(torch.tensor([2, 0, 1]))
    assert turned.batch["scores"].tolist() == [2.5, 0.5, 1.5]
    assert turned.non_tensor_batch["raw_prompts"].tolist() == ["c", "a", "b"]
    assert data.batch["scores"].tolist() == [0.5, 1.5, 2.5]


@pytest.mark.parametrize("indices", [[0, 1], [0, 0, 1]])
def test_reorder_rejects_indices_that_drop_rows(indices):
    with pytest.raises(BatchError, match="each of the 3 rows exactly once"):
        batch_of_three().reorder(indices)


def test_to_moves_tensors_and_leaves_the_old_batch():
    data = batch_of_three()
    moved = data.to("cpu")
    assert moved.batch.device == torch.device("cpu")
    assert data.batch.device is None
    assert moved.non_tensor_batch["raw_prompts"].tolist() == ["a", "b", "c"]
    assert len(DataProto(meta_info={"k": 1}).to("cpu")) == 0


def test_auto_padding_is_kept_by_operations():
    data = DataProto.from_dict({"x": torch.arange(4)}, auto_padding=True)
    results = [data[0:2], data[[1]], data.select(), data.rename("x", "y"), data.repeat(2), data.reorder([3, 2, 1, 0])]
    results += [data.chunk(3)[0], data.split(3)[0], DataProto.concat([data, data]), data.to("cpu"), data.pop("x")]
    results += [copy.copy(data), copy.deepcopy(data), data.union(DataProto(meta_info={"k": 1}))]
    assert all(result.is_padding_enabled() for result in results)


def test_copy_and_deepcopy_keep_type_and_contents():
    data = batch_of_three()
    shallow, deep = copy.copy(data), copy.deepcopy(data)
    assert shallow.batch["scores"].data_ptr() == data.batch["scores"].data_ptr()
    assert deep.batch["scores"].data_ptr() != data.batch["scores"].data_ptr()
    assert deep.non_tensor_batch["raw_prompts"].tolist() == ["a", "b", "c"]


def test_repeat_once_is_a_copy():
    data = DataProto.from_dict({"x": torch.zeros(2)}, {"a": np.zeros(2)})
    once = data.repeat(1)
    once.batch["x"][0] = once.non_tensor_batch["a"][0] = 1
    assert float(data.batch["x"].sum()) == float(data.non_tensor_batch["a"].sum()) == 0
