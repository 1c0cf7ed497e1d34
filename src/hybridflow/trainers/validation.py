"""Validation: generate on held-out prompts, score, and report accuracy and pass@k. Touches no training state."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybridflow.controller import Backend, WorkerGroup
from hybridflow.data import RLHFDataset
from hybridflow.protocol import DataProto
from hybridflow.trainers.groups import BackendOwner
from hybridflow.trainers.rl_metrics import prompt_text

VALIDATION_STREAM = 1
"""Second entry of a noise key; training uses 0. Validation noise is the same at every step."""

READ_COLUMNS = ("response_mask", "group_ids", "scores", "data_sources", "raw_prompts", "solution_texts")


class Validator(BackendOwner):
    """Validates a rollout group on a dataset, `batch_size` prompts at a time."""

    def __init__(
        self,
        dataset: RLHFDataset,
        rollout: WorkerGroup,
        rewards: WorkerGroup,
        *,
        batch_size: int,
        group_size: int,
        seed: int,
        backend: Backend | None = None,
    ) -> None:
        self.backend = backend
        self.dataset, self.rollout, self.rewards = dataset, rollout, rewards
        self.batch_size, self.group_size, self.seed = batch_size, group_size, seed

    def run(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """The metrics `val/...`, and every sample with prompt, response, score and data source."""
        samples: list[dict[str, Any]] = []
        lengths: list[int] = []
        for start in range(0, len(self.dataset), self.batch_size):
            indices = range(start, min(start + self.batch_size, len(self.dataset)))
            prompts = self.dataset.collate(indices)
            prompts = prompts.union(DataProto.from_dict({"group_ids": torch.tensor(indices)}))
            prompts.meta_info["noise_key"] = [self.seed, VALIDATION_STREAM, 0]
            rollouts = self.rollout.generate_validation_sequences.remote(prompts)
            future = prompts.repeat(self.group_size, interleave=True).union(rollouts)
            future = future.union(self.rewards.score_validation.remote(future))
            batch = future.get(READ_COLUMNS)
            lengths += batch.batch["response_mask"].sum(-1).tolist()
            columns = batch.non_tensor_batch
            samples += [
                {
                    "index": int(batch.batch["group_ids"][row]),
                    "data_source": columns["data_sources"][row],
                    "prompt": prompt_text(columns["raw_prompts"][row]),
                    "response": columns["solution_texts"][row],
                    "score": float(batch.batch["scores"][row]),
                }
                for row in range(len(batch))
            ]
        metrics = validation_metrics(samples, self.group_size)
        metrics["val/response_length/mean"] = sum(lengths) / len(lengths)
        return metrics, samples


def validation_metrics(samples: Sequence[Mapping[str, Any]], group_size: int) -> dict[str, float]:
    """Scores overall and by data source. A sample has `index` of its prompt, `data_source`, `score`."""
    metrics = _figures("val", samples, group_size)
    for source in sorted({sample["data_source"] for sample in samples}):
        own = [sample for sample in samples if sample["data_source"] == source]
        metrics |= _figures(f"val/{source}", own, group_size)
    return metrics


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that k of the samples, drawn without replacement, hold a correct one (Chen et al., 2021, eq. 1)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to limit."""
    return [1 << i for i in range(limit.bit_length())]


def _figures(prefix: str, samples: Sequence[Mapping[str, Any]], group_size: int) -> dict[str, float]:
    """Mean score, accuracy (a score of at least 1 is correct) and, where a prompt has several samples, pass@k."""
    correct: dict[int, int] = {}
    for sample in samples:
        correct[sample["index"]] = correct.get(sample["index"], 0) + (sample["score"] >= 1)
    figures = {
        f"{prefix}/score/mean": sum(sample["score"] for sample in samples) / len(samples),
        f"{prefix}/accuracy": sum(correct.values()) / len(samples),
    }
    for k in powers_of_two(group_size) if group_size > 1 else ():
        passes = [pass_at_k(group_size, number, k) for number in correct.values()]
        figures[f"{prefix}/pass@{k}"] = sum(passes) / len(passes)
    return figures
