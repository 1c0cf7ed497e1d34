"""Controllers of the KL penalty's coefficient: constant, or adapted toward a target KL."""

from hybridflow.algorithms.guards import require_count, require_in_range
from hybridflow.errors import AlgorithmError

MAX_ERROR = 0.2
"""Bound of the relative error of the KL in one update, in both directions."""


class FixedKLController:
    """A controller with a constant coefficient."""

    def __init__(self, coef: float) -> None:
        require_in_range("FixedKLController", "coef", coef, minimum=0)
        self.coef = float(coef)

    def update(self, kl: float, num_samples: int) -> None:
        """Do nothing; both controllers have the same interface."""

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient for a checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the coefficient. Raises AlgorithmError for another state."""
        self.coef = _coef_of("FixedKLController", state)


class AdaptiveKLController:
    """A proportional controller in log space, https://arxiv.org/abs/1909.08593, section 2.2.

        error = clip((kl - target) / target, -0.2, 0.2)
        coef  = coef * (1 + error * min(num_samples / horizon, 1))

    The paper's constant K is num_samples / horizon, so that the change per sample does not depend on the batch size.
    One update changes the coefficient by at most a fifth, so that a batch larger than the horizon cannot flip its sign.
    `target` has the unit of the `kl` passed to `update` (nats per token for a mean over tokens).
    """

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        require_in_range("AdaptiveKLController", "coef", coef, minimum=0)
        require_in_range("AdaptiveKLController", "target", target, minimum=0, above_minimum=True)
        require_count("AdaptiveKLController", "horizon", horizon, minimum=1)
        self.coef, self.target, self.horizon = float(coef), float(target), horizon

    def update(self, kl: float, num_samples: int) -> None:
        """Update the coefficient after a batch of `num_samples` responses with mean KL `kl`."""
        require_in_range("AdaptiveKLController.update", "kl", kl, minimum=float("-inf"))
        require_count("AdaptiveKLController.update", "num_samples", num_samples, minimum=0)
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        self.coef *= 1 + error * min(num_samples / self.horizon, 1)

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient for a checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the coefficient. Raises AlgorithmError for another state."""
        self.coef = _coef_of("AdaptiveKLController", state)


def _coef_of(controller: str, state: dict[str, float]) -> float:
    if set(state) != {"coef"}:
        raise AlgorithmError(f"{controller}.load_state_dict: the state has keys {sorted(state)}; it must have 'coef'.")
    require_in_range(f"{controller}.load_state_dict", "coef", state["coef"], minimum=0)
    return float(state["coef"])
