"""The commit that a figure was measured on."""

import subprocess

from support.environments import ROOT


def describe_commit() -> str:
    """Return the abbreviated hash of HEAD, with "+ uncommitted changes" if tracked files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty= + uncommitted changes"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # an archive of the sources, or a machine without git
        return "unknown"
