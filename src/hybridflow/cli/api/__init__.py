"""The commands from Python: the same runs, with data, rewards and results of a script or a notebook."""

from hybridflow.cli.api.run import Run, Table, open_run
from hybridflow.cli.api.start import dpo, reward_model, sft, train

__all__ = ["Run", "Table", "dpo", "open_run", "reward_model", "sft", "train"]
