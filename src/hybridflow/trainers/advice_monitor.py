"""Advice while a run trains: the findings in its newest steps, as one-line warnings."""

from collections.abc import Iterable, Mapping
from typing import Any

from hybridflow.config import Config, leaf_keys
from hybridflow.observability import get_logger
from hybridflow.observability.advice import advice_from
from hybridflow.observability.evidence import Evidence
from hybridflow.runtime.printable import printable
from hybridflow.trainers.samples import NO_SAMPLES, Samples

logger = get_logger(__name__)

KEPT = ("step", "prompt", "rendered_prompt", "ground_truth")
"""What is kept of samples, which may have thousands of tokens."""


class AdviceMonitor:
    """Looks for findings after step 1, after every `advice.window` steps, and at the end of a shorter run.

    A finding is logged at most once in each window. It looks at the first rows and at the newest ones, and at the
    newest samples; it keeps no others. `rows`: metrics of the steps before a resume. `total_steps`: 0 if unknown.
    """

    def __init__(self, config: Config, total_steps: int, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._config, self._total_steps = leaf_keys(config), total_steps
        self._is_enabled, self._window = config.advice.enabled, config.advice.window
        self._rows: list[Mapping[str, Any]] = []
        self._samples: list[Mapping[str, Any]] = []
        self._logged: dict[str, int] = {}  # finding -> number of the window in which it was logged
        for row in rows:
            self._add(row)

    def note(self, step: int, metrics: Mapping[str, Any], samples: Samples = NO_SAMPLES) -> None:
        """Take the metrics and the samples of a step, and log the findings that are due."""
        if not self._is_enabled or not metrics or not step:
            return
        self._add({"step": step, **metrics})
        self._samples = [row for row in self._samples if row["step"] > step - self._window]
        self._samples += [{key: row[key] for key in KEPT if key in row} for row in samples.kept]
        is_whole = step % self._window == 0 or step == self._total_steps < self._window
        if not is_whole and step > 1:
            return
        evidence = Evidence(self._config, self._rows, self._samples)
        number = (step - 1) // self._window
        for advice in advice_from(evidence, at_first_step=not is_whole):
            if self._logged.get(advice.name) != number:
                self._logged[advice.name] = number
                logger.warning("%s", printable(advice.line))

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`, which the run makes again."""
        for rows in (self._rows, self._samples):
            rows[:] = [row for row in rows if row["step"] <= step]

    def _add(self, row: Mapping[str, Any]) -> None:
        """Add a row of a training step; only the first and the last `advice.window` rows are kept."""
        if row["step"] > 0:
            self._rows.append(row)
            if len(self._rows) > 2 * self._window:
                del self._rows[self._window]
