"""A step of a run that is learned many times, from the same state and samples, each time with a change."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybridflow.checkpoint import Checkpoint
from hybridflow.config import ActorConfig, CriticConfig
from hybridflow.errors import NonFiniteError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.read_columns import read
from hybridflow.trainers.run.ppo_trainer import PPOTrainer
from hybridflow.trainers.run.replay import KeptSamples, LearnedStep, learn
from hybridflow.trainers.run.run_states import RunStates, go_back
from hybridflow.trainers.stages import mini_batch_rows

VALIDATION = "val/"
"""Begin of the names of metrics that are measured after a step; others are those of the samples of the next step."""


def measured(trainer: PPOTrainer, metric: str) -> Mapping[str, float]:
    """Return the metrics of the present state that include `metric`."""
    if metric.startswith(VALIDATION):
        return trainer.validate()
    trainer.train_step()
    return trainer.metrics


class ChangedStep:
    """The step `step` of a run, and the metrics of the state after it if some of it is left out.

    `learned` is the step as in the run, `weights` has the share of each group in the sum of all absolute advantages.
    `mini_batches` are those of the actor in all epochs, as group ids.
    """

    def __init__(self, states: RunStates, step: int, metric: str) -> None:
        self.step, self._metric = step, metric
        trainer = states.at(step - 1, before=step)
        self._before: Checkpoint = states.keep()
        trainer.sample = self._kept = KeptSamples(trainer.sample)
        self.learned: LearnedStep = learn(trainer, self._kept)
        states.note_differences(step, self.learned.metrics)
        self._position: dict[str, Any] = trainer.loader.state_dict()
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
