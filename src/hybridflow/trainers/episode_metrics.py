"""Metrics of episodes: their turns, calls of tools, and ends."""

from hybridflow.observability import spread
from hybridflow.protocol import DataProtoFuture
from hybridflow.trainers.episode_rows import EpisodeRows
from hybridflow.trainers.reading import Batch, read

ENDS = ("done", "turns", "tokens", "seconds", "rows", "error")
"""Why an episode ended: the values of `EndReason`."""

_COLUMNS = ("response_mask", "turn_ids", "num_tool_calls", "num_tool_errors", "finish_reasons")


def episode_metrics(batch: Batch) -> dict[str, float]:
    """Return the metrics `episode/...` of a batch with episodes; an empty dictionary without."""
    if "episode_ids" not in (DataProtoFuture.of(batch).columns or ()):
        return {}
    data, rows = read(batch, _COLUMNS), EpisodeRows(batch)
    columns = rows.joined(data.batch)
    ends = data.non_tensor_batch["finish_reasons"][:: rows.size].tolist()
    calls, errors = columns["num_tool_calls"].sum().item(), columns["num_tool_errors"].sum().item()
    turns = columns["turn_ids"].where(columns["response_mask"], -1).amax(-1) + 1
    return {
        **spread("episode/turns", turns.tolist()),
        "episode/tool_calls": calls / len(ends),
        "episode/tool_error_rate": errors / max(calls, 1),
        **{f"episode/ended_{reason}": ends.count(reason) / len(ends) for reason in ENDS},
    }
