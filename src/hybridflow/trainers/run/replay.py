"""Learns a step of a run again, alone: with the same bits, or under changed keys.

    checkpoint c ── steps c+1 ... N-1, as in the run ── step N, as in the run
                                                     └─ step N on the same samples, under changed keys

A step depends only on the state at its begin, the data, the seed and the keys of the start that made it, so nothing but
checkpoints must be kept. All happens in a directory of its own; the run is only read.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybridflow.errors import ConfigError, NonFiniteError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.read_columns import read
from hybridflow.trainers.rl_metrics import batch_metrics
from hybridflow.trainers.run.ppo_trainer import PPOTrainer
from hybridflow.trainers.run.run_states import Differences, RunStates
from hybridflow.trainers.sampling.sampled import NextPrompts, Sampled, Sampler

CHANGEABLE = ("actor.", "critic.", "algorithm.", "memory.", "model.dtype", "model.compile", "controller.threads")
"""Keys, or prefixes of keys, that a replay may change: they do not change what a step has sampled."""

SAMPLING = ("algorithm.filter_groups", "algorithm.max_sampling_rounds")
"""Keys of `CHANGEABLE` that do change what a step samples."""

MOST_CHARS = 400
"""Characters of the prompt and of the response of a sample whose loss is not finite."""


@dataclass(frozen=True)
class LearnedSample:
    """A row of the batch: response and score, and the means of its tokens' advantages and log-probs.

    `log_prob_before` and `log_prob_after`: under the policy before and after the step. `weight`: share of the row in
    the sum of the absolute advantages of all tokens. Rows of one prompt are a `group`.
    """

    row: int
    group: int
    prompt: str
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


def replay_step(run_dir: Path, step: int, changes: Sequence[str] = (), *, scratch: Path) -> Replay:
    """Learn a step of a run again, and once more under `changes`, a list of "key=value".

    `scratch`: a new or empty directory for what it writes. Raises ConfigError for a step that the run has not reached,
    and for a change of a key that does not belong to learning; NonFiniteError if the step has no finite result.
    """
    require_changeable(changes)
    with closing(RunStates(run_dir, scratch, changes=["data.val_files=[]"])) as states:
        _require_step(step, states, states.newest + 1)  # also the step that ended the run
        place = states.place_of(step)
        changed_config = states.config_of(place, changes, "changed") if changes else None
        trainer = states.at(step - 1, before=step)
        _require_step(step, states, trainer.total_steps)
        first_step = states.base.step if states.base else 0
        before = states.keep() if changed_config else None
        trainer.sample = kept = KeptSamples(trainer.sample)
        learned = learn(trainer, kept)
        states.note_differences(step, learned.metrics)
        changed = None
        if changed_config and before:
            trainer = states.build(changed_config)
            trainer.restore(before)
            trainer.sample = kept
            changed = learn(trainer, kept)
    return Replay(step, first_step, states.differs, step in states.rows, learned, changed)


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


def _require_step(step: int, states: RunStates, last: int) -> None:
    if not 1 <= step <= last:
        raise ConfigError(
            f"step {step} cannot be replayed: '{states.run_dir}' has completed {states.newest} steps; use 1 to {last}."
        )


def require_changeable(changes: Sequence[str]) -> None:
    """Raise ConfigError unless the keys of "key=value" belong to learning."""
    changeable = ", ".join(f"{name}*" if name.endswith(".") else name for name in CHANGEABLE)
    for change in changes:
        key = change.partition("=")[0].strip()
        if not key.startswith(CHANGEABLE) or key in SAMPLING:
            raise ConfigError(
                f"{change[:200]!r} cannot be changed in a replay, which learns from the samples of the step; it may "
                f"change {changeable}, but not "
                f"{' and '.join(SAMPLING)}."
            )


def learn(trainer: PPOTrainer, kept: KeptSamples) -> LearnedStep:
    """Make the next step on the kept samples, and compare the policy before and after it on its batch."""
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
    names = ("group_ids", "prompt_texts", "scores", "advantages", "response_mask", "solution_texts", before)
    rows = read(batch, names)
    columns, mask = rows.batch, rows.batch["response_mask"]
    after = read(trainer.actor.compute_log_probs.remote(batch), ("old_log_probs",)).batch["old_log_probs"]
    absolute = (columns["advantages"].abs() * mask).sum(-1)
    values = zip(
        columns["group_ids"].tolist(),
        rows.non_tensor_batch["prompt_texts"].tolist(),
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
