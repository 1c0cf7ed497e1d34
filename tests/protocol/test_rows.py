import pickle

import numpy as np
import pytest
import torch

from hybridflow.errors import BatchError
from hybridflow.protocol import DataProto


def numbered(num_rows: int = 4) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(num_rows)}, {"o": np.arange(num_rows)})


@pytest.mark.parametrize(
    "index",
    [
        [3, 1],
        (3, 1),
        [-1, -3],
        np.array([3, 1]),
        np.array([3, 1], dtype=np.uint8),
        torch.tensor([3, 1]),
        torch.tensor([3, 1], dtype=torch.int32),
        range(3, 0, -2),
        slice(3, None, -2),
    ],
)
def test_rows_are_returned_in_the_requested_order(index):
    chosen = numbered()[index]
    assert chosen.batch["x"].tolist() == [3, 1]
    assert chosen.non_tensor_batch["o"].tolist() == [3, 1]


@pytest.mark.parametrize(
    "mask",
    [
        [False, True, False, True],
        np.array([False, True, False, True]),
        torch.tensor([False, True, False, True]),
    ],
)
def test_a_bool_mask_keeps_the_true_rows(mask):
    assert numbered()[mask].batch["x"].tolist() == [1, 3]
    assert numbered().select_idxs(mask).non_tensor_batch["o"].tolist() == [1, 3]


@pytest.mark.parametrize("index", [2, -2, np.int64(2), np.array(2), torch.tensor(2)])
def test_one_integer_of_any_kind_gives_one_row(index):
    item = numbered()[index]
    assert item.batch["x"].item() == 2
    assert item.non_tensor_batch["o"] == 2


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(None), [0, 1, 2, 3]),
        (slice(1, 3), [1, 2]),
        (slice(-2, None), [2, 3]),
        (slice(0, 100), [0, 1, 2, 3]),
        (slice(None, None, 3), [0, 3]),
        (slice(3, 1), []),
    ],
)
def test_slices_follow_python(index, rows):
    part = numbered()[index]
    assert part.batch["x"].tolist() == rows
    assert part.non_tensor_batch["o"].tolist() == rows


def test_slice_is_a_view():
    data = numbered()
    data.slice(1, 3).batch["x"][0] = 100
    assert data.batch["x"].tolist() == [0, 100, 2, 3]


def test_select_idxs_is_a_copy():
    data = numbered()
    data.select_idxs([1, 2]).batch["x"][0] = 100
    assert data.batch["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("index", [[], (), np.zeros(0, dtype=np.int64), torch.zeros(0, dtype=torch.int64)])
def test_empty_index_returns_no_rows(index):
    data = DataProto.from_dict({"x": torch.zeros(4, 3, dtype=torch.bfloat16)}, {"o": list("abcd")})
    assert len(data[index]) == 0
    assert data[index].batch["x"].shape == (0, 3)
    assert data[index].non_tensor_batch["o"].shape == (0,)


def test_rows_of_strided_columns_and_unusual_dtypes():
    columns = {
        "t": torch.arange(8).reshape(2, 4).T,
        "b": torch.tensor([True, False, True, False]),
        "h": torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16),
        "empty": torch.zeros(4, 0),
    }
    chosen = DataProto.from_dict(columns)[[2, 0]]
    assert chosen.batch["t"].tolist() == [[2, 6], [0, 4]]
    assert chosen.batch["b"].tolist() == [True, True]
    assert chosen.batch["h"].tolist() == [3.0, 1.0]
    assert chosen.batch["empty"].shape == (2, 0)


@pytest.mark.parametrize("index", [4, -5, [0, 4], [-5], torch.tensor([9]), np.array([4])])
def test_row_out_of_range_is_a_batch_error_and_an_index_error(index):
    with pytest.raises(BatchError, match=r"not in a batch of 4 rows; valid are -4 to 3"):
        numbered()[index]
    with pytest.raises(IndexError):
        numbered()[index]


def test_row_index_error_can_be_pickled():
    with pytest.raises(BatchError) as caught:
        numbered(0)[0]
    assert str(pickle.loads(pickle.dumps(caught.value))) == "row 0 is not in a batch of 0 rows; it is empty."


@pytest.mark.parametrize(
    "index",
    ["x", None, True, 1.0, [0.5], [[0], [1]], [[0], [1, 2]], {1}, torch.tensor([0.5]), torch.tensor([[0]]), (0, "x")],
)
def test_invalid_index_raises_with_the_valid_types(index):
    with pytest.raises(BatchError, match="rows must be selected by an int, a slice, a list"):
        numbered()[index]


def test_a_mask_of_another_length_is_an_error():
    with pytest.raises(BatchError, match="it has 2, the batch has 4 rows"):
        numbered()[[True, False]]


@pytest.mark.parametrize("index", [slice("a", None), slice(0, 2, 0), slice(0.5, 2)])
def test_a_malformed_slice_is_a_batch_error(index):
    with pytest.raises(BatchError, match="slice"):
        numbered()[index]
