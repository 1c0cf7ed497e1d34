"""Conversion between samples and the single call of a reward function that takes batches."""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.rewards.outcome import Outcome
from hybridflow.rewards.reward_process import ARGUMENTS, BATCH_ARGUMENTS


def as_batch(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the lists data_sources, solution_strs, ground_truths and extra_infos."""
    names = zip(BATCH_ARGUMENTS, ARGUMENTS, strict=True)
    return {plural: [sample[singular] for sample in samples] for plural, singular in names}


def split(outcome: Outcome, num_samples: int) -> list[Outcome]:
    """Return the outcome of each sample; if the batch failed, each sample gets its failure."""
    result = outcome.result.tolist() if hasattr(outcome.result, "tolist") else outcome.result
    if outcome.kind is not None:
        return [outcome] * num_samples
    if not isinstance(result, list | tuple) or len(result) != num_samples:
        found = f"{len(result)} results" if isinstance(result, list | tuple) else f"{result!r:.100}"
        problem = f"ValueError: a batch function must return a list of {num_samples} results, one for each sample"
        return [Outcome(None, "raised", f"{problem}, not {found}")] * num_samples
    return [Outcome(item) for item in result]
