"""Learns a step of a run again, alone: with the same bits, or under changed keys.

    checkpoint c ── steps c+1 ... N-1, as in the run ── step N, as in the run
                                                     └─ step N on the same samples, under changed keys

A step depends only on the state at its begin, the data, the seed and the keys of the start that made it, so nothing but
checkpoints must be kept. All happens in a directory of its own; the run is only read.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybridflow.checkpoint import Checkpoint, CheckpointStore
from hybridflow.config import Config, load_config
from hybridflow.config.checks.generation import REPLAY_IN_FLIGHT
from hybridflow.errors import CheckpointError, ConfigError, NonFiniteError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.runtime.observe import get_logger, read_jsonl
from hybridflow.runtime.observe.metrics import is_reproducible
from hybridflow.trainers.build.build import build_trainer
from hybridflow.trainers.read_columns import read
from hybridflow.trainers.rl_metrics import batch_metrics
from hybridflow.trainers.run.ppo_trainer import PPOTrainer
from hybridflow.trainers.run.run_directory import TOKEN_BUDGETS
from hybridflow.trainers.run.run_starts import starts_of_steps
from hybridflow.trainers.sampling.sampled import NextPrompts, Sampled, Sampler

logger = get_logger(__name__)

CHANGEABLE = ("actor.", "critic.", "algorithm.", "memory.", "model.dtype", "model.compile", "controller.threads")
"""Keys, or prefixes of keys, that a replay may change: they do not change what a step has sampled."""

SAMPLING = ("algorithm.filter_groups", "algorithm.max_sampling_rounds")
"""Keys of `CHANGEABLE` that do change what a step samples."""

NOT_IN_REPLAYS = (
    *("trainer.resume=auto", "trainer.save_every=0", "trainer.save_every_s=0", "trainer.trackers=[]"),
    *("data.val_files=[]", "trainer.val_every=0", "trainer.val_before_train=false"),
    "recovery.max_restarts=0",
)

SYNC = "weight_sync/"
"""Metrics that differ after a start, since the engines of new processes get the weights again."""

MOST_CHARS = 400
"""Characters of the prompt and of the response of a sample whose loss is not finite."""


Differences = dict[int, dict[str, tuple[float, float]]]
"""By step, the metrics that differ, with the values of a run and of its replay."""


@dataclass(frozen=True)
class LearnedSample:
    """A row of the batch: response and score, and the means of its tokens' advantages and log-probs.

    `log_prob_before` and `log_prob_after`: under the policy before and after the step. `weight`: share of the row in
    the sum of the absolute advantages of all tokens.
    """

    row: int
    score: float
    advantage: float
    weight: float
    log_prob_before: float
    log_prob_after: float
    response: str

    @property
    def moved(self) -> float:
        """Change of the mean log-prob of the response's tokens by the step."""
        return self.log_prob_after - self.log_prob_before


@dataclass(frozen=True)
class LearnedStep:
    """Metrics of a step, and the rows of its batch."""

    metrics: dict[str, Any]
    samples: list[LearnedSample]


@dataclass(frozen=True)
class Replay:
    """A step, learned again.

    `first_step`: the step of the checkpoint from which the replay started, 0: the begin of the run. `differs`: by step,
    the metrics that are not those of the run, with the values of run and replay. `is_recorded`: whether the run has
    metrics of the step; it has none of one that it did not complete. `changed`: the step under the changed keys, None
    without any.
    """

    step: int
    first_step: int
    differs: Differences
    is_recorded: bool
    learned: LearnedStep
    changed: LearnedStep | None = None


def replay_step(
    run_dir: Path, step: int, changes: Sequence[str] = (), *, scratch: Path, paths: Sequence[str] = ()
) -> Replay:
    """Learn a step of a run again, and once more under `changes`, a list of "key=value".

    `scratch`: a new or empty directory for what it writes. `paths`: overrides of paths in the run's config.toml.
    Raises ConfigError for a step that the run has not reached, and for a change of a key that does not belong to
    learning; NonFiniteError if the step has no finite result.
    """
    _require_changeable(changes)
    rows = {row["step"]: row for row in read_jsonl(run_dir / "metrics.jsonl") if "timing_s/step" in row}
    newest = max(rows, default=0)
    if rows and "critic/score/mean" not in rows[newest]:
        raise ConfigError(f"'{run_dir}' is not a run of `hybridflow train`, the only kind that can be replayed.")
    _require_step(step, run_dir, newest, newest + 1)  # also the step that ended the run
    before = _checkpoint_before(run_dir, step)
    first_step = before.step if before else 0
    starts = starts_of_steps(run_dir, first_step, step)
    configs = [
        _config(run_dir, [*paths, *start.overrides], scratch / f"run-{place}") for place, start in enumerate(starts)
    ]
    of_step = [*paths, *starts[-1].overrides]
    changed_config = _config(run_dir, [*of_step, *changes], scratch / "changed") if changes else None
    for config in configs:
        REPLAY_IN_FLIGHT.require(config)
    store = CheckpointStore(scratch / "before", keep=1)
    differs: Differences = {}
    for start, config in zip(starts, configs, strict=True):
        with build_trainer(config) as trainer:
            if start.last_step == step:
                _require_step(step, run_dir, newest, trainer.total_steps)
            if before:
                trainer.restore(before)
            while trainer.global_step < min(start.last_step, step - 1):
                trainer.train_step()
                _note_differences(differs, trainer.global_step, trainer.metrics, rows)
            if changed_config or start.last_step < step:
                trainer.save_with(trainer.new_saver(store, in_background=False))
                before = store.latest()
            if start.last_step == step:
                trainer.sample = kept = KeptSamples(trainer.sample)
                learned = _learn(trainer, kept)
                _note_differences(differs, step, learned.metrics, rows)
    changed = None
    if changed_config:
        with build_trainer(changed_config) as trainer:
            assert before is not None
            trainer.restore(before)
            trainer.sample = kept
            changed = _learn(trainer, kept)
    return Replay(step, first_step, differs, step in rows, learned, changed)


class KeptSamples:
    """A sampler that keeps what `sampler` returned in its first call, and returns the same in later ones."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler: Sampler | None = sampler
        self.metrics: dict[str, Any] = {}
        self.parts: list[DataProto] = []

    def __call__(self, next_prompts: NextPrompts, step: int) -> Sampled:
        """Return the rows of `step` with responses and scores."""
        if self._sampler is None:
            return Sampled(len(self.parts), sum(map(len, self.parts)), map(DataProtoFuture.of, self.parts))
        sampler, self._sampler = self._sampler, None
        sampled = sampler(next_prompts, step)
        self.metrics = sampler.metrics
        return replace(sampled, parts=self._kept(sampled))

    def _kept(self, sampled: Sampled) -> Iterator[DataProtoFuture]:
        for part in sampled:
            self.parts.append(part.get())
            yield part


def _require_step(step: int, run_dir: Path, completed: int, last: int) -> None:
    if not 1 <= step <= last:
        raise ConfigError(
            f"step {step} cannot be replayed: '{run_dir}' has completed {completed} steps; use 1 to {last}."
        )


def _require_changeable(changes: Sequence[str]) -> None:
    changeable = ", ".join(f"{name}*" if name.endswith(".") else name for name in CHANGEABLE)
    for change in changes:
        key = change.partition("=")[0].strip()
        if not key.startswith(CHANGEABLE) or key in SAMPLING:
            raise ConfigError(
                f"{change[:200]!r} cannot be changed in a replay, which learns from the samples of the step; it may "
                f"change {changeable}, but not "
                f"{' and '.join(SAMPLING)}."
            )


def _config(run_dir: Path, overrides: Sequence[str], directory: Path) -> Config:
    """Return the configuration of the run in another directory, which gets its kept rewards and token budgets."""
    directory.mkdir(parents=True)
    for journal in ("rewards", "environments"):
        if (run_dir / journal).is_dir():
            shutil.copytree(run_dir / journal, directory / journal)
    if (run_dir / TOKEN_BUDGETS).is_file():
        shutil.copy(run_dir / TOKEN_BUDGETS, directory)
    return load_config(run_dir / "config.toml", [*overrides, *NOT_IN_REPLAYS, f"trainer.run_dir={directory}"])


def _checkpoint_before(run_dir: Path, step: int) -> Checkpoint | None:
    """Return the newest undamaged checkpoint before a step; None if the run has none."""
    store = CheckpointStore(run_dir / "checkpoints")
    for earlier in reversed([each for each in store.list() if each < step]):
        try:
            return store.verify(earlier)
        except CheckpointError as error:
            logger.warning("the replay starts before step %d: %s", earlier, error)
    return None


def _note_differences(
    differs: Differences, step: int, metrics: dict[str, Any], rows: dict[int, dict[str, Any]]
) -> None:
    row = rows.get(step, {})
    names = (name for name in sorted(metrics) if is_reproducible(name) and not name.startswith(SYNC))
    values = {name: (float(row[name]), float(metrics[name])) for name in names if name in row}
    if wrong := {name: pair for name, pair in values.items() if repr(pair[0]) != repr(pair[1])}:
        differs[step] = wrong


def _learn(trainer: PPOTrainer, kept: KeptSamples) -> LearnedStep:
    """Make the next step, and compare the policy before and after it on its batch."""
    trainer.metrics.clear()
    try:
        batch = trainer.step(trainer.loader.next_batch)
    except NonFiniteError as error:
        rows = DataProto.concat(kept.parts)
        named = [
            f"row {row}: score {float(rows.batch['scores'][row]):g}, "
            f"prompt {str(rows.non_tensor_batch['prompt_texts'][row])[-MOST_CHARS:]!r}, "
            f"response {str(rows.non_tensor_batch['solution_texts'][row])[:MOST_CHARS]!r}"
            for row in error.rows
        ]
        raise NonFiniteError("\n".join([str(error), *named])) from None
    metrics = trainer.metrics | batch_metrics(batch, trainer.config.data.max_response_length)
    before = "old_log_probs" if "old_log_probs" in (batch.columns or ()) else "rollout_log_probs"
    rows = read(batch, ("scores", "advantages", "response_mask", "solution_texts", before))
    columns, mask = rows.batch, rows.batch["response_mask"]
    after = read(trainer.actor.compute_log_probs.remote(batch), ("old_log_probs",)).batch["old_log_probs"]
    absolute = (columns["advantages"].abs() * mask).sum(-1)
    values = zip(
        columns["scores"].tolist(),
        _mean(columns["advantages"], mask),
        (absolute / absolute.sum().clamp(min=1e-30)).tolist(),
        _mean(columns[before], mask),
        _mean(after, mask),
        rows.non_tensor_batch["solution_texts"].tolist(),
        strict=True,
    )
    return LearnedStep(metrics, [LearnedSample(row, *of_row) for row, of_row in enumerate(values)])


def _mean(values: torch.Tensor, mask: torch.Tensor) -> list[float]:
    """Return the mean over the tokens of each row; 0 for a row without any."""
    return (torch.where(mask, values, 0.0).double().sum(-1) / mask.sum(-1).clamp(min=1)).tolist()
