"""The order of a batch that was read in parts."""

import torch

from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.begun import in_order_of_groups


def test_rows_are_sorted_by_group_and_then_by_id():
    columns = {"group_ids": torch.tensor([1, 0, 1, 0]), "row_ids": torch.tensor([3, 5, 2, 4])}
    batch = DataProtoFuture.of(DataProto.from_dict(columns))
    assert in_order_of_groups(batch).tolist() == [3, 1, 2, 0]
