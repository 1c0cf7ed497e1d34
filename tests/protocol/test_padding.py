import numpy as np
import pytest
import torch

from hybridflow.errors import BatchError
from hybridflow.protocol import DataProto, DataProtoConfig, pad_dataproto_to_divisor, unpad_dataproto


def numbered(num_rows: int, **kwargs) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(num_rows), "row_ids": torch.arange(num_rows)}, {"o": np.arange(num_rows)}, **kwargs
    )


def test_padding_copies_the_first_rows():
    padded, pad_size = pad_dataproto_to_divisor(numbered(6), 4)
    assert pad_size == 2
    assert padded.batch["x"].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert padded.non_tensor_batch["o"].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


def test_padding_repeats_the_rows_if_there_are_too_few():
    padded, pad_size = pad_dataproto_to_divisor(numbered(2), 7)
    assert pad_size == 5
    assert padded.batch["x"].tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_copies_have_row_id_minus_one():
    padded, _ = pad_dataproto_to_divisor(numbered(2), 4)
    assert padded.batch["row_ids"].tolist() == [0, 1, -1, -1]


def test_divisible_batch_gets_no_rows_but_new_dicts():
    data = numbered(4)
    padded, pad_size = pad_dataproto_to_divisor(data, 2)
    assert pad_size == 0
    assert padded.batch["row_ids"].tolist() == [0, 1, 2, 3]
    assert padded is not data


def test_batch_without_rows_needs_no_padding():
    padded, pad_size = pad_dataproto_to_divisor(numbered(0), 4)
    assert (len(padded), pad_size) == (0, 0)


def test_unpad_removes_the_copies():
    padded, pad_size = pad_dataproto_to_divisor(numbered(5, meta_info={"k": 1}), 4)
    data = unpad_dataproto(padded, pad_size)
    assert data.batch["row_ids"].tolist() == [0, 1, 2, 3, 4]
    assert data.non_tensor_batch["o"].tolist() == [0, 1, 2, 3, 4]
    assert data.meta_info == {"k": 1}
    assert len(unpad_dataproto(data, 0)) == 5


def test_invalid_sizes_are_errors():
    with pytest.raises(BatchError, match="size_divisor=0"):
        pad_dataproto_to_divisor(numbered(2), 0)
    with pytest.raises(BatchError, match="pad_size=3 is invalid: the batch has only 2 rows"):
        unpad_dataproto(numbered(2), 3)
    with pytest.raises(BatchError, match="pad_size=-1"):
        unpad_dataproto(numbered(2), -1)


def test_padding_appends_to_this_batch():
    data = numbered(3)
    data.padding(2)
    assert data.batch["x"].tolist() == [0, 1, 2, 0, 0]
    assert data.batch["row_ids"].tolist() == [0, 1, 2, -1, -1]
    data = numbered(3)
    data.padding(padding_size=1, padding_candidate="last")
    assert data.non_tensor_batch["o"].tolist() == [0, 1, 2, 2]
    data.padding(0)
    assert len(data) == 4


def test_padding_rejects_invalid_arguments():
    with pytest.raises(BatchError, match="valid are 'first' and 'last'"):
        numbered(2).padding(1, "middle")
    with pytest.raises(BatchError, match="no row to copy"):
        numbered(0).padding(1)
    with pytest.raises(BatchError, match="padding_size=-1"):
        numbered(2).padding(-1)


def test_padding_is_enabled_per_batch_or_for_all(monkeypatch):
    assert not numbered(2).is_padding_enabled()
    assert numbered(2, auto_padding=True).is_padding_enabled()
    assert DataProto.from_single_dict({"x": torch.zeros(1)}, auto_padding=True).is_padding_enabled()
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert numbered(2).is_padding_enabled()
