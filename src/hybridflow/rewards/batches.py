"""All samples as one call of a function that takes batches, and its answer as one for each sample."""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.rewards.outcome import Outcome
from hybridflow.rewards.reward_process import ARGUMENTS, BATCH_ARGUMENTS


def as_batch(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The lists data_sources, solution_strs, ground_truths and extra_infos."""
    names = zip(BATCH_ARGUMENTS, ARGUMENTS, strict=True)
    return {several: [sample[one] for sample in samples] for several, one in names}


def split(outcome: Outcome, num_samples: int) -> list[Outcome]:
    """The outcome of each sample; where the batch failed, all have."""
    result = outcome.result.tolist() if hasattr(outcome.result, "tolist") else outcome.result
    if outcome.kind is not None:
        return [outcome] * num_samples
    if not isinstance(result, list | tuple) or len(result) != num_samples:
        found = f"{len(result)} results" if isinstance(result, list | tuple) else f"{result!r:.100}"
        problem = f"ValueError: a function of batches must return a list of {num_samples} results, one for each sample"
        return [Outcome(None, "raised", f"{problem}, not {found}")] * num_samples
    return [Outcome(item) for item in result]
