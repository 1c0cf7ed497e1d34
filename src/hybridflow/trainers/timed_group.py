"""A worker group whose calls are timed under the name of their stage, so that the loop reads like the algorithm."""

from collections.abc import Callable, MutableMapping
from typing import Any

from hybridflow.controller import WorkerGroup
from hybridflow.observability import timed

STAGES = {
    "generate_sequences": "gen",
    "score": "reward",
    "compute_log_probs": "old_log_probs",
    "compute_ref_log_probs": "ref_log_probs",
    "compute_values": "values",
}
"""Method -> its stage in `timing_s/<stage>`; a method that is not named here is a stage of its own name."""


class TimedGroup:
    """Forwards every method call to the group and adds its seconds to `metrics`."""

    def __init__(self, group: WorkerGroup, metrics: MutableMapping[str, Any]) -> None:
        self._group, self._metrics = group, metrics

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._group, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with timed(STAGES.get(name, name), self._metrics):
                return method(*args, **kwargs)

        return call
