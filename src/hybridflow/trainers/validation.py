"""Validation: generate on held-out prompts, score, and report accuracy and pass@k. Touches no training state."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybridflow.controller import Backend, WorkerGroup
from hybridflow.data import RLHFDataset
from hybridflow.protocol import DataProto
from hybridflow.trainers.groups import BackendOwner
from hybridflow.trainers.rl_metrics import SAMPLE_COLUMNS, bounded_json, prompt_text

VALIDATION_STREAM = 1
"""Second entry of a noise key; training uses 0. Validation noise is the same at every step."""

Z95 = 1.96
"""Standard errors on either side of a mean that hold 95% of a normal distribution."""

READ_COLUMNS = ("response_mask", "group_ids", "data_sources", "answers", *SAMPLE_COLUMNS)


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
                    "rendered_prompt": columns["prompt_texts"][row],
                    "ground_truth": bounded_json(columns["ground_truths"][row]),
                    "response": columns["solution_texts"][row],
                    "score": float(batch.batch["scores"][row]),
                    "answer": columns["answers"][row],
                }
                for row in range(len(batch))
            ]
        metrics = validation_metrics(samples, self.group_size)
        metrics["val/response_length/mean"] = sum(lengths) / len(lengths)
        return metrics, samples


def validation_metrics(samples: Sequence[Mapping[str, Any]], group_size: int) -> dict[str, float]:
    """Scores overall and by data source. A sample has `index` of its prompt, `data_source`, `score`, `answer`."""
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


def majority_at_k(correct: Sequence[bool], answers: Sequence[str | None]) -> float:
    """Whether the answer that most of the samples give is correct, 0 without any; a tie is drawn, so that it is the
    share of tied answers that are correct (Wang et al., 2022, https://arxiv.org/abs/2203.11171)."""
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, number in votes.items() if number == most]
    right = [any(c for c, given in zip(correct, answers, strict=True) if given == answer) for answer in winners]
    return sum(right) / len(right) if right else 0.0


def _figures(prefix: str, samples: Sequence[Mapping[str, Any]], group_size: int) -> dict[str, float]:
    """Mean score, accuracy (a score of at least 1 is correct) and, of several samples a prompt, pass@k and maj@k.

    Beside each share of prompts its `ci95`: half the width of the 95% interval of a mean over prompts, by their
    standard error; the samples of one prompt are no independent ones.
    """
    of_prompts: dict[int, list[Mapping[str, Any]]] = {}
    for sample in samples:
        of_prompts.setdefault(sample["index"], []).append(sample)
    correct = [[sample["score"] >= 1 for sample in group] for group in of_prompts.values()]
    answers = [[sample.get("answer") for sample in group] for group in of_prompts.values()]
    shares = {"accuracy": [sum(of_prompt) / len(of_prompt) for of_prompt in correct]}
    for k in powers_of_two(group_size) if group_size > 1 else ():
        shares[f"pass@{k}"] = [pass_at_k(len(of_prompt), sum(of_prompt), k) for of_prompt in correct]
    if group_size > 1 and any(answer is not None for of_prompt in answers for answer in of_prompt):
        shares[f"maj@{group_size}"] = [majority_at_k(*pair) for pair in zip(correct, answers, strict=True)]
    figures = {f"{prefix}/score/mean": sum(sample["score"] for sample in samples) / len(samples)}
    for name, values in shares.items():
        figures[f"{prefix}/{name}"] = sum(values) / len(values)
        if len(values) > 1:
            figures[f"{prefix}/{name}/ci95"] = Z95 * statistics.stdev(values) / math.sqrt(len(values))
    return figures
