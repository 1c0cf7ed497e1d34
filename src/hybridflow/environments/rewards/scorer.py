"""Scoring of a batch of responses by reward functions, in this process or in others."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from hybridflow.environments.processes.arguments import check_signature, load_reward_function, takes_names
from hybridflow.environments.processes.reward_runner import RewardRunner, Sample, batch_of
from hybridflow.environments.rewards.in_rank import call_here
from hybridflow.environments.rewards.journal import RewardJournal
from hybridflow.environments.rewards.outcome import Outcome, split
from hybridflow.environments.rewards.scores import OutcomeReader, RewardResult
from hybridflow.environments.rewards.table import IN_PROCESSES, TABLE, RewardFunction, reward_of
from hybridflow.errors import RewardError
from hybridflow.runtime.random_streams import derive_seed


class RewardScorer:
    """Scorer of responses by one function, or by the built-in function of each row's data source.

    `function` is a callable, 'path.py:function', 'module:function', or None or "" for the table `REWARDS`. It gets the
    keyword arguments data_source, solution_str, ground_truth, extra_info (copies) and `kwargs`, and returns a number,
    or a dict with a `score` whose other numbers become `extras`. It may be `async`, or take the plurals of the four
    arguments, lists of all rows, and return a list. `runner` calls it in processes, that of `TABLE` only
    those functions of the table that may take long; `journal` stores their outcomes of a step. `OutcomeReader`
    documents the other arguments. The answer of a response is the text `answer` of the dict, or the one that `ANSWERS`
    finds for its data source.
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
        journal: RewardJournal | None = None,
        rows_of_step: float = 0.0,
    ) -> None:
        self._reader = OutcomeReader(on_error, error_score, max_failure_rate, weights or {}, rows_of_step)
        if isinstance(function, str):
            function = load_reward_function(function, kwargs or {}) if function and runner is None else None
        elif function is not None:
            check_signature(function, getattr(function, "__name__", repr(function)), kwargs or {})
        self._function, self._kwargs, self._concurrency = function, dict(kwargs or {}), concurrency
        self._runner, self._journal = runner, journal
        self._is_table = function is None and (runner is None or runner.name == TABLE)

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
        self, *given: Sequence[Any] | None, seed_keys: tuple[int, ...] = (), step: int | None = None
    ) -> Callable[[], RewardResult]:
        """Submit the columns of `score` to the processes; return a function that waits and returns the scores.

        It may be called in another thread. Functions without processes are called before this returns.
        """
        num_rows = len(given[0] or ())
        columns = [[None] * num_rows if column is None else column for column in given]
        if any(len(column) != num_rows for column in columns):
            names = ("data_sources", "ground_truths", "extra_infos", "raw_prompts")
            lengths = ", ".join(f"{len(column)} {name}" for name, column in zip(names, columns[1:], strict=True))
            raise RewardError(f"{num_rows} solution_texts, but {lengths}; give one of each for every row.")
        *_, prompts = columns
        samples = [
            {
                "data_source": source,
                "solution_str": solution,
                "ground_truth": truth,
                "extra_info": {} if info is None else info,
            }
            for solution, source, truth, info, _ in zip(*columns, strict=True)
        ]
        functions = [reward_of(each["data_source"]) if self._is_table else self._function for each in samples]
        wait = self._begin_outcomes(functions, samples, prompts, seed_keys, step)
        return lambda: self._reader.read([*map(self._name_of, functions)], samples, prompts, wait(), step)

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
            is_here = self._runner is None or (self._is_table and function not in IN_PROCESSES)
            rows_of.setdefault(function if is_here else None, []).append(row)
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
        runner = self._runner
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
            pairs = zip(rows, parts(rows, outcome), strict=True)
            return all(self._reader.is_score(samples[row][1], part) for row, part in pairs)

        calls = [journal.call(arguments, prompt) for _, (_, arguments), prompt in requests] if journal else []
        known = [call.known for call in calls] if journal else [None] * len(requests)
        if self._reader.on_error == "stop":  # failures kept under "zero" are computed again
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

    def _name_of(self, function: RewardFunction | None) -> str:
        if function is None and self._runner is not None:
            return f"reward function {self._runner.name.rpartition(':')[2]}"
        return f"reward function {getattr(function, '__name__', repr(function))}"


def _seed_of(sample: Mapping[str, Any], seed_keys: tuple[int, ...]) -> int:
    text = f"{sample['data_source']}\0{sample['solution_str']}"
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=7).digest()
    return derive_seed(*seed_keys, int.from_bytes(digest, "little"))
