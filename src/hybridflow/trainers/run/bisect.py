"""Finds the step after which a run is lost by a metric, and within it the mini-batch and the groups that lose it.

    recorded values ─> states of kept checkpoints ─> states between them ─> the first lost step s
    state s-1 ─┬─ step s with its first mini-batches, or without groups ─> metric
               └─ step s under other keys                               ─> metric

Each step is learned again and compared with the run's metrics. The run is only read.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from hybridflow.config import ActorConfig, CriticConfig, load_config
from hybridflow.errors import ConfigError, DataConfigError, DataError, NonFiniteError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.read_columns import read
from hybridflow.trainers.run.bisection import first_lost, smallest_removal
from hybridflow.trainers.run.ppo_trainer import PPOTrainer
from hybridflow.trainers.run.replay import KeptSamples, LearnedSample, learn, require_changeable
from hybridflow.trainers.run.run_directory import require_unused
from hybridflow.trainers.run.run_states import RunStates, go_back
from hybridflow.trainers.stages import mini_batch_rows

VALIDATION = "val/"
"""Begin of the names of metrics that are measured after a step; others are those of the samples of the next step."""

OF_SAMPLES = ("critic/score", "critic/zero_variance_groups", "response_length/", "reward/", "episode/")
"""Metrics, or prefixes of metrics, that tell what the weights at the begin of a step sample."""

MOST_NAMED = 4
"""Groups that a line names."""


@dataclass(frozen=True)
class Rule:
    """A metric and the rule by which its values are lost; a value that is not finite is lost, too."""

    metric: str
    text: str
    breaks: Callable[[Mapping[str, float]], bool]

    def is_lost(self, metrics: Mapping[str, float]) -> bool:
        """Return whether a state with these metrics is lost."""
        return not math.isfinite(metrics[self.metric]) or self.breaks(metrics)


@dataclass(frozen=True)
class Evaluation:
    """The metric of a state, or of a state after a changed step; `seconds` is 0 for one in metrics.jsonl."""

    what: str
    value: float
    is_lost: bool
    seconds: float = 0.0


@dataclass
class Bisection:
    """The first lost step, and what loses it.

    `new_keys`: those that the start of the step changed, if the step is its first. `mini_batches` are the numbers of
    those of `num_mini_batches`, and `groups` those of `num_groups`, whose removal keeps the metric, with the `samples`
    of these groups; each is empty if only the whole step does. `is_smallest`: each of the groups is needed. `keeping`:
    the tries that keep the metric.
    """

    metric: str
    rule: str
    step: int
    new_keys: list[str]
    mini_batches: list[int] = field(default_factory=list)
    num_mini_batches: int = 0
    groups: list[int] = field(default_factory=list)
    num_groups: int = 0
    is_smallest: bool = False
    samples: list[LearnedSample] = field(default_factory=list)
    keeping: list[str] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)


def bisect_run(
    run_dir: Path,
    rule: Rule,
    *,
    scratch: Path,
    tries: Sequence[Sequence[str]] = (),
    first_kept: int = 0,
    most_removals: int = 32,
    show: Callable[[str], None] = lambda line: None,
) -> Bisection:
    """Find the first lost step of a run, and what loses it; `show` gets a line for each thing found.

    `tries`: lists of "key=value" under which the step is learned too. `first_kept`: a step after which the metric is
    kept, for a metric that the initial model has not reached. `scratch`: as in `replay_step`. Raises
    ConfigError or DataError if the metric is not there, or the run is never lost, or lost from its begin.
    """
    for changes in tries:
        require_changeable(changes)
    require_unused(run_dir)
    unused = () if rule.metric.startswith(VALIDATION) else ("data.val_files=[]",)
    with closing(RunStates(run_dir, scratch, changes=unused, require_equal=True)) as states:
        for changes in tries:  # now, since the search takes time
            load_config(run_dir / "config.toml", changes)
        meter = _Meter(rule, show)
        steps = ", ".join(map(str, states.store.list()))
        show(f"{states.newest} steps, learned again from the begin{steps and f' or checkpoint {steps}'}")
        if (first := states.first_in_journals()) > 1:
            show(f"rewards of steps 1 to {first - 1} are no longer kept, and are computed again")
        step = _first_lost_step(states, meter, first_kept)
        place = states.place_of(step)
        is_first = step > 1 and states.place_of(step - 1) < place
        found = Bisection(rule.metric, rule.text, step, states.changes_of(place, place - 1) if is_first else [])
        show(f"first lost step: {step}")
        configs = [states.config_of(place, changes, f"try-{i}") for i, changes in enumerate(tries)]
        changed = ChangedStep(states, step, rule.metric)
        trainer = changed.trainer
        if trainer.config.learns_in_parts:  # rows cannot be left out of its parts
            trainer = states.build(states.config_of(place, ("trainer.stream=false",), "whole"))
        if most_removals:
            _find_groups(changed, trainer, meter, most_removals, found)
        for config, changes in zip(configs, tries, strict=True):
            begin, shown = time.monotonic(), " ".join(changes)
            if not meter.note(f"step {step} with {shown}", changed.metrics_after(states.build(config)), begin):
                found.keeping.append(shown)
    found.evaluations = meter.evaluations
    return found


class _Meter:
    """Shows and keeps the values of the metric."""

    def __init__(self, rule: Rule, show: Callable[[str], None]) -> None:
        self.rule, self.show, self.evaluations = rule, show, list[Evaluation]()

    def note(self, what: str, metrics: Mapping[str, Any], begin: float | None = None) -> bool:
        """Keep a value that took the seconds since `begin`, by default a recorded one; return whether it is lost."""
        if self.rule.metric not in metrics:
            raise _not_there(self.rule.metric, metrics)
        seconds = 0.0 if begin is None else time.monotonic() - begin
        found = Evaluation(what, float(metrics[self.rule.metric]), self.rule.is_lost(metrics), seconds)
        self.evaluations.append(found)
        cost = "recorded" if begin is None else f"{seconds:.1f} s"
        self.show(f"{what:<48} {found.value:>10.4g}  {'lost' if found.is_lost else 'kept'}  {cost:>8}")
        return found.is_lost


def _not_there(metric: str, names: Iterable[str]) -> ConfigError:
    near = ", ".join(get_close_matches(metric, [*names], n=3, cutoff=0.3))
    hint = f"; near: {near}" if near else "" if names else "; it has no data.val_files"
    return DataConfigError(f"--metric {metric} is invalid: the run has no such metric{hint}.")


def _recorded(states: RunStates, metric: str) -> Mapping[int, Mapping[str, Any]]:
    """Return the metrics of states that the run has recorded, by the step after which they hold."""
    if not states.rows:
        raise DataConfigError(f"'{states.run_dir}' has no complete step to bisect.")
    if metric.startswith(VALIDATION):
        recorded = {step: row for step, row in states.validations.items() if metric in row}
        if states.validations and not recorded:
            raise _not_there(metric, {name for row in states.validations.values() for name in row})
        return recorded
    if not metric.startswith(OF_SAMPLES):
        shown = ", ".join(f"{name}*" for name in (VALIDATION, *OF_SAMPLES))
        raise ConfigError(f"--metric {metric} is invalid: expected a metric of validation or of samples: {shown}.")
    if lag := states.starts[-1].get("config", {}).get("trainer.lag", 0):
        raise ConfigError(
            f"--metric {metric} is not supported with trainer.lag={lag}: the samples of a step are of older "
            f"weights; use a metric of validation, {VALIDATION}*."
        )
    for step in range(1, states.newest + 1):
        if metric not in states.rows.get(step, {}):
            if step in states.rows:
                raise _not_there(metric, states.rows[step])
            raise DataError(f"'{states.run_dir / 'metrics.jsonl'}' has no row of step {step}; use {VALIDATION}*.")
    return {step - 1: row for step, row in states.rows.items()}


def _first_lost_step(states: RunStates, meter: _Meter, first_kept: int) -> int:
    recorded, rule = _recorded(states, meter.rule.metric), meter.rule
    lost = {step: rule.is_lost(row) for step, row in recorded.items()}

    def is_lost(step: int) -> bool:
        if step in lost:
            return meter.note(f"after step {step}", recorded[step])
        begin = time.monotonic()
        is_lost_there = meter.note(f"after step {step}", measured(states.at(step), rule.metric), begin)
        if not is_lost_there and step not in states.store.list():
            states.keep()
        return is_lost_there

    last = states.newest if rule.metric.startswith(VALIDATION) else states.newest - 1
    if first_kept > last:
        raise ConfigError(
            f"--from {first_kept} is invalid: the last step after which {rule.metric} is known is {last}; name one "
            "before it."
        )
    if not is_lost(last):
        raise DataError(
            f"'{states.run_dir}' is not lost: {rule.metric} is not {rule.text} after step {last}, its last."
        )
    low = max((step for step, there in lost.items() if not there and step >= first_kept), default=first_kept)
    if low >= last or is_lost(low):
        raise DataError(
            f"'{states.run_dir}' is lost after step {low} already: {rule.metric} is {rule.text} there; name another "
            f"step of 0 to {last - 1}, after which it is not, with --from."
        )
    high = min((step for step, there in lost.items() if step > low), default=last)
    if high < last:
        is_lost(high)
    low, high = first_lost(is_lost, [low, *(step for step in states.store.list() if low < step < high), high])
    if high - low > 1:
        times = [states.rows[step].get("timing_s/step", 0.0) for step in range(low + 1, high) if step in states.rows]
        num = math.ceil(math.log2(high - low))
        meter.show(
            f"searching steps {low + 1} to {high}, whose steps took the run {sum(times):.0f} s: {num} evaluations"
        )
        states.at(low)
        if low not in states.store.list():
            states.keep()
        low, high = first_lost(is_lost, range(low, high + 1))
    return high


def measured(trainer: PPOTrainer, metric: str) -> Mapping[str, float]:
    """Return the metrics of the present state that include `metric`."""
    if metric.startswith(VALIDATION):
        return trainer.validate()
    trainer.train_step()
    return trainer.metrics


class ChangedStep:
    """The step `step` of a run, and the metrics of the state after it if some of it is left out.

    `trainer` has learned it, `learned` is the step as in the run, `weights` has the share of each group in the sum of
    all absolute advantages. `mini_batches` are those of the actor in all epochs, as group ids.
    """

    def __init__(self, states: RunStates, step: int, metric: str) -> None:
        self.step, self._metric = step, metric
        trainer = self.trainer = states.at(step - 1, before=step)
        self._before = states.keep()
        trainer.sample = self._kept = KeptSamples(trainer.sample)
        self.learned = learn(trainer, self._kept)
        states.note_differences(step, self.learned.metrics)
        self._position = trainer.loader.state_dict()
        self.weights: dict[int, float] = {}
        for sample in self.learned.samples:
            self.weights[sample.group] = self.weights.get(sample.group, 0.0) + sample.weight
        ids, config = torch.tensor([*self.weights]), trainer.config
        columns = DataProto.from_dict({"group_ids": ids, "row_ids": ids})
        seed_keys = (config.trainer.seed, step - 1)
        self.mini_batches = mini_batch_rows(columns, config.actor.mini_batch_size, config.actor.epochs, seed_keys)

    def metrics_after(
        self, trainer: PPOTrainer, *, updates: Sequence[int] = (), groups: Sequence[int] = ()
    ) -> Mapping[str, float]:
        """Return the metrics after the step without these updates of the actor, by mini-batch, and without groups.

        The metric is NaN if a loss or a gradient is not finite.
        """

        def fewer(batch: DataProtoFuture, role: ActorConfig | CriticConfig, kl_coef: float) -> DataProtoFuture:
            whole = PPOTrainer.with_mini_batches(trainer, batch, role, kl_coef)
            if role is not trainer.config.actor:
                return whole
            columns = read(batch, ("group_ids", "row_ids")).batch
            left_out = set(columns["row_ids"][torch.isin(columns["group_ids"], torch.tensor(groups))].tolist())
            kept = [rows for number, rows in enumerate(whole.meta_info["mini_batches"]) if number not in updates]
            kept = [[row for row in rows if row not in left_out] for rows in kept]
            return whole.with_meta_info({"mini_batches": [rows for rows in kept if rows]})

        go_back(trainer, self._before)
        sampler, trainer.sample = trainer.sample, self._kept
        trainer.with_mini_batches = fewer
        try:
            trainer.train_step()
            del trainer.with_mini_batches
            trainer.sample = sampler
            trainer.loader.load_state_dict(self._position)
            return measured(trainer, self._metric)
        except NonFiniteError:
            return {self._metric: float("nan")}


def _find_groups(changed: ChangedStep, trainer: PPOTrainer, meter: _Meter, most: int, found: Bisection) -> None:
    """Add the mini-batches and the groups whose removal keeps the metric."""
    batches, step, num_before = changed.mini_batches, changed.step, len(meter.evaluations)
    found.num_groups, found.num_mini_batches = len(changed.weights), len(batches)

    def keeps(what: str, **left_out: Sequence[int]) -> bool:
        begin = time.monotonic()
        return not meter.note(f"step {step} without {what}", changed.metrics_after(trainer, **left_out), begin)

    def without_batches(some: Sequence[int]) -> bool:
        named = ", ".join(str(number + 1) for number in sorted(some))
        return keeps(f"mini-batch{'es' * (len(some) > 1)} {named} of {len(batches)}", updates=some)

    def without_groups(some: Sequence[int]) -> bool:
        shown = ", ".join(map(str, sorted(some)))
        named = f"group{'s' * (len(some) > 1)} {shown}" if len(some) <= MOST_NAMED else f"{len(some)} groups"
        return keeps(f"{named} of {found.num_groups}", groups=some)

    weights = [sum(changed.weights[group] for group in batch) for batch in batches]
    numbers = sorted(range(len(batches)), key=lambda number: -weights[number])
    removed, _ = smallest_removal(without_batches, numbers, most)
    groups = sorted(changed.weights, key=lambda group: -changed.weights[group])
    if len(removed) < len(batches):
        found.mini_batches = [number + 1 for number in sorted(removed)]
        of_batches = {group for number in removed for group in batches[number]}
        if trainer.config.actor.epochs == 1 or without_groups([*of_batches]):  # each epoch has all groups
            groups = [group for group in groups if group in of_batches]
    most = max(most - (len(meter.evaluations) - num_before), 0)
    removed, found.is_smallest = smallest_removal(without_groups, groups, most)
    if len(removed) < found.num_groups:
        found.groups = sorted(removed)
        found.samples = [sample for sample in changed.learned.samples if sample.group in removed]
