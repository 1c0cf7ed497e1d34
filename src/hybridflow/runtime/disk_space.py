"""Sizes and free disk space, formatted for error messages."""

import shutil
from pathlib import Path

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def describe_bytes(num_bytes: int) -> str:
    """Format a size with its binary unit: 1536 -> '1.5 KiB'."""
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{num_bytes} bytes" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def describe_free_space(directory: Path) -> str:
    """Return the free space on the file system of an existing directory, as text."""
    return f"{describe_bytes(shutil.disk_usage(directory).free)} free on the file system of '{directory}'"
