"""JSON files that record their format and format version."""

import json
from pathlib import Path
from typing import Any

from hybridflow.errors import CheckpointError
from hybridflow.runtime import open_plain_file


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the CheckpointError for this cause, which names the file once and ends with a full stop."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error).rstrip(".").removesuffix(f": {path}")
    if reason.startswith(f"'{path}'"):  # not a regular file
        return CheckpointError(f"{reason}.")
    return CheckpointError(f"'{path}' cannot be read: {reason}.")


def read_document(path: Path, format_name: str, version: int) -> dict[str, Any]:
    """Read a JSON file. Raises CheckpointError unless it is readable and has this format and version."""
    try:
        with open_plain_file(path) as file:
            document = json.loads(file.read().decode("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"'{path}' is missing.") from error
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' cannot be read as JSON: {error}.") from error
    if not isinstance(document, dict) or document.get("format") != format_name:
        raise CheckpointError(f"'{path}' is JSON, but not a {format_name}; hybridflow did not write it.")
    if document.get("version") != version:
        raise CheckpointError(
            f"'{path}' has format version {document.get('version')!r}, but this hybridflow reads version {version}; "
            "use the version of hybridflow that wrote it, or a newer one."
        )
    return document
