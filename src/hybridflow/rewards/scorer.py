"""Scores a batch of responses, one call of the reward function each, and decides what a failure of it means."""

import copy
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hybridflow.errors import RewardError
from hybridflow.observability import get_logger
from hybridflow.rewards.table import REWARDS, RewardFunction
from hybridflow.rewards.user import check_signature, load_reward_function

logger = get_logger(__name__)

_MAX_SCORE = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class RewardResult:
    """Of each row: its score (batch,) float32, whether its call failed (batch,) bool, its further numbers by name."""

    scores: Tensor
    failed: Tensor
    extras: list[dict[str, float]]

    @property
    def num_errors(self) -> int:
        """Failed calls."""
        return int(self.failed.sum())


class RewardScorer:
    """Scores responses by one function, or by each row's data source.

    `function` is a callable, 'path.py:function', 'module:function', or None or "" for the table `REWARDS`. It gets the
    keyword arguments data_source, solution_str, ground_truth, extra_info (its own copies) and returns a number, or a
    dict with a `score` whose other numbers become `extras`. An exception in it, and anything else it returns, is a
    `RewardError` showing the sample; with `on_error="zero"` it is counted and scores `error_score`.
    """

    def __init__(
        self,
        function: RewardFunction | str | None = None,
        *,
        on_error: Literal["stop", "zero"] = "stop",
        error_score: float = 0.0,
    ) -> None:
        if on_error not in ("stop", "zero"):
            raise RewardError(f"on_error={on_error!r} is not one of stop, zero.")
        if not abs(error_score) <= _MAX_SCORE:
            raise RewardError(f"error_score={error_score} must be a finite float32 number.")
        if isinstance(function, str):
            function = load_reward_function(function) if function else None
        elif function is not None:
            check_signature(function, getattr(function, "__name__", repr(function)))
        self._function, self._on_error, self._error_score = function, on_error, error_score

    def score(
        self,
        solution_texts: Sequence[str],
        data_sources: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[Any] | None = None,
        raw_prompts: Sequence[Any] | None = None,
    ) -> RewardResult:
        """Score each response; all arguments have one entry a row, `raw_prompts` is only shown in errors.

        Raises `RewardError` for arguments of different lengths and for a data source that no function is known for,
        whatever `on_error` says.
        """
        num_rows = len(solution_texts)
        extra_infos = [None] * num_rows if extra_infos is None else extra_infos
        raw_prompts = [None] * num_rows if raw_prompts is None else raw_prompts
        columns = (data_sources, ground_truths, extra_infos, raw_prompts)
        if any(len(column) != num_rows for column in columns):
            names = ("data_sources", "ground_truths", "extra_infos", "raw_prompts")
            lengths = ", ".join(f"{len(column)} {name}" for name, column in zip(names, columns, strict=True))
            raise RewardError(f"{num_rows} solution_texts, but {lengths}; give one of each for every row.")
        functions = [self._choose(data_source) for data_source in data_sources]

        scores: list[float] = []
        extras: list[dict[str, float]] = []
        failed: list[bool] = []
        failures: list[RewardError] = []
        for function, solution, source, truth, info, prompt in zip(functions, solution_texts, *columns, strict=True):
            failed.append(False)
            try:
                score, numbers_beside = _call(function, source, solution, truth, info, prompt)
            except RewardError as error:
                if self._on_error == "stop":
                    raise
                failures.append(error)
                failed[-1], score, numbers_beside = True, self._error_score, {}
            scores.append(score)
            extras.append(numbers_beside)
        if failures:
            logger.warning(
                "%d of %d rewards failed and score %s. The first: %s",
                len(failures),
                num_rows,
                self._error_score,
                failures[0],
            )
        return RewardResult(torch.tensor(scores, dtype=torch.float32), torch.tensor(failed, dtype=torch.bool), extras)

    def _choose(self, data_source: str) -> RewardFunction:
        if self._function is not None:
            return self._function
        if data_source not in REWARDS:
            raise RewardError(
                f"no reward function is known for data_source {data_source!r}; known are {', '.join(sorted(REWARDS))}. "
                f"Give your own as reward.function = 'path.py:function'."
            )
        return REWARDS[data_source]


def _call(
    function: RewardFunction, data_source: str, solution: str, ground_truth: Any, extra_info: Any, raw_prompt: Any
) -> tuple[float, dict[str, float]]:
    """Return (score, other numbers) of one response; every failure is a `RewardError` that shows the sample."""

    def failure(problem: str) -> RewardError:
        shown = {"data_source": data_source, "prompt": raw_prompt, "solution": solution, "ground_truth": ground_truth}
        sample = "".join(f"\n  {name}: {_excerpt(value)}" for name, value in shown.items() if value is not None)
        name = getattr(function, "__name__", repr(function))
        return RewardError(f"reward function {name} {problem} for this sample:{sample}")

    try:
        result = function(
            data_source=data_source,
            solution_str=solution,
            ground_truth=copy.deepcopy(ground_truth),
            extra_info=copy.deepcopy(extra_info) if extra_info is not None else {},
        )
    except (Exception, SystemExit) as error:  # the function may be the user's, and may raise anything
        raise failure(f"raised {type(error).__name__}: {error}") from error

    if not isinstance(result, Mapping):
        score = _as_float(result)
        if score is None:
            raise failure(f"returned {_excerpt(result)}, which is not a finite number or a dict with a 'score',")
        return score, {}
    score = _as_float(result.get("score"))
    if score is None:
        raise failure(f"returned {_excerpt(dict(result))}, whose 'score' is missing or not a finite number,")
    numbers_beside: dict[str, float] = {}
    for name, value in result.items():
        if name == "score" or not _is_number(value):
            continue
        as_float = _as_float(value)
        if as_float is None:
            raise failure(f"returned {_excerpt(dict(result))}, whose {name!r} is not finite,")
        numbers_beside[str(name)] = as_float
    return score, numbers_beside


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real | np.bool_)


def _as_float(value: Any) -> float | None:
    """A number as a float that float32 can hold; None for anything else."""
    if not _is_number(value):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) and abs(value) <= _MAX_SCORE else None


def _excerpt(value: Any, max_chars: int = 400) -> str:
    """A value as it would be typed, its middle left out beyond `max_chars`."""
    text = repr(value)
    half = max_chars // 2
    return text if len(text) <= max_chars else f"{text[:half]} ... {text[-half:]}"
