"""Keys of fault injection, which tries whether a set-up survives the loss of a process and other failures."""

from typing import Annotated

from pydantic import Field

from hybridflow.config.sections.base import NonNegative, Section


class FaultsConfig(Section):
    """Faults that the run injects into itself; none by default."""

    plan: tuple[str, ...] = Field(
        default=(),
        description='Faults to inject, as in ["3: kill actor_rollout/1 in backward"]: step (1 is the first), kind, '
        "worker and phase. Each fires once in the life of a run directory.",
    )
    random: Annotated[int, Field(ge=0, le=10000)] = Field(
        default=0, description="Draw N further faults, spread over the steps, phases, kinds and workers of the run."
    )
    seed: NonNegative = Field(default=0, description="Seed of the drawn faults.")
    delay_s: Annotated[float, Field(ge=0, le=86400)] = Field(
        default=5.0, description="Seconds that a fault of kind delay takes."
    )

    @property
    def is_empty(self) -> bool:
        """Whether the run injects no fault."""
        return not self.plan and not self.random
