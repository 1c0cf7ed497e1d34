"""From outcomes of reward functions to the scores of a batch: what a score is, and what a failure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hybridflow.environments.rewards.outcome import Outcome
from hybridflow.environments.rewards.table import ANSWERS
from hybridflow.errors import RewardConfigError, RewardError
from hybridflow.runtime.observe import get_logger

logger = get_logger(__name__)

MAX_SHOWN = 3
"""Number of failed samples that an error shows."""

_MAX_SCORE = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class RewardResult:
    """Scores of a batch, one entry for each row."""

    scores: Tensor
    """(batch,) float32."""
    failed: Tensor
    """(batch,) bool: the call of the reward function failed."""
    timed_out: Tensor
    """(batch,) bool: the call failed because it took too long."""
    extras: list[dict[str, float]]
    """Further numbers of each row by name."""
    answers: list[str | None]
    """The answer of each response, for votes; None if it is unknown or missing."""
    components: Tensor | None = None
    """With `weights`: the weighted numbers, (batch, len(weights)), in the order of `weights`."""

    @property
    def num_errors(self) -> int:
        """Number of failed calls."""
        return int(self.failed.sum())


@dataclass(frozen=True)
class _Row:
    score: float
    extras: dict[str, float]
    components: list[float]
    answer: str | None
    failed: bool = False
    timed_out: bool = False


@dataclass
class OutcomeReader:
    """Reads outcomes as scores.

    A failure, or a result that is not a score, is a `RewardError` that shows the sample; with `on_error="zero"` it is
    counted and scores `error_score`, up to a `max_failure_rate`. With `weights` the score is the weighted sum of
    numbers that the function returned, of which "score" is one; a missing number is an error like the others.
    `rows_of_step`: the rows of a step whose batch is read in parts; the rate is that of the step then.
    """

    on_error: Literal["stop", "zero"] = "stop"
    error_score: float = 0.0
    max_failure_rate: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)
    rows_of_step: float = 0.0

    def __post_init__(self) -> None:
        if self.on_error not in ("stop", "zero"):
            raise RewardConfigError(f"on_error={self.on_error!r} is not one of stop, zero.")
        if not abs(self.error_score) <= _MAX_SCORE:
            raise RewardConfigError(f"error_score={self.error_score} must be a finite float32 number.")
        self._step, self._num_failed, self._num_rows = -1, 0, 0  # the step that is read in parts, and its rows so far

    def read(
        self,
        names: Sequence[str],
        samples: Sequence[Mapping[str, Any]],
        prompts: Sequence[Any],
        outcomes: Sequence[Outcome],
        step: int | None,
    ) -> RewardResult:
        """Return the scores of the outcomes; `names` say what has made each. Raises RewardError for one without."""
        failures: list[RewardError] = []
        rows: list[_Row] = []
        for name, sample, prompt, outcome in zip(names, samples, prompts, outcomes, strict=True):
            try:
                rows.append(_row_of(name, self.weights, sample, prompt, outcome))
            except RewardError as error:
                if self.on_error == "stop":
                    fix = 'set reward.on_error="zero" to give such samples the score reward.error_score.'
                    raise RewardError(f"{error}\nFix the function, or {fix}") from error.__cause__
                failures.append(error)
                parts = [self.error_score] * len(self.weights)
                rows.append(_Row(self.error_score, {}, parts, None, True, outcome.kind == "timeout"))
        self._report(failures, len(rows), step)
        components = torch.tensor([row.components for row in rows], dtype=torch.float32)
        return RewardResult(
            torch.tensor([row.score for row in rows], dtype=torch.float32),
            torch.tensor([row.failed for row in rows], dtype=torch.bool),
            torch.tensor([row.timed_out for row in rows], dtype=torch.bool),
            [row.extras for row in rows],
            [row.answer for row in rows],
            components.reshape(len(rows), len(self.weights)) if self.weights else None,
        )

    def is_score(self, sample: Mapping[str, Any], outcome: Outcome) -> bool:
        """Return whether an outcome has a score."""
        try:
            _row_of("", self.weights, sample, None, outcome)
        except RewardError:
            return False
        return True

    def _report(self, failures: Sequence[RewardError], num_rows: int, step: int | None) -> None:
        """Log the failures; raise RewardError if there are too many."""
        num_failed, num_scored = self._count(len(failures), num_rows, step)
        if failures and num_failed > self.max_failure_rate * num_scored:
            shown = "\n".join(str(failure) for failure in failures[:MAX_SHOWN])
            raise RewardError(
                f"{num_failed} of {num_scored:.0f} rewards failed, more than reward.max_failure_rate="
                f"{self.max_failure_rate} allows. The first {min(len(failures), MAX_SHOWN)}:\n{shown}"
            )
        if failures:
            logger.warning(
                "%d of %d rewards failed and score %s. The first: %s",
                len(failures),
                num_rows,
                self.error_score,
                " | ".join(str(failures[0]).splitlines()),  # Ray mixes the lines of several processes
            )

    def _count(self, num_failed: int, num_rows: int, step: int | None) -> tuple[int, float]:
        """Return the failures and the rows to which the limit applies: with `rows_of_step` those of the step."""
        if step is None or not self.rows_of_step:
            return num_failed, num_rows
        if step != self._step:
            self._step, self._num_failed, self._num_rows = step, 0, 0
        self._num_failed, self._num_rows = self._num_failed + num_failed, self._num_rows + num_rows
        return self._num_failed, max(self._num_rows, self.rows_of_step)


def _row_of(name: str, weights: Mapping[str, float], sample: Mapping[str, Any], prompt: Any, outcome: Outcome) -> _Row:
    """Return the row of an outcome; raise a `RewardError` that shows the sample for every failure."""
    data_source, solution = sample["data_source"], sample["solution_str"]

    def failure(problem: str) -> RewardError:
        shown = {
            "data_source": data_source,
            "prompt": prompt,
            "solution": solution,
            "ground_truth": sample["ground_truth"],
        }
        text = "".join(f"\n  {key}: {_excerpt(value)}" for key, value in shown.items() if value is not None)
        return RewardError(f"{name} {problem.rstrip('.,')}. The sample:{text}")

    if outcome.kind in ("raised", "memory"):
        raise failure(f"raised {outcome.problem}") from outcome.cause
    if outcome.kind is not None:
        raise failure(outcome.problem)
    result = outcome.result
    if not isinstance(result, Mapping):
        if _as_float(result) is None:
            raise failure(f"returned {_excerpt(result)}, which is not a finite number or a dict with a 'score',")
        result = {"score": result}
    parts = [_as_float(result.get(name)) for name in weights or ("score",)]
    for key, part in zip(weights or ("score",), parts, strict=True):
        if part is None:
            raise failure(f"returned {_excerpt(dict(result))}, whose {key!r} is missing or not a finite number,")
    known = [part for part in parts if part is not None]
    score = sum(weight * part for weight, part in zip(weights.values(), known, strict=True)) if weights else known[0]
    numbers_beside: dict[str, float] = {}
    for key, value in result.items():
        if key in ("score", "answer") or not isinstance(value, int | float):
            continue
        as_float = _as_float(value)
        if as_float is None:
            raise failure(f"returned {_excerpt(dict(result))}, whose {key!r} is not finite,")
        numbers_beside[str(key)] = as_float
    answer = result.get("answer")
    if answer is None and data_source in ANSWERS:
        answer = ANSWERS[data_source](solution)
    return _Row(score, numbers_beside, known if weights else [], None if answer is None else str(answer))


def _as_float(value: Any) -> float | None:
    """Return a number as a float within the range of float32; None for anything else."""
    return float(value) if isinstance(value, int | float) and abs(value) <= _MAX_SCORE else None


def _excerpt(value: Any) -> str:
    """Return the `repr` of a value, without its middle if it exceeds 400 characters."""
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
