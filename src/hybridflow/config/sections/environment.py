"""Keys of episodes: the user's classes of environments, and the bounds of an episode."""

from typing import Annotated

from pydantic import Field

from hybridflow.config.sections.base import NoneAsText, NonNegative, Positive, Section


class EnvironmentConfig(Section):
    """Environments, which answer the turns of a model; with none, a response is one turn."""

    classes: dict[str, str] = Field(
        default={},
        description="Classes of environments by name, as in {calculator = 'path.py:Calculator'}. With several, the "
        "data_source of a row names its class. They give the rewards, and run in reward.processes.",
    )
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={},
        description="Shares of the classes in the training prompts, as in {calculator = 2, maze = 1}; rows are then "
        "drawn with replacement. Empty: the rows as data.order says.",
    )
    max_turns: Positive = Field(default=8, description="Largest number of turns of an episode.")
    max_seconds: Annotated[Annotated[float, Field(gt=0)] | None, NoneAsText] = Field(
        default=None,
        description="Seconds after which an episode has no further turn, counted from its beginning; 'none': no limit.",
    )
    max_rows: NonNegative = Field(
        default=0,
        description="Rows of tokens that an episode may have, each with what the template makes of the turns before; "
        "0: 1 if the template never changes earlier turns (`hybridflow check-template`), otherwise max_turns.",
    )
