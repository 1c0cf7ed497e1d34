"""The error for a file of a checkpoint that cannot be read."""

from pathlib import Path

from hybridflow.errors import CheckpointError


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the CheckpointError for this cause, which names the file once and ends with a full stop."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error).rstrip(".").removesuffix(f": {path}")
    if reason.startswith(f"'{path}'"):  # not a regular file
        return CheckpointError(f"{reason}.")
    return CheckpointError(f"'{path}' cannot be read: {reason}.")
