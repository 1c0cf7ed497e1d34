import threading
from collections import namedtuple

import numpy as np
import pytest
import torch

from hybridflow.controller.local import private_copy
from hybridflow.errors import DispatchError
from hybridflow.protocol import DataProto, DataProtoFuture


def make_batch(num_rows=2):
    return DataProto.from_dict(
        tensors={"x": torch.zeros(num_rows, 3)},
        non_tensors={"names": np.array(["a"] * num_rows, dtype=object), "sizes": np.zeros(num_rows)},
        meta_info={"metrics": {"loss": [1.0]}, "step": 4},
    )


def test_a_copied_batch_shares_no_memory():
    batch = make_batch()
    copied = private_copy(batch, "batch")
    copied.batch["x"][0, 0] = 7.0
    copied.non_tensor_batch["names"][0] = "changed"
    copied.non_tensor_batch["sizes"][0] = 7.0
    copied.meta_info["metrics"]["loss"].append(2.0)
    assert batch.batch["x"].sum() == 0
    assert list(batch.non_tensor_batch["names"]) == ["a", "a"]
    assert batch.non_tensor_batch["sizes"].sum() == 0
    assert batch.meta_info == {"metrics": {"loss": [1.0]}, "step": 4}


def test_a_view_is_copied_without_its_base():
    part = make_batch(100).slice(0, 2)
    assert private_copy(part, "part").batch["x"].untyped_storage().nbytes() == 2 * 3 * 4
    assert private_copy(torch.zeros(100, 3)[:2], "part").untyped_storage().nbytes() == 2 * 3 * 4
    assert private_copy(torch.zeros(1, 3).expand(4, 3), "expanded").is_contiguous()


def test_containers_are_copied_deeply_and_keep_their_types():
    Pair = namedtuple("Pair", "left right")
    value = {"a": [torch.zeros(1), (torch.zeros(1),)], "b": Pair({1}, [2])}
    copied = private_copy(value, "value")
    copied["a"][0] += 1
    copied["a"][1][0].add_(1)
    copied["b"].left.add(5)
    assert value["a"][0] == 0
    assert value["a"][1][0] == 0
    assert value["b"] == ({1}, [2])
    assert type(copied["b"]) is Pair


def test_error_names_a_value_that_cannot_be_copied():
    with pytest.raises(DispatchError, match=r"argument 0 of A\.b is a lock, which cannot be copied"):
        private_copy(threading.Lock(), "argument 0 of A.b")


def test_a_copied_future_has_its_own_contents_and_meta_info():
    future = DataProtoFuture.of(DataProto.from_dict({"x": torch.zeros(2)}, meta_info={"facts": np.zeros(1)}))
    copied = private_copy(future, "future")
    read = copied.get()
    read.batch["x"].add_(1)
    read.meta_info["facts"][:] = 99
    copied.meta_info["new"] = 1
    assert future.get().batch["x"].sum() == 0
    assert future.meta_info["facts"].tolist() == [0]
    assert list(future.meta_info) == ["facts"]
    assert (len(copied), copied.columns) == (2, ("x",))


def test_objects_are_copied_tensors_detached_and_functions_shared():
    rows = np.empty(2, dtype=object)
    rows[0], rows[1] = [1, 2], {"t": torch.ones(2, requires_grad=True)}
    copied = private_copy(rows, "rows")
    copied[0].append(3)
    copied[1]["t"] += 1
    assert rows[0] == [1, 2]
    assert rows[1]["t"].sum() == 2
    assert not copied[1]["t"].requires_grad
    assert private_copy(make_batch, "f") is make_batch
