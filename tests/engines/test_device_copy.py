import numpy as np
import torch

from hybridflow.engines.device_copy import rows_to_device, to_device, wait_for_copies

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_tensor_that_is_on_the_device_is_not_copied():
    x = torch.ones(3)
    assert to_device(x, CPU) is x
    wait_for_copies(CPU)  # returns at once


def test_every_tensor_of_the_rows_is_on_the_device(rollout_rows):
    rows = rollout_rows([2, 1], [3, 0])
    rows.non_tensor_batch["names"] = np.array(["a", "b"])
    moved = rows_to_device(rows, META)
    assert {column.device for column in moved.batch.values()} == {META}
    assert list(moved.non_tensor_batch["names"]) == ["a", "b"]
    assert {column.device for column in rows.batch.values()} == {CPU}
