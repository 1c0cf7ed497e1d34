"""The order in which an epoch visits the rows: a function of seed and epoch, and of nothing else."""

import torch

from hybridflow.errors import DataError
from hybridflow.runtime import derive_seed


class EpochSampler:
    """Orders of `num_rows` rows. Neither reads nor moves torch's global random state."""

    def __init__(self, num_rows: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if num_rows < 1:
            raise DataError(f"there are {num_rows} rows to visit; at least 1 is needed.")
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle

    def order(self, epoch: int) -> list[int]:
        """Every row index once: a new permutation each epoch, or ascending without shuffle."""
        if not self.shuffle:
            return list(range(self.num_rows))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        return torch.randperm(self.num_rows, generator=generator).tolist()
