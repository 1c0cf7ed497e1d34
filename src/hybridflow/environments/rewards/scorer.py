"""Scoring of a batch of responses by reward functions, and the handling of their failures."""

import hashlib
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hybridflow.environments.processes.arguments import check_signature, load_reward_function, takes_names
from hybridflow.environments.processes.reward_runner import RewardRunner, Sample, batch_of
from hybridflow.environments.rewards.in_rank import call_here
from hybridflow.environments.rewards.journal import RewardJournal
from hybridflow.environments.rewards.outcome import Outcome, split
from hybridflow.environments.rewards.table import ANSWERS, IN_PROCESSES, RewardFunction, reward_of
from hybridflow.errors import RewardConfigError, RewardError
from hybridflow.runtime.observe import get_logger
from hybridflow.runtime.random_streams import derive_seed

logger = get_logger(__name__)

MAX_SHOWN = 3
"""Number of failed samples that an error shows."""

_MAX_SCORE = float(np.finfo(np.float32).max)


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


class RewardScorer:
    """Scorer of responses by one function, or by the built-in function of each row's data source.

    `function` is a callable, 'path.py:function', 'module:function', or None or "" for the table `REWARDS`. It gets the
    keyword arguments data_source, solution_str, ground_truth, extra_info (copies) and `kwargs`, and returns a number,
    or a dict with a `score` whose other numbers become `extras`. It may be `async`, or take the plurals of the four
    arguments, lists of all rows, and return a list. `runner` calls it in processes; `table_runner` does so for the
    functions of the table that may take long; `journal` stores their outcomes of a step. `rows_of_step`: the rows of a
    step whose batch is scored in parts; `max_failure_rate` then limits the failures of the step, not those of a part.

    An exception in the function, or an invalid result, is a `RewardError` that shows the sample; with
    `on_error="zero"` it is counted and scores `error_score`. With `weights` the score is the weighted sum of numbers
    that the function returned, of which "score" is one; a missing number is an error like the others. The answer of a
    response is the text `answer` of the dict, or the one that `ANSWERS` finds for its data source.
    """

    def __init__(
        self,
        function: RewardFunction | str | None = None,
        *,
        on_error: Literal["stop", "zero"] = "stop",
        error_score: float = 0.0,
        max_failure_rate: float = 1.0,
        weights: Mapping[str, float] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        concurrency: int = 32,
        runner: RewardRunner | None = None,
        table_runner: RewardRunner | None = None,
        journal: RewardJournal | None = None,
        rows_of_step: float = 0.0,
    ) -> None:
        if on_error not in ("stop", "zero"):
            raise RewardConfigError(f"on_error={on_error!r} is not one of stop, zero.")
        if not abs(error_score) <= _MAX_SCORE:
            raise RewardConfigError(f"error_score={error_score} must be a finite float32 number.")
        if isinstance(function, str):
            function = load_reward_function(function, kwargs or {}) if function and runner is None else None
        elif function is not None:
            check_signature(function, getattr(function, "__name__", repr(function)), kwargs or {})
        self._function, self._on_error, self._error_score = function, on_error, error_score
        self._weights, self._kwargs, self._max_failure_rate = dict(weights or {}), dict(kwargs or {}), max_failure_rate
        self._runner, self._table_runner, self._journal = runner, table_runner, journal
        self._concurrency, self._rows_of_step = concurrency, rows_of_step
        self._step, self._num_failed, self._num_rows = -1, 0, 0  # the step that is scored in parts, and its rows so far

    def score(
        self,
        solution_texts: Sequence[str],
        data_sources: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[Any] | None = None,
        raw_prompts: Sequence[Any] | None = None,
        *,
        seed_keys: tuple[int, ...] = (),
        step: int | None = None,
    ) -> RewardResult:
        """Score each response; all arguments have one entry for each row, `raw_prompts` is only shown in errors.

        In processes, the random state of each sample is seeded by `seed_keys` and the response. The journal stores the
        outcomes of `step`; None disables the journal.

        Raises `RewardError` for arguments of different lengths and for a data source without a reward function,
        independent of `on_error`.
        """
        return self.begin(
            solution_texts, data_sources, ground_truths, extra_infos, raw_prompts, seed_keys=seed_keys, step=step
        )()

    def begin(
        self,
        solution_texts: Sequence[str],
        data_sources: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[Any] | None = None,
        raw_prompts: Sequence[Any] | None = None,
        *,
        seed_keys: tuple[int, ...] = (),
        step: int | None = None,
    ) -> Callable[[], RewardResult]:
        """Submit the responses to the processes, see `score`; return a function that waits and returns the scores.

        It may be called in another thread. Functions without processes are called before this returns.
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

        samples = [
            {
                "data_source": source,
                "solution_str": solution,
                "ground_truth": truth,
                "extra_info": {} if info is None else info,
            }
            for source, solution, truth, info in zip(
                data_sources, solution_texts, ground_truths, extra_infos, strict=True
            )
        ]
        wait = self._begin_outcomes(functions, samples, raw_prompts, seed_keys, step)
        return lambda: self.of_outcomes([*map(self._name_of, functions)], samples, raw_prompts, wait(), step)

    def of_outcomes(
        self,
        names: Sequence[str],
        samples: Sequence[Mapping[str, Any]],
        prompts: Sequence[Any],
        outcomes: Sequence[Outcome],
        step: int | None,
    ) -> RewardResult:
        """Return the scores of the outcomes; `names` say what has made each. Raises RewardError as `score`."""
        failures: list[RewardError] = []
        rows: list[_Row] = []
        for name, sample, prompt, outcome in zip(names, samples, prompts, outcomes, strict=True):
            try:
                rows.append(_read(name, self._weights, sample, prompt, outcome))
            except RewardError as error:
                if self._on_error == "stop":
                    fix = 'set reward.on_error="zero" to give such samples the score reward.error_score.'
                    raise RewardError(f"{error}\nFix the function, or {fix}") from error.__cause__
                failures.append(error)
                parts = [self._error_score] * len(self._weights)
                rows.append(_Row(self._error_score, {}, parts, None, True, outcome.kind == "timeout"))
        self._report(failures, len(rows), step)
        components = torch.tensor([row.components for row in rows], dtype=torch.float32)
        return RewardResult(
            torch.tensor([row.score for row in rows], dtype=torch.float32),
            torch.tensor([row.failed for row in rows], dtype=torch.bool),
            torch.tensor([row.timed_out for row in rows], dtype=torch.bool),
            [row.extras for row in rows],
            [row.answer for row in rows],
            components.reshape(len(rows), len(self._weights)) if self._weights else None,
        )

    def _report(self, failures: Sequence[RewardError], num_rows: int, step: int | None) -> None:
        """Log the failures; raise RewardError if there are too many."""
        num_failed, num_scored = self._count(len(failures), num_rows, step)
        if failures and num_failed > self._max_failure_rate * num_scored:
            shown = "\n".join(str(failure) for failure in failures[:MAX_SHOWN])
            raise RewardError(
                f"{num_failed} of {num_scored:.0f} rewards failed, more than reward.max_failure_rate="
                f"{self._max_failure_rate} allows. The first {min(len(failures), MAX_SHOWN)}:\n{shown}"
            )
        if failures:
            logger.warning(
                "%d of %d rewards failed and score %s. The first: %s",
                len(failures),
                num_rows,
                self._error_score,
                " | ".join(str(failures[0]).splitlines()),  # Ray mixes the lines of several processes
            )

    def _count(self, num_failed: int, num_rows: int, step: int | None) -> tuple[int, float]:
        """Return the failures and the rows to which the limit applies: with `rows_of_step` those of the step."""
        if step is None or not self._rows_of_step:
            return num_failed, num_rows
        if step != self._step:
            self._step, self._num_failed, self._num_rows = step, 0, 0
        self._num_failed, self._num_rows = self._num_failed + num_failed, self._num_rows + num_rows
        return self._num_failed, max(self._num_rows, self._rows_of_step)

    def _begin_outcomes(
        self,
        functions: Sequence[RewardFunction | None],
        samples: Sequence[Mapping[str, Any]],
        prompts: Sequence[Any],
        seed_keys: tuple[int, ...],
        step: int | None,
    ) -> Callable[[], list[Outcome]]:
        """Return a function that waits for the outcome of each sample; the rows of one function are called together."""
        rows_of: dict[RewardFunction | None, list[int]] = {}
        for row, function in enumerate(functions):
            rows_of.setdefault(None if self._runner_of(function) else function, []).append(row)
        waits: list[Callable[[], list[Outcome]]] = []
        for function, rows in rows_of.items():
            here = [samples[row] for row in rows]
            if function is None:
                seeds = [_seed_of(sample, seed_keys) for sample in here]
                waits.append(
                    self._begin_in_processes(list(zip(seeds, here, strict=True)), [prompts[row] for row in rows], step)
                )
            else:
                if takes_names(function):
                    here = [{**samples[row], "prompt": prompts[row]} for row in rows]
                found = call_here(function, here, self._kwargs, self._concurrency)
                waits.append(lambda found=found: found)

        def wait() -> list[Outcome]:
            outcomes: dict[int, Outcome] = {}
            for rows, wait_for_rows in zip(rows_of.values(), waits, strict=True):
                outcomes |= dict(zip(rows, wait_for_rows(), strict=True))
            return [outcomes[row] for row in range(len(samples))]

        return wait

    def _begin_in_processes(
        self, samples: Sequence[Sample], prompts: Sequence[Any], step: int | None
    ) -> Callable[[], list[Outcome]]:
        """Submit the samples that have no outcome in the journal of this step; return a function that waits."""
        runner = self._runner or self._table_runner
        assert runner is not None
        journal = None if step is None else self._journal
        if journal and step is not None:
            journal.open(step)
        runner.start()
        if runner.kind.takes_names:
            samples = [
                (seed, {**sample, "prompt": prompt}) for (seed, sample), prompt in zip(samples, prompts, strict=True)
            ]
        rows = range(len(samples))
        requests: list[tuple[Sequence[int], Sample, Any]] = [([row], samples[row], prompts[row]) for row in rows]
        if runner.kind.takes_batches and samples:
            requests = [(rows, batch_of(samples), list(prompts))]

        def parts(rows: Sequence[int], outcome: Outcome) -> list[Outcome]:
            return split(outcome, len(rows)) if runner.kind.takes_batches else [outcome]

        def is_answer(rows: Sequence[int], outcome: Outcome) -> bool:
            try:
                for row, part in zip(rows, parts(rows, outcome), strict=True):
                    _read(runner.name, self._weights, samples[row][1], None, part)
            except RewardError:
                return False
            return True

        calls = [journal.call(arguments, prompt) for _, (_, arguments), prompt in requests] if journal else []
        known = [call.known for call in calls] if journal else [None] * len(requests)
        if self._on_error == "stop":  # failures kept under "zero" are computed again
            known = [
                outcome if outcome and is_answer(rows, outcome) else None
                for (rows, _, _), outcome in zip(requests, known, strict=True)
            ]
        missing = [number for number, outcome in enumerate(known) if outcome is None]

        def write(number: int, outcome: Outcome) -> None:
            if journal:
                number = missing[number]
                journal.write(calls[number], outcome, is_answer=is_answer(requests[number][0], outcome))

        submitted = runner.submit([requests[number][1] for number in missing], write)

        def wait() -> list[Outcome]:
            found = iter(runner.wait(submitted))
            outcomes = [outcome or next(found) for outcome in known]
            return [
                part for (rows, _, _), outcome in zip(requests, outcomes, strict=True) for part in parts(rows, outcome)
            ]

        return wait

    def _runner_of(self, function: RewardFunction | None) -> RewardRunner | None:
        if self._function is None and function in IN_PROCESSES:
            return self._table_runner
        return self._runner

    def _name_of(self, function: RewardFunction | None) -> str:
        if function is None and self._runner is not None:
            return f"reward function {self._runner.name.rpartition(':')[2]}"
        return f"reward function {getattr(function, '__name__', repr(function))}"

    def _choose(self, data_source: str) -> RewardFunction | None:
        if self._function is not None or self._runner is not None:
            return self._function
        return reward_of(data_source)


def _seed_of(sample: Mapping[str, Any], seed_keys: tuple[int, ...]) -> int:
    text = f"{sample['data_source']}\0{sample['solution_str']}"
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=7).digest()
    return derive_seed(*seed_keys, int.from_bytes(digest, "little"))


def _read(
    subject: str,
    weights: Mapping[str, float],
    sample: Mapping[str, Any],
    raw_prompt: Any,
    outcome: Outcome,
) -> _Row:
    """Return the row of an outcome; raise a `RewardError` that shows the sample for every failure."""
    data_source, solution = sample["data_source"], sample["solution_str"]

    def failure(problem: str) -> RewardError:
        shown = {
            "data_source": data_source,
            "prompt": raw_prompt,
            "solution": solution,
            "ground_truth": sample["ground_truth"],
        }
        text = "".join(f"\n  {key}: {_excerpt(value)}" for key, value in shown.items() if value is not None)
        return RewardError(f"{subject} {problem.rstrip('.,')}. The sample:{text}")

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
    for name, part in zip(weights or ("score",), parts, strict=True):
        if part is None:
            raise failure(f"returned {_excerpt(dict(result))}, whose {name!r} is missing or not a finite number,")
    known = [part for part in parts if part is not None]
    score = sum(weight * part for weight, part in zip(weights.values(), known, strict=True)) if weights else known[0]
    numbers_beside: dict[str, float] = {}
    for name, value in result.items():
        if name in ("score", "answer") or not _is_number(value):
            continue
        as_float = _as_float(value)
        if as_float is None:
            raise failure(f"returned {_excerpt(dict(result))}, whose {name!r} is not finite,")
        numbers_beside[str(name)] = as_float
    answer = result.get("answer")
    if answer is None and data_source in ANSWERS:
        answer = ANSWERS[data_source](solution)
    return _Row(score, numbers_beside, known if weights else [], None if answer is None else str(answer))


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real | np.bool_)


def _as_float(value: Any) -> float | None:
    """Return a number as a float within the range of float32; None for anything else."""
    if not _is_number(value):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) and abs(value) <= _MAX_SCORE else None


def _excerpt(value: Any) -> str:
    """Return the `repr` of a value, without its middle if it exceeds 400 characters."""
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
