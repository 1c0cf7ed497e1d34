"""Checkpoints: nested states on disk, written atomically and without executable code; export to Hugging Face."""

from hybridflow.checkpoint.background import BackgroundSave, StateCopy, copy_state
from hybridflow.checkpoint.export import EXPORT_DTYPES, export_model
from hybridflow.checkpoint.saved_files import SavedFile, report_files, require_shared, saved_files, take_reports
from hybridflow.checkpoint.sharded_state import describe_state, read_state_into, save_sharded_state
from hybridflow.checkpoint.state import first_difference, join_state, split_state, zeros_like_state
from hybridflow.checkpoint.state_files import load_state, save_state
from hybridflow.checkpoint.store import Checkpoint, CheckpointStore, open_checkpoint

__all__ = [
    "EXPORT_DTYPES",
    "BackgroundSave",
    "Checkpoint",
    "CheckpointStore",
    "SavedFile",
    "StateCopy",
    "copy_state",
    "describe_state",
    "export_model",
    "first_difference",
    "join_state",
    "load_state",
    "open_checkpoint",
    "read_state_into",
    "report_files",
    "require_shared",
    "save_sharded_state",
    "save_state",
    "saved_files",
    "split_state",
    "take_reports",
    "zeros_like_state",
]
