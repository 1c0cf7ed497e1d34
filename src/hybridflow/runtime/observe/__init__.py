"""Log, metrics and trackers of a run, its traces, speed and memory, and a record of its environment."""

from hybridflow.runtime.observe.console import (
    DPO_FIGURES,
    REWARD_MODEL_FIGURES,
    RL_FIGURES,
    SFT_FIGURES,
    ConsoleTracker,
)
from hybridflow.runtime.observe.dataflow import dataflow_edges, draw_mermaid, draw_text
from hybridflow.runtime.observe.dataflow_svg import draw_svg
from hybridflow.runtime.observe.guarded_tracker import GuardedTracker
from hybridflow.runtime.observe.jsonl import JsonlWriter, read_jsonl
from hybridflow.runtime.observe.log import get_logger
from hybridflow.runtime.observe.memory import log_memory, memory_bytes
from hybridflow.runtime.observe.metrics import (
    METRICS,
    Metric,
    find_metric,
    flatten,
    metrics_markdown,
    reduce_lists,
    spread,
)
from hybridflow.runtime.observe.mlflow import MLflowTracker
from hybridflow.runtime.observe.plot import plot_curves
from hybridflow.runtime.observe.run_files import performance_report
from hybridflow.runtime.observe.run_info import collect_run_info, git_commit
from hybridflow.runtime.observe.tensorboard import TensorBoardTracker
from hybridflow.runtime.observe.timing import idle_shares, per_token_ms, stage_seconds, timed, tokens_per_s
from hybridflow.runtime.observe.trace import Trace, TraceEvent, trace_row
from hybridflow.runtime.observe.tracker import MultiTracker, Tracker
from hybridflow.runtime.observe.transfers import transfer_metrics, transfer_report
from hybridflow.runtime.observe.weights_and_biases import WandbTracker

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
    "TensorBoardTracker",
    "Trace",
    "TraceEvent",
    "Tracker",
    "WandbTracker",
    "collect_run_info",
    "dataflow_edges",
    "draw_mermaid",
    "draw_svg",
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
    "spread",
    "stage_seconds",
    "timed",
    "tokens_per_s",
    "trace_row",
    "transfer_metrics",
    "transfer_report",
]
