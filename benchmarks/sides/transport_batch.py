"""The batch that is sent, and a checksum that reads every byte of it, the same for all sides.

torch and numpy only, since it runs in every environment; a batch has `batch` and `non_tensor_batch`.
"""

import zlib
from typing import Any

import numpy as np
import torch

NUM_ROWS, NUM_COLUMNS = 4096, 8
TEXTS = "texts"
TENSORS = tuple(f"column_{index}" for index in range(NUM_COLUMNS))
COLUMNS = (*TENSORS, TEXTS)
REPEATS, CHUNKS = 4, 8


def width_of(megabytes: float) -> int:
    """Return the integers in one row of one column, a multiple of 8, for a batch of about `megabytes` (268: 1024)."""
    return max(8, 8 * round(megabytes * 1e6 / (NUM_ROWS * NUM_COLUMNS * 64)))


def build_columns(width: int) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """Build NUM_COLUMNS random int64 tensors (NUM_ROWS, width) and NUM_ROWS short texts; equal in every process."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_ROWS, width)
    tensors = {name: torch.randint(-(2**62), 2**62, shape, generator=generator) for name in TENSORS}
    texts = np.empty(NUM_ROWS, dtype=object)
    texts[:] = [f"question {index}: what is {index} + {index % 7}?" for index in range(NUM_ROWS)]
    return tensors, {TEXTS: texts}


def half_of_rows() -> torch.Tensor:
    """Return NUM_ROWS / 2 row numbers in random order."""
    return torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(1))[: NUM_ROWS // 2]


def checksum(batch: Any) -> list[int]:
    """Return a number for each column that depends on every byte and on the order of the rows.

    For a tensor: the sum of its row sums, each times a different odd number, modulo 2**64; changing a byte changes it.
    """
    weights = 2 * torch.arange(len(batch.non_tensor_batch[TEXTS])) + 1
    sums = [int((batch.batch[name].sum(1) * weights).sum()) for name in TENSORS]
    return [*sums, zlib.crc32("\0".join(batch.non_tensor_batch[TEXTS]).encode())]
