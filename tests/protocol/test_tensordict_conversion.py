from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol import DataProto


def test_batch_round_trips_through_a_tensordict():
    data = DataProto.from_dict(
        {"x": torch.arange(2)},
        {"o": [[1, 2], {"k": None}], "n": np.array([1, 2], dtype=np.float32), "s": np.array(["a", "bb"])},
        {"k": [1, {"m": 2}]},
    )
    back = DataProto.from_tensordict(data.to_tensordict())
    assert back.batch["x"].tolist() == [0, 1]
    assert back.non_tensor_batch["o"].tolist() == [[1, 2], {"k": None}]
    assert back.non_tensor_batch["n"].dtype == np.float32
    assert back.non_tensor_batch["s"].dtype.kind == "U"
    assert back.meta_info == {"k": [1, {"m": 2}]}


def test_batch_without_rows_or_tensors_round_trips():
    for data in (DataProto(), DataProto.from_dict(non_tensors={"o": ["a"]}, meta_info={"k": 1})):
        back = DataProto.from_tensordict(data.to_tensordict())
        assert len(back) == len(data)
        assert back.meta_info == data.meta_info
        assert list(back.non_tensor_batch) == list(data.non_tensor_batch)


def test_rows_selected_in_the_tensordict_are_rows_of_the_batch():
    data = DataProto.from_dict({"x": torch.arange(3)}, {"o": ["a", "a", "b"]}, {"k": 1})
    back = DataProto.from_tensordict(data.to_tensordict()[:2])
    assert back.batch["x"].tolist() == [0, 1]
    assert back.non_tensor_batch["o"].tolist() == ["a", "a"]


def test_from_tensordict_adds_meta_info():
    source = TensorDict({"x": torch.zeros(2), "o": NonTensorStack("a", "b")}, [2])
    data = DataProto.from_tensordict(source, {"k": 1})
    assert data.meta_info == {"k": 1}
    assert data.non_tensor_batch["o"].tolist() == ["a", "b"]


def test_invalid_tensordicts_are_errors():
    with pytest.raises(BatchError, match="exactly one batch dimension"):
        DataProto.from_tensordict(TensorDict({"x": torch.zeros(2, 3)}, [2, 3]))
    plain: Any = {"x": torch.zeros(2)}
    with pytest.raises(BatchError, match="got dict"):
        DataProto.from_tensordict(plain)
    with pytest.raises(FieldError, match="nested"):
        DataProto.from_tensordict(TensorDict({"x": TensorDict({}, [2])}, [2]))
    with pytest.raises(FieldError, match=r"\['x'\] are both columns and keys"):
        DataProto.from_dict({"x": torch.zeros(2)}, meta_info={"x": 1}).to_tensordict()
