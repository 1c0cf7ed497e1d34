"""Log, metrics and trackers of a run, its traces, speed and memory, and a record of its environment."""

from hybridflow.observability.console import (
    DPO_FIGURES,
    REWARD_MODEL_FIGURES,
    RL_FIGURES,
    SFT_FIGURES,
    ConsoleTracker,
)
from hybridflow.observability.dataflow import dataflow_edges, draw_dot, draw_mermaid, draw_text
from hybridflow.observability.guarded_tracker import GuardedTracker
from hybridflow.observability.jsonl import JsonlWriter, read_jsonl
from hybridflow.observability.log import get_logger
from hybridflow.observability.memory import log_memory, memory_bytes
from hybridflow.observability.metrics import (
    METRICS,
    Metric,
    find_metric,
    flatten,
    metrics_markdown,
    reduce_lists,
    reduce_metrics,
    spread,
)
from hybridflow.observability.mlflow import MLflowTracker
from hybridflow.observability.performance import performance_report
from hybridflow.observability.plot import plot_curves
from hybridflow.observability.prometheus import PrometheusTracker
from hybridflow.observability.run_info import collect_run_info, git_commit
from hybridflow.observability.tensorboard import TensorBoardTracker
from hybridflow.observability.timing import idle_shares, per_token_ms, timed, tokens_per_s
from hybridflow.observability.trace import (
    Trace,
    TraceEvent,
    stage_seconds,
    trace_row,
    transfer_metrics,
    transfer_report,
)
from hybridflow.observability.tracker import MultiTracker, Tracker
from hybridflow.observability.weights_and_biases import WandbTracker

__all__ = [
    "DPO_FIGURES",
    "METRICS",
    "REWARD_MODEL_FIGURES",
    "RL_FIGURES",
    "SFT_FIGURES",
    "ConsoleTracker",
    "GuardedTracker",
    "JsonlWriter",
    "MLflowTracker",
    "Metric",
    "MultiTracker",
    "PrometheusTracker",
    "TensorBoardTracker",
    "Trace",
    "TraceEvent",
    "Tracker",
    "WandbTracker",
    "collect_run_info",
    "dataflow_edges",
    "draw_dot",
    "draw_mermaid",
    "draw_text",
    "find_metric",
    "flatten",
    "get_logger",
    "git_commit",
    "idle_shares",
    "log_memory",
    "memory_bytes",
    "metrics_markdown",
    "per_token_ms",
    "performance_report",
    "plot_curves",
    "read_jsonl",
    "reduce_lists",
    "reduce_metrics",
    "spread",
    "stage_seconds",
    "timed",
    "tokens_per_s",
    "trace_row",
    "transfer_metrics",
    "transfer_report",
]
