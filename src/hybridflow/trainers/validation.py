"""Validation: generate on held-out prompts, score, and report accuracy and pass@k. Changes no training state."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybridflow.config import Config
from hybridflow.controller import Backend, WorkerGroup
from hybridflow.data import RLHFDataset
from hybridflow.protocol import DataProto
from hybridflow.protocol.meta_info import NOISE_KEY
from hybridflow.trainers.build.groups import BackendOwner
from hybridflow.trainers.episode_rows import EpisodeRows
from hybridflow.trainers.read_columns import read
from hybridflow.trainers.run.samples import OF_EPISODES, TEXTS, bounded_json, numbers_of_episodes, prompt_text
from hybridflow.trainers.sampling.generation import response_rows

VALIDATION_STREAM = 1
"""Second entry of the noise key of validation (training: 0). Its noise is the same at every step."""

Z95 = 1.96
"""Half width of the central 95% of a normal distribution, in standard deviations."""

READ_COLUMNS = ("response_mask", "group_ids", "data_sources", "answers", *TEXTS, "scores")


class Validator(BackendOwner):
    """Validation of a rollout group on a dataset, `batch_size` prompts at a time."""

    def __init__(
        self,
        dataset: RLHFDataset,
        rollout: WorkerGroup,
        rewards: WorkerGroup,
        config: Config,
        backend: Backend | None = None,
    ) -> None:
        self.backend = backend
        self.dataset, self.rollout, self.rewards, self.config = dataset, rollout, rewards, config
        self.batch_size, self.group_size = config.validation.batch_size, config.validation.group_size

    def run(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return the metrics `val/...`, and all samples with prompt, response, score and data source."""
        samples: list[dict[str, Any]] = []
        lengths: list[int] = []
        for start in range(0, len(self.dataset), self.batch_size):
            indices = range(start, min(start + self.batch_size, len(self.dataset)))
            prompts = self.dataset.collate(indices)
            prompts = prompts.union(DataProto.from_dict({"group_ids": torch.tensor(indices)}))
            prompts.meta_info[NOISE_KEY] = [self.config.trainer.seed, VALIDATION_STREAM, 0]
            rollouts = self.rollout.generate_validation_sequences.remote(prompts)
            future = response_rows(prompts, self.config, self.group_size).union(rollouts)
            has_episodes = bool(self.config.environment.classes)
            if not has_episodes:
                future = future.union(self.rewards.score_validation.remote(future))
            names = (*READ_COLUMNS, *OF_EPISODES, "finish_reasons") if has_episodes else READ_COLUMNS
            batch, episodes = read(future, names), EpisodeRows(future)
            numbers = numbers_of_episodes(future, episodes) if has_episodes else {}
            lengths += episodes.joined(batch.batch)["response_mask"].sum(-1).tolist()
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
                    **({"finish_reason": columns["finish_reasons"][row]} if has_episodes else {}),
                    **{name: values[row // episodes.size] for name, values in numbers.items()},
                    **{name: columns[column][row] for column, name in OF_EPISODES.items() if has_episodes},
                }
                for row in range(0, len(batch), episodes.size)
            ]
        metrics = validation_metrics(samples, self.group_size)
        metrics["val/response_length/mean"] = sum(lengths) / len(lengths)
        return metrics, samples


def validation_metrics(samples: Sequence[Mapping[str, Any]], group_size: int) -> dict[str, float]:
    """Return metrics overall and by data source of samples with `index` (prompt), `data_source`, `score`, `answer`."""
    metrics = _metrics_of("val", samples, group_size)
    for source in sorted({sample["data_source"] for sample in samples}):
        own = [sample for sample in samples if sample["data_source"] == source]
        metrics |= _metrics_of(f"val/{source}", own, group_size)
    return metrics


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that k samples drawn without replacement include a correct one.

    Chen et al., 2021, https://arxiv.org/abs/2107.03374, equation 1.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to `limit`."""
    return [1 << i for i in range(limit.bit_length())]


def majority_at_k(correct: Sequence[bool], answers: Sequence[str | None], k: int = 0) -> float:
    """Return 1 if the most frequent answer is correct, else 0; for a tie the share of correct answers in it.

    0 if no sample has an answer. With `k` the mean over the parts of `k` samples that follow each other, without a
    rest; 0: all samples are one part. Wang et al., 2022, https://arxiv.org/abs/2203.11171.
    """
    if k and k < len(answers):
        starts = range(0, len(answers) - k + 1, k)
        return sum(majority_at_k(correct[i : i + k], answers[i : i + k]) for i in starts) / len(starts)
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, number in votes.items() if number == most]
    right = [any(c for c, given in zip(correct, answers, strict=True) if given == answer) for answer in winners]
    return sum(right) / len(right) if right else 0.0


def _metrics_of(prefix: str, samples: Sequence[Mapping[str, Any]], group_size: int) -> dict[str, float]:
    """Return mean score, accuracy (a score of at least 1 is correct) and, for several samples a prompt, pass@k, maj@k.

    `ci95` of each metric is half the width of its 95% confidence interval, from the standard error over prompts, since
    samples of one prompt are not independent.
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
        for k in sorted({*powers_of_two(group_size)[1:], group_size}):
            shares[f"maj@{k}"] = [majority_at_k(*pair, k) for pair in zip(correct, answers, strict=True)]
    metrics = {f"{prefix}/score/mean": sum(sample["score"] for sample in samples) / len(samples)}
    for name, values in shares.items():
        metrics[f"{prefix}/{name}"] = sum(values) / len(values)
        if len(values) > 1:
            metrics[f"{prefix}/{name}/ci95"] = Z95 * statistics.stdev(values) / math.sqrt(len(values))
    return metrics
