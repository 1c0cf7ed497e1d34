"""The outcomes of the samples of a batch, from that of the one call for all of them."""

from hybridflow.rewards.outcome import Outcome


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
