"""One rank of test_gather: gathers a few batches and writes the results. Arguments: rank, world size, folder."""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.errors import HybridFlowError
from hybridflow.protocol import DataProto, all_gather_data_proto


def batch_of(rank: int) -> DataProto:
    """Return one row with a short response on rank 0, two rows with a long response on rank 1."""
    num_rows, response_len = rank + 1, 2 * rank + 1
    return DataProto.from_dict(
        {
            "responses": torch.full((num_rows, response_len), rank + 1),
            "response_mask": torch.ones(num_rows, response_len, dtype=torch.bool),
            "half": torch.full((num_rows,), rank + 0.5, dtype=torch.bfloat16),
            "turned": torch.arange(2 * num_rows).reshape(2, num_rows).T,
        },
        {"o": [{"rank": rank}] * num_rows, "n": np.full(num_rows, rank)},
        {"step": 3, "metrics": {"loss": float(rank)}},
    )


def error_of(data: DataProto) -> str:
    try:
        all_gather_data_proto(data)
    except HybridFlowError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(rank: int, world_size: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    data = batch_of(rank)
    all_gather_data_proto(data, dist.group.WORLD).save_to_disk(folder / f"uneven{rank}")
    if len(data) != rank + 1:
        raise SystemExit("all_gather changed the batch it was given")
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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
