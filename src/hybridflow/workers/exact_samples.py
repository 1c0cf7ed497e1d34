"""The check of `rollout.exact`: a sampled token has the same log-prob in training, bit for bit."""

from collections.abc import Mapping

from torch import Tensor

from hybridflow.config import Config
from hybridflow.engines import LossFunction, Outputs
from hybridflow.errors import RolloutError
from hybridflow.protocol import DataProto


def samples_exactly(config: Config) -> bool:
    """Return whether log-probs of training are those of sampling; with a lag, the weights are others."""
    return config.rollout.exact and not config.trainer.lag


def exactly(loss: LossFunction) -> LossFunction:
    """Return the same loss, which first raises RolloutError if a sampled token has another log-prob."""

    def checked(outputs: Outputs, rows: DataProto) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        require_exact(rows, outputs["log_probs"].detach())
        return loss(outputs, rows)

    return checked


def require_exact(rows: DataProto, log_probs: Tensor) -> None:
    """Raise RolloutError if the log-prob (rows, response_len) of a sampled token is not that of the rollout engine."""
    sampled, mask = rows.batch["rollout_log_probs"], rows.batch["response_mask"].bool()
    different = mask & (log_probs != sampled)
    if not different.any():
        return
    row, token = different.nonzero()[0].tolist()
    raise RolloutError(
        f"rollout.exact=true: {int(different.sum())} of {int(mask.sum())} sampled tokens have another log-prob in "
        f"training, the first in row {row}, token {token}: {float(log_probs[row, token]):.9g}, sampled with "
        f"{float(sampled[row, token]):.9g}. Weights or arithmetic of the two differ, which is a fault: please report "
        "it with the output of `hybridflow doctor`. rollout.exact=false goes on without this check."
    )
