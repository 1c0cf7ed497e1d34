import numpy as np
import pytest
import torch

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol import DataProto


def test_union_puts_columns_side_by_side():
    first = DataProto.from_dict({"a": torch.tensor([1, 2])}, {"o": ["x", "y"]}, {"k": 1})
    second = DataProto.from_dict({"b": torch.tensor([3, 4])}, {"p": ["z", "w"]}, {"m": 2})
    both = first.union(second)
    assert sorted(both.batch.keys()) == ["a", "b"]
    assert sorted(both.non_tensor_batch) == ["o", "p"]
    assert both.meta_info == {"k": 1, "m": 2}
    assert list(first.batch.keys()) == ["a"]


def test_union_accepts_a_common_column_with_equal_contents():
    first = DataProto.from_dict({"a": torch.tensor([1, 2])}, {"o": [[1], {"k": "v"}], "s": np.array(["x", "yy"])})
    second = DataProto.from_dict({"a": torch.tensor([1, 2])}, {"o": [[1], {"k": "v"}], "s": np.array(["x", "yy"])})
    assert list(first.union(second).batch.keys()) == ["a"]


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        (torch.tensor([1, 2, 3]), torch.tensor([1, 5, 6]), "differ in 2 of 3 rows, first in row 1"),
        (torch.tensor([1.0, float("nan")]), torch.tensor([float("nan")] * 2), "differ in 1 of 2 rows, first in row 0"),
        (torch.tensor([1, 2]), torch.tensor([1.0, 2.0]), "torch.int64 .2,. here, torch.float32 .2,. there"),
        (torch.zeros(2, 3), torch.zeros(2, 4), r"\(2, 3\) here, torch.float32 \(2, 4\) there"),
        (np.array([1, 2]), np.array([1, 3]), "differ in 1 of 2 rows"),
        (np.array([[1], "x"], dtype=object), np.array([(1,), "x"], dtype=object), "differ in 1 of 2 rows"),
    ],
)
def test_union_of_different_contents_shows_both_in_the_error(mine, theirs, message):
    with pytest.raises(FieldError, match=message):
        DataProto.from_single_dict({"a": mine}).union(DataProto.from_single_dict({"a": theirs}))


def test_a_tensor_and_an_array_of_one_name_are_an_error():
    with pytest.raises(FieldError, match="'a' is in both"):
        DataProto.from_dict({"a": torch.zeros(2)}).union(DataProto.from_dict(non_tensors={"a": np.zeros(2)}))


def test_union_of_different_numbers_of_rows_is_an_error():
    with pytest.raises(BatchError, match="this batch has 2 rows, the other has 3"):
        DataProto.from_dict({"a": torch.zeros(2)}).union(DataProto.from_dict({"b": torch.zeros(3)}))
    with pytest.raises(BatchError, match="this batch has 2 rows, the other has 0"):
        DataProto.from_dict({"a": torch.zeros(2)}).union(DataProto.from_dict({"b": torch.zeros(0)}))


def test_union_with_a_batch_that_has_only_meta_info():
    data = DataProto.from_dict({"a": torch.zeros(2)})
    for both in (data.union(DataProto(meta_info={"k": 1})), DataProto(meta_info={"k": 1}).union(data)):
        assert len(both) == 2
        assert both.meta_info == {"k": 1}


def test_union_of_different_meta_info_shows_both_in_the_error():
    with pytest.raises(BatchError, match="'k' is 1 in one batch and 2 in another"):
        DataProto(meta_info={"k": 1}).union(DataProto(meta_info={"k": 2}))


def test_union_joins_metrics_by_name():
    first = DataProto(meta_info={"metrics": {"loss": 1.0}})
    assert first.union(DataProto(meta_info={"metrics": {"kl": 2.0}})).meta_info["metrics"] == {"loss": 1.0, "kl": 2.0}
    assert first.union(DataProto()).meta_info["metrics"] == {"loss": 1.0}
    with pytest.raises(BatchError, match=r"union of metrics: 'loss' is 1\.0 in one batch and 3\.0"):
        first.union(DataProto(meta_info={"metrics": {"loss": 3.0}}))
