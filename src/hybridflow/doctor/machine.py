"""Shared memory, open files and the temporary directory of this machine."""

import os
import resource
import shutil
import tempfile
from pathlib import Path

from hybridflow.doctor.finding import Finding
from hybridflow.runtime.disk_space import describe_bytes

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY = 2**30
"""Bytes that Ray's object store and the collectives of two processes need for small models."""

LEAST_OPEN_FILES = 4096
"""Ray opens some hundred files and sockets for each worker and node."""

RAISED_BY_RAY = 65536
"""Open files up to which Ray raises the limit of its processes, if the hard limit allows it."""

WRITTEN = 2**20
"""Bytes that are written for a trial."""

LEAST_TEMPORARY = 2**30
"""Bytes for the logs of Ray and the files of reward processes."""


def check_shared_memory(directory: Path = SHARED_MEMORY, least: int = LEAST_SHARED_MEMORY) -> Finding:
    """Report the free shared memory."""
    if not directory.is_dir():
        return Finding("shared memory", "warning", f"there is no {directory}", "mount a tmpfs there; Ray uses it")
    free = shutil.disk_usage(directory).free
    text = f"{describe_bytes(free)} free in {directory}"
    if free < least:
        fix = f"give it {describe_bytes(least)} or more, in Docker by --shm-size; or use controller.backend = 'local'"
        return Finding("shared memory", "warning", text, fix)
    return Finding("shared memory", "ok", text)


def check_open_files(least: int = LEAST_OPEN_FILES) -> Finding:
    """Report how many files a process of a run may open."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (limit, hard):
        return Finding("open files", "ok", "any number of files for each process")
    limit = max(limit, min(hard, RAISED_BY_RAY))
    text = f"up to {limit} files for each process"
    if limit < least:
        fix = f"raise the hard limit to {least} or more, as root: `ulimit -Hn`; many workers need more"
        return Finding("open files", "warning", text, fix)
    return Finding("open files", "ok", text)


def check_temporary_files(least: int = LEAST_TEMPORARY) -> Finding:
    """Report the free space of the temporary directory."""
    try:
        directory = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(WRITTEN))
    except OSError as error:
        fix = "free space there, or set TMPDIR to a directory that can be written"
        return Finding("temporary files", "error", f"nothing can be written: {error}", fix)
    free = shutil.disk_usage(directory).free
    text = f"{describe_bytes(free)} free in {directory}"
    wanted = os.environ.get("TMPDIR", directory)
    if not os.path.isdir(wanted):
        return Finding(
            "temporary files", "warning", f"{text}; TMPDIR={wanted} does not exist", "create it, or unset it"
        )
    if free < least:
        return Finding("temporary files", "warning", text, "free space there, or set TMPDIR to another disk")
    return Finding("temporary files", "ok", text)
