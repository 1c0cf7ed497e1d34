"""Keys of the training data and of the rewards."""

from typing import Annotated, Literal

from pydantic import Field

from hybridflow.config.sections.base import (
    DateOrAuto,
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
ColumnName = Literal["prompt", "answer", "response", "messages", "tools", "chosen", "rejected"]
OverlongName = Literal["drop", "error", "truncate-left", "truncate-right", "truncate-middle"]


class DataConfig(Section):
    """Data files, batch size, length limits and row order."""

    train_files: tuple[str, ...] = Field(
        default=(),
        description="Files of training prompts (sft: with responses; dpo, reward-model: with preferences): .parquet, "
        ".jsonl, .json or .csv, a folder of datasets, or hf://datasets/OWNER/NAME/PATH.",
    )
    val_files: tuple[str, ...] = Field(default=(), description="Files of validation prompts.")
    columns: dict[ColumnName, str] = Field(
        default={},
        description="Columns of the files by our names (prompt, answer, response, messages, tools, chosen, "
        "rejected), as in {prompt = 'question'}; a.b names a nested value. Files with our names need no entry.",
    )
    map: UserFunction = Field(
        default="",
        description="Function that converts each record of the files, or returns None to drop it, as "
        "'path.py:function'.",
    )
    train_batch_size: Positive = Field(default=64, description="Prompts in one training step.")
    max_prompt_length: Positive = Field(default=512, description="Largest length of a prompt, in tokens.")
    max_response_length: Positive = Field(default=512, description="Largest length of a response, in tokens.")
    overlong_prompts: OverlongName = Field(default="drop", description="Treatment of too long prompts.")
    order: Annotated[OrderName | UserFunction, named_or_user(OrderName)] = Field(
        default="shuffled",
        description="Order of the training rows: shuffled anew in each epoch, sequential, curriculum (ascending by "
        "data.order_by), weighted (sampled in proportion to data.order_by), or your own function (docs/data.md).",
    )
    order_by: str = Field(default="", description="Column, or key in extra_info, with numbers for data.order.")
    chat_template: bool = Field(
        default=True,
        description="Apply the tokenizer's chat template, if it has one; otherwise join messages with newlines.",
    )
    date: Annotated[str, DateOrAuto] = Field(
        default="auto",
        description="Today's date for chat templates (strftime_now), as in 2026-11-28; the time is 00:00. auto: the "
        "date of the run's start, also when it resumes.",
    )


class RewardConfig(Section):
    """Reward function or reward model, and its limits."""

    function: str = Field(
        default="", description="Reward function as 'path.py:function'; empty: chosen by the data_source of each row."
    )
    kwargs: dict[str, Parameter] = Field(
        default={}, description="Extra arguments of reward.function, as in {url = 'http://127.0.0.1:8000/score'}."
    )
    model_path: str = Field(
        default="",
        description="Directory of a reward model to use instead of a function: a sequence classifier with one label, "
        "its own tokenizer and chat template.",
    )
    weights: dict[str, float] = Field(
        default={},
        description="Weights of the numbers that the function returns, as in {correct = 1.0, format = 0.2}; the score "
        "is their weighted sum. Empty: the returned score.",
    )
    overlong_buffer: NonNegative = Field(
        default=0,
        description="Soft length penalty: over the last N tokens before data.max_response_length the penalty grows "
        "linearly to overlong_penalty; 0: off. Validation scores have no penalty.",
    )
    overlong_penalty: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="Penalty subtracted from the score of a response of data.max_response_length tokens."
    )
    on_error: Literal["stop", "zero"] = Field(
        default="stop",
        description="After an exception, crash or timeout of the reward function: stop the run, or use error_score as "
        "the score and count it in reward/error_rate and reward/timeout_rate.",
    )
    error_score: float = Field(default=0.0, description="Score of a failed sample with on_error = 'zero'.")
    max_failure_rate: Fraction = Field(
        default=0.1,
        description="on_error = 'zero': largest share of failed samples in a rank's batch; above it the run stops "
        "and shows some of them.",
    )
    processes: NonNegative = Field(
        default=2,
        description="Processes of each rank that run reward.function; 0: run it in the rank itself, for debugging (a "
        "crash then ends the run).",
    )
    concurrency: Positive = Field(
        default=32, description="Samples that each of reward.processes scores at once, if reward.function is async."
    )
    timeout_s: Annotated[Annotated[float, Field(gt=0)] | None, NoneAsText] = Field(
        default=60.0,
        description="Deadline of reward.function for a sample, in seconds; then its process is killed and the sample "
        "counts as failed. 'none': no deadline.",
    )
    memory_bytes: NonNegative = Field(
        default=4 * 2**30, description="Memory limit of each of reward.processes, in bytes; 0: no limit."
    )
