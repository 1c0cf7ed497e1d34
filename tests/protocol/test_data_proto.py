"""Batches: construction, what results share, meta_info and errors; test_operations.py has random sequences."""

import copy
import pickle
from collections import OrderedDict, defaultdict
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol import (
    DataProto,
    DataProtoConfig,
    DataProtoFuture,
    DataProtoItem,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from hybridflow.protocol.handle import HeldBatch

T = torch.tensor
NAN = float("nan")


def three() -> DataProto:
    return DataProto.from_dict(
        {"ids": T([[1, 2], [3, 4], [5, 6]]), "scores": T([0.5, 1.5, 2.5])}, {"texts": ["a", "b", "c"]}, {"epoch": 7}
    )


def numbered(num_rows: int, **options: Any) -> DataProto:
    rows = torch.arange(num_rows)
    return DataProto.from_dict({"x": rows, "row_ids": rows.clone()}, {"o": np.arange(num_rows)}, **options)


def x_of(parts: Any) -> list[list[int]]:
    return [part.batch["x"].tolist() for part in parts]


def names(data: DataProto) -> tuple[list[str], list[str], dict]:
    return [] if data.batch is None else list(data.batch.keys()), list(data.non_tensor_batch), data.meta_info


def single(value: Any) -> DataProto:
    return DataProto.from_single_dict({"a": value})


# Construction


def test_from_dict_takes_tensors_arrays_and_lists():
    data = three()
    assert len(data) == 3
    assert data.batch.batch_size == torch.Size([3])
    assert data.non_tensor_batch["texts"].dtype == object
    pairs = DataProto.from_dict(non_tensors={"pairs": [[1, 2], [3, 4], [5, 6]]}).non_tensor_batch["pairs"]
    assert (pairs.shape, pairs[1]) == ((3,), [3, 4])
    sorted_by_type = DataProto.from_single_dict({"a": torch.zeros(2, 3), "b": np.array(["x", "y"], object)}, {"k": 1})
    assert names(sorted_by_type) == (["a"], ["b"], {"k": 1})


def test_batch_may_lack_tensors_arrays_or_all_columns():
    assert len(DataProto(None, None, None)) == len(DataProto(meta_info={"metrics": {"loss": 1.0}})) == 0
    only_arrays = DataProto.from_dict(non_tensors={"x": np.arange(4)})
    assert only_arrays.batch is None
    assert [len(part) for part in only_arrays.chunk(2)] == [2, 2]
    assert only_arrays.repeat(2).non_tensor_batch["x"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [len(part) for part in DataProto(meta_info={"k": 1}).chunk(2)] == [0, 0]
    assert len(DataProto(meta_info={"k": 1}).to("cpu")) == 0
    assert len(three().select([], [])) == len(three()[0:0].split(2)) + 2 == 3
    assert names(three().pop()) == ([], [], {})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: DataProto.from_dict({"x": torch.zeros(3, 1)}, {"y": np.zeros(2)}),
            BatchError,
            r"x \(3, 1\).*y \(2,\)",
        ),
        (
            lambda: DataProto.from_dict({"x": torch.zeros(3), "y": torch.zeros(2)}),
            BatchError,
            r"'x': \(3,\), 'y': \(2,",
        ),
        (lambda: DataProto.from_dict(non_tensors={"x": [1, 2], "y": [1]}), BatchError, r"x \(2,\), y \(1,\)"),
        (lambda: DataProto(TensorDict({"x": torch.zeros(2, 3)}, [2, 3])), BatchError, "exactly one batch dimension"),
        (lambda: DataProto(TensorDict({"x": torch.zeros(2, 3)}, [])), BatchError, "exactly one batch dimension"),
        (lambda: DataProto({"x": torch.zeros(2)}), BatchError, r"use DataProto\.from_dict"),
        (lambda: DataProto(non_tensor_batch={"x": [1, 2]}), FieldError, r"non_tensor_batch\['x'\] is a list"),
        (lambda: DataProto(non_tensor_batch={"x": np.array(3)}), FieldError, "no dimension"),
        (lambda: DataProto(non_tensor_batch={3: np.zeros(3)}), FieldError, "the name of a column must be a str"),
        (lambda: DataProto.from_dict(non_tensors={"n": np.ma.array([1], mask=[True])}), FieldError, "masked array"),
        (lambda: DataProto.from_dict({"x": T(3)}), FieldError, "0-dimensional tensor"),
        (lambda: DataProto.from_dict({"x": [1, 2]}), FieldError, r"tensors\['x'\] is a list"),
        (
            lambda: DataProto.from_dict({"x": torch.zeros(2)}, {"x": np.zeros(2)}),
            FieldError,
            "both batch and non_tensor",
        ),
        (lambda: DataProto(meta_info=[1]), BatchError, "must be dicts"),
        (lambda: DataProto.from_dict({"x": torch.zeros(2, 2).to_sparse()}), FieldError, "nested, sparse or quantized"),
        (lambda: DataProto(TensorDict({"x": TensorDict({}, [2])}, [2])), FieldError, r"batch\['x'\] is a TensorDict"),
        (lambda: single([1, 2]), FieldError, "'a': 'list'"),
    ],
)
def test_malformed_column_is_named_in_the_error(make, error, message):
    with pytest.raises(error, match=message):
        make()


OPERATIONS = {
    "constructor": lambda data: DataProto(data.batch, data.non_tensor_batch, data.meta_info),
    "item": lambda data: data[0],
    "slice": lambda data: data[0:2],
    "select_idxs": lambda data: data[[0, 1]],
    "select": lambda data: data.select(),
    "select deep": lambda data: data.select(deepcopy=True),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
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
    meta_info = {"list": [1], "dict": {"deep": [1]}, "tuple": ([1],)}
    data = DataProto.from_dict({"x": torch.arange(2)}, {"o": ["a", "b"]}, copy.deepcopy(meta_info), auto_padding=True)
    result = OPERATIONS[name](data)
    assert name in ("constructor", "item", "tensordict") or result.is_padding_enabled()
    result.meta_info["new"] = 1
    for inner in (result.meta_info["list"], result.meta_info["dict"]["deep"], result.meta_info["tuple"][0]):
        inner.append(2)
    result.non_tensor_batch["more"] = np.zeros(len(result.non_tensor_batch["o"]) if name != "item" else 1)
    result.batch["z"] = torch.zeros(result.batch.batch_size)
    assert names(data) == (["x"], ["o"], meta_info)


@pytest.mark.parametrize(
    "operation",
    [
        *(OPERATIONS[name] for name in OPERATIONS if name != "future"),
        lambda data: data.pop("x"),
        lambda data: data.padding(1),
        lambda data: data.__reduce_ex__(5),
        lambda data: data.check_consistency(),
    ],
)
def test_every_operation_rejects_an_inconsistent_batch(operation):
    data = DataProto.from_dict({"x": torch.arange(2)}, {"o": ["a", "b"]})
    data.non_tensor_batch["late"] = np.zeros(5)
    with pytest.raises(BatchError, match=r"same number of rows.*late \(5,\)"):
        operation(data)


def test_from_dict_pop_and_chunks_share_no_dicts_either():
    tensors, non_tensors, meta_info = {"x": torch.arange(2)}, {"o": ["a", "b"]}, {"k": [1]}
    data = DataProto.from_dict(tensors, non_tensors, meta_info)
    data.meta_info["k"].append(2)
    data.batch["y"] = torch.zeros(2)
    assert (list(tensors), non_tensors, meta_info) == (["x"], {"o": ["a", "b"]}, {"k": [1]})
    first, second = data.chunk(2)
    first.meta_info["k"].append(3)
    inner = data.meta_info["k"]
    data.pop(meta_info_keys="k").meta_info["k"].append(4)
    assert second.meta_info["k"] == inner == [1, 2]


def test_contents_are_views_copies_or_deep_copies():
    data = DataProto.from_dict({"x": torch.arange(4)}, {"o": [[1], [2], [3], [4]]}, {"a": np.zeros(2)})
    start = data.batch["x"].data_ptr()
    for view, row in ((data[1:3], 1), (data.select(), 0), (data.chunk(2)[1], 2), (data.split(3)[1], 3), (data[::2], 0)):
        assert view.batch["x"].data_ptr() == start + 8 * row
    for copied in (data[[1, 2]], data.repeat(1), data.reorder([0, 1, 2, 3]), DataProto.concat([data, data])):
        copied.batch["x"].fill_(9)
        copied.non_tensor_batch["o"][:] = None
    for deep in (data.select(deepcopy=True), copy.deepcopy(data)):
        deep.batch["x"].fill_(9)
        deep.non_tensor_batch["o"][0].append(9)
        deep.meta_info["a"][0] = 9
    assert data.batch["x"].tolist() == [0, 1, 2, 3]
    assert data.non_tensor_batch["o"].tolist() == [[1], [2], [3], [4]]
    assert data.meta_info["a"].tolist() == [0, 0]


# Rows


@pytest.mark.parametrize("index", [1, -2, np.int64(1), np.array(1), T(1)])
def test_one_integer_of_any_kind_gives_an_item_without_batch_dimension(index):
    item = three()[index]
    assert isinstance(item, DataProtoItem)
    assert (item.batch["ids"].tolist(), item.batch["scores"].item()) == ([3, 4], 1.5)
    assert (item.non_tensor_batch, item.meta_info) == ({"texts": "b"}, {"epoch": 7})
    assert [item.non_tensor_batch["texts"] for item in three()] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        *((index, [3, 1]) for index in ([3, 1], (3, 1), [-1, -3], np.array([3, 1], np.uint8), T([3, 1]).int())),
        (range(3, 0, -2), [3, 1]),
        *((mask, [1, 3]) for mask in ([False, True, False, True], np.arange(4) % 2 == 1, torch.arange(4) % 2 == 1)),
        *((empty, []) for empty in ([], (), np.zeros(0, np.int64), torch.zeros(0).long(), slice(3, 1))),
    ],
)
def test_rows_are_chosen_by_order_or_mask(index, rows):
    columns = {"t": torch.arange(8).reshape(2, 4).T, "empty": torch.zeros(4, 0, dtype=torch.bfloat16)}
    chosen = DataProto.from_dict(columns, {"o": np.arange(4)})[index]
    assert chosen.batch["t"].tolist() == [[row, row + 4] for row in rows]
    assert (chosen.batch["empty"].shape, chosen.non_tensor_batch["o"].tolist()) == ((len(rows), 0), rows)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        *((lambda data, i=i: data[i], "not in a batch of 3 rows; valid are -3 to 2") for i in (3, -4, [0, 3], T([9]))),
        *(
            (lambda data, index=index: data[index], "rows must be selected by an int, a slice, a list")
            for index in ("x", None, True, 1.0, [0.5], [[0], [1]], [[0], [1, 2]], {1}, T([0.5]), T([[0]]), (0, "x"))
        ),
        (lambda data: data["x"], r"got 'x' \(a column is data.batch\[name\]"),
        (lambda data: data[[True, False]], "it has 2, the batch has 3 rows"),
        *((lambda data, part=part: data[part], "slice") for part in (slice("a"), slice(0, 2, 0), slice(0.5, 2))),
        *(
            (lambda data, order=order: data.reorder(order), "each of the 3 rows exactly once")
            for order in ([0, 1], [0, 0, 1])
        ),
        *(
            (lambda data, times=times: data.sample_level_repeat(times), "one integer >= 0 for each of the 3 rows")
            for times in ([1, 1], [1, 1, -1], [1.0, 1.0, 1.0], 2)
        ),
        (lambda data: data.repeat(-1), "repeat_times=-1"),
        (lambda data: data.chunk(2), "3 rows do not make 2 equal parts"),
        (lambda data: data.chunk(0), "chunks=0 is invalid: must be at least 1"),
        (lambda data: data.chunk(2.0), r"chunks=2\.0 is invalid: must be an integer"),
        (lambda data: data.split(0), "split_size"),
        (lambda data: pad_dataproto_to_divisor(data, 0), "size_divisor=0"),
        (lambda data: unpad_dataproto(data, 4), "pad_size=4 is invalid: the batch has only 3 rows"),
        (lambda data: unpad_dataproto(data, -1), "pad_size=-1"),
        (lambda data: data.padding(1, "middle"), "valid are 'first' and 'last'"),
        (lambda data: data[0:0].padding(1), "no row to copy"),
        (lambda data: data.padding(-1), "padding_size=-1"),
        (lambda data: data.make_iterator(0, 1), "mini_batch_size=0"),
        (lambda data: data.make_iterator(3, -1), "epochs=-1"),
        (lambda data: data.make_iterator(3, 1, "x"), "seed='x' is invalid: must be an integer"),
        (lambda data: data.make_iterator(3, 1, None, {"num_workers": 2}), r"\['num_workers'\]; valid are"),
        (lambda data: data.make_iterator(3, 1, None, {"shuffle": True}), "needs a seed"),
        (lambda data: data.make_iterator(2, 1), "mini_batch_size=2 does not divide the 3 rows"),
    ],
)
def test_rows_that_do_not_exist_are_an_error(attempt, message):
    with pytest.raises(BatchError, match=message):
        attempt(three())


def test_row_index_error_is_an_index_error_that_can_be_pickled():
    with pytest.raises(IndexError) as caught:
        three()[0:0][0]
    assert str(pickle.loads(pickle.dumps(caught.value))) == "row 0 is not in a batch of 0 rows; it is empty."


@pytest.mark.parametrize("times", [[2, 0, 1], (2, 0, 1), np.array([2, 0, 1]), T([2, 0, 1])])
def test_sample_level_repeat_takes_a_count_per_row(times):
    assert three().sample_level_repeat(times).non_tensor_batch["texts"].tolist() == ["a", "a", "c"]


def test_uneven_chunks_are_allowed_with_padding_for_a_batch_or_for_all(monkeypatch):
    assert x_of(numbered(5, auto_padding=True).chunk(4)) == [[0, 1], [2], [3], [4]]
    assert DataProto.from_single_dict({"x": torch.zeros(1)}, auto_padding=True).is_padding_enabled()
    assert not numbered(2).is_padding_enabled()
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert numbered(2).is_padding_enabled()
    assert x_of(numbered(2).chunk(4)) == [[0], [1], [], []]
    assert x_of(numbered(5)[1:].split(3)) == [[1, 2, 3], [4]]


def test_padding_appends_to_this_batch():
    data = numbered(3)
    data.padding(2)
    assert data.batch["x"].tolist() == [0, 1, 2, 0, 0]
    assert data.batch["row_ids"].tolist() == [0, 1, 2, -1, -1]
    data.padding(padding_size=1, padding_candidate="last")
    data.padding(0)
    assert data.non_tensor_batch["o"].tolist() == [0, 1, 2, 0, 0, 0]
    data = numbered(3)
    data.padding(1, "last")
    assert data.batch["x"].tolist() == [0, 1, 2, 2]


def test_mini_batches_keep_the_order_or_shuffle_all_columns_by_the_seed():
    keep = {"shuffle": False}
    assert x_of(numbered(4).make_iterator(mini_batch_size=2, epochs=2)) == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert x_of(numbered(4).make_iterator(2, 1, seed=1, dataloader_kwargs=keep)) == [[0, 1], [2, 3]]
    assert x_of(numbered(5).make_iterator(2, 1, dataloader_kwargs={"drop_last": False})) == [[0, 1], [2, 3], [4]]
    assert x_of(numbered(5).make_iterator(2, 1, dataloader_kwargs={"drop_last": True})) == [[0, 1], [2, 3]]
    assert x_of(numbered(0).make_iterator(2, 3, seed=1)) == x_of(numbered(4).make_iterator(2, 0)) == []
    orders = [x_of(numbered(64).make_iterator(16, 2, seed=seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    first, second = list(chain(*orders[0][:4])), list(chain(*orders[0][4:]))
    assert first != second
    assert first != sorted(first) == sorted(second) == list(range(64))
    for part in numbered(8, meta_info={"k": 1}).make_iterator(4, 1, seed=5):
        assert part.batch["x"].tolist() == part.non_tensor_batch["o"].tolist()
        assert part.meta_info == {"k": 1}


# Columns


def test_select_and_pop_by_kind():
    assert names(three().select(batch_keys=["scores"])) == (["scores"], ["texts"], {"epoch": 7})
    assert names(three().select("scores", [], [])) == (["scores"], [], {})
    data = three()
    popped = data.pop("ids", ["texts"], "epoch")
    assert names(popped) == (["ids"], ["texts"], {"epoch": 7})
    assert names(data) == (["scores"], [], {})
    assert data.pop(["scores"]).batch["scores"].tolist() == [0.5, 1.5, 2.5]
    assert len(data) == 3


def test_rename_keeps_order_and_can_swap():
    assert names(three().rename(["ids", "texts"], ["i", "t"]))[:2] == (["i", "scores"], ["t"])
    swapped = three().rename(["ids", "scores"], ["scores", "ids"])
    assert (swapped.batch["ids"][0].item(), swapped.batch["scores"].shape) == (0.5, (3, 2))


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda data: data.select(batch_keys=["values", "ids"]), "batch has no 'values'; it has 'ids', 'scores'"),
        (lambda data: data.select(non_tensor_batch_keys="x"), "non_tensor_batch has no 'x'"),
        (lambda data: data.select(meta_info_keys=["x"]), "meta_info has no 'x'"),
        (lambda data: data.pop(["ids"], None, ["values"]), "'values'"),
        (lambda data: data.rename("x", "y"), "has no 'x'"),
        (lambda data: data.rename(["ids", "scores"], ["x", "x"]), "2 old names and 1 different new"),
        (lambda data: data.rename("ids", "scores"), r"the batch already has \['scores'\]"),
        (lambda data: data.rename("ids", "texts"), r"the batch already has \['texts'\]"),
    ],
)
def test_a_column_that_does_not_exist_is_an_error_that_changes_nothing(attempt, message):
    data = three()
    with pytest.raises(FieldError, match=message):
        attempt(data)
    assert names(data) == (["ids", "scores"], ["texts"], {"epoch": 7})


def with_itself(value: Any) -> list:
    items = [value]
    items.append(items)
    return items


@pytest.mark.parametrize(
    "make",
    [
        lambda: single(T([NAN, 1.0])),
        lambda: single(T([NAN, 1.0], dtype=torch.bfloat16)),
        lambda: single(T([complex(NAN, 1)])),
        lambda: single(np.array([NAN, 1.0], dtype=np.float32)),
        lambda: single(np.array(["NaT"], dtype="M8[s]")),
        lambda: single(np.array(["x", "yy"])),
        lambda: DataProto.from_dict(non_tensors={"x": [NAN, "text", np.float32("nan"), [1], {"k": "v"}]}),
        lambda: DataProto.from_dict(non_tensors={"x": [{"deep": [NAN]}, np.array([NAN]), with_itself(1)]}),
        lambda: DataProto(meta_info={"x": NAN, "y": [T(NAN)], "z": (1, {2})}),
    ],
)
def test_equal_contents_unite_and_nan_equals_nan(make):
    assert names(make().union(make()))[:2] == names(make())[:2]
    DataProto.concat([make(), make()])


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        (T([1, 2, 3]), T([1, 5, 6]), "differ in 2 of 3 rows, first in row 1"),
        (T([1.0, NAN]), T([NAN, NAN]), "differ in 1 of 2 rows, first in row 0"),
        (T([1, 2]), T([1.0, 2.0]), "torch.int64 .2,. here, torch.float32 .2,. there"),
        (torch.zeros(2, 3), torch.zeros(2, 4), r"\(2, 3\) here, torch.float32 \(2, 4\) there"),
        (np.array([1, 2]), np.array([1, 3]), "differ in 1 of 2 rows"),
        (torch.zeros(2), np.zeros(2), "'a' is in both"),
        *[
            ([mine, "x"], [theirs, "x"], "differ in 1 of 2 rows")
            for mine, theirs in (
                ([1], (1,)),
                ([1], [1, 2]),
                ([1], 1),
                ([1], np.ones(1)),
                ({"a": 1}, {"b": 1}),
                ({"a": 1}, {"a": 2}),
                ({"a": 1}, 3),
                (T(1), 1),
                (np.zeros(1), [0.0]),
                (with_itself(1), with_itself(2)),
            )
        ],
    ],
)
def test_union_of_different_contents_shows_both_in_the_error(mine, theirs, message):
    pair = [DataProto.from_dict(non_tensors={"a": x}) if isinstance(x, list) else single(x) for x in (mine, theirs)]
    with pytest.raises(FieldError, match=message):
        pair[0].union(pair[1])


def test_union_needs_equal_numbers_of_rows_or_meta_info_alone():
    data = single(torch.zeros(2))
    for num_rows in (3, 0):
        with pytest.raises(BatchError, match=f"this batch has 2 rows, the other has {num_rows}"):
            data.union(DataProto.from_dict({"b": torch.zeros(num_rows)}))
    for both in (data.union(DataProto(meta_info={"k": 1})), DataProto(meta_info={"k": 1}).union(data)):
        assert (len(both), both.meta_info) == (2, {"k": 1})


# meta_info


def union(*meta_infos: dict) -> dict:
    first, second = (DataProto(meta_info=meta_info) for meta_info in meta_infos)
    return first.union(second).meta_info


def concat(*meta_infos: dict) -> dict:
    return DataProto.concat([DataProto(meta_info=meta_info) for meta_info in meta_infos]).meta_info


def loss(value: Any, **more: Any) -> dict:
    return {"metrics": {"loss": value, **more}}


@pytest.mark.parametrize(
    ("parts", "merged"),
    [
        ([loss(1.0, kl=[1, 2]), {"metrics": {"kl": 3, "loss": 2.0}}], loss([1.0, 2.0], kl=[1, 2, 3])),
        ([loss(1.0)], loss([1.0])),
        ([loss(1.0, kl=0.5), loss(2.0)], loss([1.0, 2.0], kl=[0.5])),
        ([{}, loss(2.0)], loss([2.0])),
        ([concat(loss(1.0), loss(2.0)), loss(3.0)], loss([1.0, 2.0, 3.0])),
        ([{"k": 1}, {}], {"k": 1}),
        ([{"metrics": None}, {}], {}),
        ([{"metrics": {}}, {}], {"metrics": {}}),
        ([{"a": 1, "b": (1, 2)}, {"a": 1, "b": (1, 2), "c": 3}], {"a": 1, "b": (1, 2), "c": 3}),
    ],
)
def test_concat_merges_keys_and_makes_lists_of_metrics(parts, merged):
    assert concat(*parts) == merged


def test_union_joins_metrics_by_name():
    assert union(loss(1.0), {"metrics": {"kl": 2.0}, "m": 2}) == loss(1.0, kl=2.0) | {"m": 2}
    assert union(loss(1.0), {}) == loss(1.0)


@pytest.mark.parametrize(
    ("merge", "parts", "message"),
    [
        (concat, [loss(1.0), {"metrics": 2.0}], "of part 1 is a float"),
        (concat, [{"a": 1}, {"a": 2}], "concat: 'a' is 1 in one batch and 2 in another"),
        (concat, [{"a": [1, 2]}, {"a": [1, 3]}], "'a'"),
        (union, [{"k": 1}, {"k": 2}], "union: 'k' is 1 in one batch and 2 in another"),
        (union, [loss(1.0), loss(3.0)], r"union of metrics: 'loss' is 1\.0 in one batch and 3\.0"),
        (union, [{"k": "x" * 70}, {"k": 2}], f"'k' is '{'x' * 56}... in one"),
    ],
)
def test_different_values_of_a_key_are_an_error_that_shows_both(merge, parts, message):
    with pytest.raises(BatchError, match=message):
        merge(*parts)


def test_copies_of_meta_info_keep_dict_types_and_share_other_values():
    counts, array = defaultdict(list, {"x": [1]}), np.zeros(3)
    data = DataProto(meta_info={"counts": counts, "ordered": OrderedDict(a=1), "array": array, "set": {1}})
    assert isinstance(data.meta_info["counts"], defaultdict)
    assert isinstance(data.meta_info["ordered"], OrderedDict)
    assert data.meta_info["array"] is array
    copied = data.select()
    copied.meta_info["set"].add(2)
    copied.meta_info["counts"]["x"].append(2)
    assert (counts, data.meta_info["set"]) == ({"x": [1]}, {1})


# Summary and TensorDict


def test_get_data_info_has_one_line_per_field():
    data = DataProto.from_dict(
        {"input_ids": torch.zeros(3, 512, dtype=torch.int64), "scores": torch.zeros(3)},
        {"raw_prompts": ["a", "b", "c"], "rewards": np.zeros(3, dtype=np.float32)},
        {"metrics": {"loss": [1.0]}, "pair": (1, "a"), "none": [], "mixed": [1, "a"]},
    )
    assert data.get_data_info().splitlines() == [
        *("batch", "  input_ids: (3, 512) (torch.int64) cpu", "  scores: (3,) (torch.float32) cpu"),
        *("non_tensor_batch", "  raw_prompts: ndarray(3,) (object)", "  rewards: ndarray(3,) (float32)"),
        *("meta_info", "  metrics: dict[str: list[float]]", "  pair: tuple(int, str)"),
        *("  none: list[...]", "  mixed: list[int|str]"),
    ]


def test_batch_round_trips_through_a_tensordict():
    columns = {"o": [[1, 2], {"k": None}], "n": np.array([1, 2], dtype=np.float32), "s": np.array(["a", "bb"])}
    data = DataProto.from_dict({"x": torch.arange(2)}, columns, {"k": [1, {"m": 2}]})
    back = DataProto.from_tensordict(data.to_tensordict()[:1], {"k": 2})
    assert (back.batch["x"].tolist(), back.non_tensor_batch["o"].tolist(), back.meta_info) == ([0], [[1, 2]], {"k": 2})
    plain = DataProto.from_tensordict(TensorDict({"x": torch.zeros(2), "o": NonTensorStack("a", "b")}, [2]))
    assert plain.non_tensor_batch["o"].tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TensorDict({"x": torch.zeros(2, 3)}, [2, 3]), BatchError, "exactly one batch dimension"),
        (lambda: {"x": torch.zeros(2)}, BatchError, "got dict"),
        (lambda: TensorDict({"x": TensorDict({}, [2])}, [2]), FieldError, "nested"),
        (
            lambda: DataProto.from_dict({"x": torch.zeros(2)}, meta_info={"x": 1}).to_tensordict(),
            FieldError,
            r"\['x'\] are both columns and keys",
        ),
    ],
)
def test_invalid_tensordicts_are_errors(make, error, message):
    with pytest.raises(error, match=message):
        DataProto.from_tensordict(make())


@pytest.mark.parametrize("other", [None, 3, "x", {"a": 1}], ids=["None", "a number", "text", "a dict"])
def test_union_with_anything_but_a_batch_is_an_error_that_names_it(other):
    with pytest.raises(BatchError, match=f"union needs a DataProto or a DataProtoFuture, got {type(other).__name__}"):
        DataProto.from_dict({"a": torch.ones(2)}).union(other)
