"""Checks of the data, of validation, and of rewards."""

from collections.abc import Iterator

from hybridflow.config.checks.refusal import Refusal
from hybridflow.config.sections.config import Config

REWARD_ARGUMENTS = (
    *("data_source", "solution_str", "ground_truth", "extra_info"),
    *("data_sources", "solution_strs", "ground_truths", "extra_infos"),
)
"""Arguments of a reward function, for one sample or for a batch."""


def _order(config: Config) -> Iterator[str]:
    data = config.data
    if data.order in ("curriculum", "weighted") and not data.order_by:
        yield f"data.order={data.order!r} needs a column of numbers, but data.order_by is empty; set it"
    if data.order in ("shuffled", "sequential") and data.order_by:
        yield (
            f"data.order_by={data.order_by!r} has no effect with data.order={data.order!r}; use order = 'curriculum' "
            "or 'weighted', or unset order_by"
        )


def _reward(config: Config) -> Iterator[str]:
    reward = config.reward
    if reward.weights and reward.model_path:
        yield (
            f"reward.weights={reward.weights} needs the numbers of a reward function, but reward.model_path="
            f"{reward.model_path!r} gives one score; set only one of them"
        )
    if reward.overlong_buffer > config.data.max_response_length:
        yield (
            f"reward.overlong_buffer={reward.overlong_buffer} exceeds data.max_response_length="
            f"{config.data.max_response_length}; use at most {config.data.max_response_length}"
        )
    if reward.kwargs and not reward.function:
        yield f"reward.kwargs={reward.kwargs} needs reward.function, which is empty; set it"
    taken = [name for name in reward.kwargs if name in REWARD_ARGUMENTS]
    if taken:
        yield f"reward.kwargs.{taken[0]} is reserved for the sample; reserved names: {', '.join(REWARD_ARGUMENTS)}"


CHECKS = (_order, _reward)
REFUSALS = (
    Refusal(
        "reward.model_path",
        "reward.function",
        "both give the score",
        "set only one of them",
        lambda c: bool(c.reward.model_path and c.reward.function),
    ),
)
