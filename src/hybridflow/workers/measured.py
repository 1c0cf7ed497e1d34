"""`MeasuredWorker`: a worker that measures how fast its device computes, for MFU and to find slow ranks."""

import torch

from hybridflow.controller import Dispatch, register
from hybridflow.models import DTYPES
from hybridflow.runtime import measure_flops_now, peak_flops
from hybridflow.workers.profiled import ProfiledWorker


class MeasuredWorker(ProfiledWorker):
    """Base class of workers with a model."""

    @register(Dispatch.ONE_TO_ALL)
    def abandon_step(self) -> None:
        """Discard what an unfinished step has left, before the run goes back to an earlier state."""

    @register(Dispatch.ONE_TO_ALL)
    def measure_peak(self, dtype: str) -> float:
        """Return the matrix-product peak of this rank's device in FLOP/s, measured while the other ranks measure too.

        It is 0 on a rank that shares its process with rank 0.
        """
        return peak_flops(DTYPES[dtype]) if self.has_collectives or self.rank == 0 else 0.0

    @register(Dispatch.ONE_TO_ALL)
    def measure_speed(self, dtype: str, periods: int = 3) -> float:
        """Return how fast this rank's device multiplies matrices now, in FLOP/s; 0 if there is no memory for them.

        It is the rate of the best of several periods of 0.3 s in all: one period gives the mean rate.
        """
        try:
            return measure_flops_now(DTYPES[dtype], periods=periods, period_s=0.3 / periods)
        except torch.OutOfMemoryError:
            return 0.0
