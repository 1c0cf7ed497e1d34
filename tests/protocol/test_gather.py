"""All-gather over two ranks of a gloo group; run as a program, this file is one rank."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybridflow.errors import HybridFlowError
from hybridflow.protocol import DataProto, all_gather_data_proto

pytestmark = [pytest.mark.runs, pytest.mark.own_run("ray: two ranks of a process group, without a run")]


def error_of(data: DataProto) -> str:
    try:
        all_gather_data_proto(data)
    except HybridFlowError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(rank: int, world_size: int, store: str, folder: Path) -> None:
    """Gather one row with a short response on rank 0, two rows with a long response on rank 1, and parts of it."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    num_rows, response_len = rank + 1, 2 * rank + 1
    data = DataProto.from_dict(
        {
            "responses": torch.full((num_rows, response_len), rank + 1),
            "response_mask": torch.ones(num_rows, response_len, dtype=torch.bool),
            "half": torch.full((num_rows,), rank + 0.5, dtype=torch.bfloat16),
            "turned": torch.arange(2 * num_rows).reshape(2, num_rows).T,
        },
        {"o": [{"rank": rank}] * num_rows, "n": np.full(num_rows, rank)},
        {"step": 3, "metrics": {"loss": float(rank)}},
    )
    all_gather_data_proto(data, dist.group.WORLD).save_to_disk(folder / f"uneven{rank}")
    assert len(data) == rank + 1  # the batch that it was given is not changed
    all_gather_data_proto(data[0:rank]).save_to_disk(folder / f"empty{rank}")
    all_gather_data_proto(data.select([], ["o"])).save_to_disk(folder / f"objects{rank}")
    all_gather_data_proto(DataProto(meta_info={"metrics": {"loss": rank}})).save_to_disk(folder / f"metrics{rank}")
    errors = [
        error_of(data if rank else data.rename("half", "other")),
        error_of(DataProto.from_dict({"x": torch.zeros(1, rank + 1)})),
        error_of(DataProto.from_dict({"x": torch.zeros(1, dtype=torch.float64 if rank else torch.float32)})),
        error_of(DataProto(meta_info={"step": rank})),
    ]
    (folder / f"errors{rank}").write_text("\n".join(errors))
    dist.destroy_process_group()


def test_every_rank_gets_all_rows_in_rank_order_or_the_same_error(run_world, tmp_path):
    run_world(__file__, 2, tmp_path)
    for rank in range(2):
        uneven, empty, objects, metrics = (
            DataProto.load_from_disk(tmp_path / f"{name}{rank}") for name in ("uneven", "empty", "objects", "metrics")
        )
        assert {name: column.tolist() for name, column in uneven.batch.items()} == {
            "responses": [[1, 0, 0], [2, 2, 2], [2, 2, 2]],
            "response_mask": [[True, False, False], [True] * 3, [True] * 3],
            "half": [0.5, 1.5, 1.5],
            "turned": [[0, 1], [0, 2], [1, 3]],
        }
        assert uneven.non_tensor_batch["n"].tolist() == [0, 1, 1]
        assert uneven.meta_info == {"step": 3, "metrics": {"loss": [0.0, 1.0]}}
        for batch in (uneven, objects):
            assert batch.non_tensor_batch["o"].tolist() == [{"rank": 0}, {"rank": 1}, {"rank": 1}]
        assert empty.batch["half"].tolist() == [1.5]
        assert metrics.meta_info == {"metrics": {"loss": [0, 1]}}
    first, second = ((tmp_path / f"errors{rank}").read_text().splitlines() for rank in range(2))
    assert first == second
    starts = [
        "FieldError: concat: batch of part 0 has ['other', 'response_mask'",
        "BatchError: concat: 'x' has different lengths",
        "BatchError: concat: 'x' is (1,) torch.float32 on cpu in part 0",
        "BatchError: concat: 'step' is 0 in one batch and 1",
    ]
    assert [line[: len(start)] for line, start in zip(first, starts, strict=True)] == starts


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
