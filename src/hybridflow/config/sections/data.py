"""What is learned from: prompts and the rewards of responses."""

from typing import Annotated, Literal

from pydantic import Field

from hybridflow.config.sections.base import (
    Fraction,
    NoneAsText,
    NonNegative,
    Parameter,
    Positive,
    Section,
    UserFunction,
    named_or_user,
)

OrderName = Literal["shuffled", "sequential", "curriculum", "weighted"]
OverlongName = Literal["drop", "error", "truncate-left", "truncate-right", "truncate-middle"]


class DataConfig(Section):
    train_files: tuple[str, ...] = Field(
        default=(),
        description="Parquet files of training prompts (sft: with responses; dpo and reward-model: with preferences).",
    )
    val_files: tuple[str, ...] = Field(default=(), description="Parquet files of validation prompts.")
    train_batch_size: Positive = Field(default=64, description="Prompts in one training step.")
    max_prompt_length: Positive = Field(default=512, description="Longest prompt, in tokens.")
    max_response_length: Positive = Field(default=512, description="Longest response, in tokens.")
    overlong_prompts: OverlongName = Field(
        default="drop", description="What happens to a prompt longer than max_prompt_length."
    )
    order: Annotated[OrderName | UserFunction, named_or_user(OrderName)] = Field(
        default="shuffled",
        description="How an epoch visits the training rows: shuffled anew, as they are, ascending by data.order_by "
        "(curriculum), or drawn with weights of data.order_by; or a function of yours (docs/data.md).",
    )
    order_by: str = Field(
        default="", description="The column, or name in extra_info, of the numbers that data.order reads."
    )
    chat_template: bool = Field(
        default=True,
        description="Apply the tokenizer's chat template where it has one; otherwise messages are joined by newlines.",
    )


class RewardConfig(Section):
    function: str = Field(
        default="", description="'path.py:function' scoring a response; empty chooses by each row's data_source."
    )
    kwargs: dict[str, Parameter] = Field(
        default={}, description="Further arguments of reward.function, as in {url = 'http://127.0.0.1:8000/score'}."
    )
    model_path: str = Field(
        default="",
        description="Directory of a reward model that scores in place of a function: a sequence classifier with one "
        "label, with its own tokenizer and chat template.",
    )
    weights: dict[str, float] = Field(
        default={},
        description="Names of numbers that the function returns and their weights: the score is the weighted sum, as "
        "in {correct = 1.0, format = 0.2}; empty: the score it returns.",
    )
    overlong_buffer: NonNegative = Field(
        default=0,
        description="Tokens before data.max_response_length in which a response loses up to overlong_penalty of its "
        "score, in proportion; 0 is none. Validation scores stay as they are.",
    )
    overlong_penalty: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="What a response of data.max_response_length tokens loses."
    )
    on_error: Literal["stop", "zero"] = Field(
        default="stop",
        description="An exception in the function, a crash or a time-out stops the run, or scores error_score (see "
        "reward/error_rate and reward/timeout_rate).",
    )
    error_score: float = Field(default=0.0, description="Score of a sample whose reward failed when on_error = 'zero'.")
    max_failure_rate: Fraction = Field(
        default=0.1,
        description="on_error = 'zero': share of a rank's samples whose reward may fail; above it the run stops and "
        "shows some of them.",
    )
    processes: NonNegative = Field(
        default=2,
        description="Processes of each rank that run reward.function, apart from the run; 0 calls it in the rank "
        "itself, where a debugger finds it and a crash ends the run.",
    )
    concurrency: Positive = Field(
        default=32, description="Samples that each of these processes has in hand where reward.function is async."
    )
    timeout_s: Annotated[Annotated[float, Field(gt=0)] | None, NoneAsText] = Field(
        default=60.0,
        description="Seconds that reward.function may take for a sample in its process before it is killed and the "
        "sample has failed; 'none' is no limit.",
    )
    memory_bytes: NonNegative = Field(
        default=4 * 2**30, description="Memory that such a process may allocate; 0 is no limit."
    )
