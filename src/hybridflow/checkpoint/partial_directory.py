"""Directories written atomically: locked by the writer, published by a rename, removed if the write fails.

The lock is flock on the directory, so the kernel releases it when the process exits or is killed.
"""

import ctypes
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridflow.runtime.files import fsync_path

logger = logging.getLogger(__name__)

_PARTIAL = re.compile(r"\.tmp-(?P<name>.+)-[0-9a-f]{16}")
_REPLACED = re.compile(r"\.old-(?P<name>.+)-[0-9a-f]{16}")

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def partial_directory(target: Path) -> Iterator[Path]:
    """Yield a new locked directory beside `target`; rename it to `target` atomically when the block succeeds.

    An existing `target` is replaced. If the block raises, the new directory is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, lock = _create_locked(target)
    try:
        yield partial
        _publish(partial, target)
    finally:
        _remove(partial)  # after a failure the partial directory, otherwise the directory that was replaced
        os.close(lock)


def remove_directory(directory: Path) -> None:
    """Delete a directory, renamed first so that its name never refers to a partly deleted directory."""
    doomed = directory.with_name(f".tmp-{directory.name}-{secrets.token_hex(8)}")
    os.rename(directory, doomed)
    _remove(doomed)


def remove_leftovers(parent: Path, name: re.Pattern[str]) -> list[Path]:
    """Delete partial directories that killed writers left in `parent`, and return their paths.

    Only directories whose target name matches `name` are deleted. A directory whose writer is alive is kept, and so is
    one on a file system without locks. A directory that was moved aside for an unfinished replacement is restored.
    """
    removed = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        match = _PARTIAL.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
        if not match or not name.fullmatch(match["name"]) or path.is_symlink() or not path.is_dir():
            continue
        if path.name.startswith(".old-") and not (parent / match["name"]).exists():
            _restore(path, parent / match["name"])
        elif remove_unless_in_use(path):
            removed.append(path)
    return removed


def _create_locked(target: Path) -> tuple[Path, int]:
    while True:
        partial = target.with_name(f".tmp-{target.name}-{secrets.token_hex(8)}")
        partial.mkdir()
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is removing leftovers and locked it first
            os.close(lock)
            continue
        except OSError as error:
            logger.debug("cannot lock '%s' (%s); leftovers of killed saves here are not removed.", partial, error)
        if partial.exists():
            return partial, lock
        os.close(lock)


def remove_unless_in_use(directory: Path) -> bool:
    """Delete a directory that no living process has locked; return whether it was deleted."""
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # removed by another process at the same time
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("cannot determine whether '%s' is in use (%s); if not, remove it by hand.", directory, error)
        return False
    else:
        return _remove(directory)
    finally:
        os.close(lock)


def _publish(partial: Path, target: Path) -> None:
    if not target.exists():
        os.rename(partial, target)
    elif not _exchange(partial, target):
        _replace_by_two_renames(partial, target)
    fsync_path(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically; return False if the system or file system does not support it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def _replace_by_two_renames(partial: Path, target: Path) -> None:
    """Replace `target` non-atomically; `remove_leftovers` repairs the result if the process is killed in between."""
    replaced = target.with_name(f".old-{target.name}-{secrets.token_hex(8)}")
    os.rename(target, replaced)
    os.rename(partial, target)
    _remove(replaced)


def _restore(replaced: Path, target: Path) -> None:
    try:
        os.rename(replaced, target)
    except OSError as error:
        logger.warning("'%s' could not be renamed to '%s' (%s); rename it by hand.", replaced, target, error)
    else:
        logger.warning("restored '%s': the process that was replacing it died.", target)


def _remove(directory: Path) -> bool:
    """Delete a directory if it exists; return whether it was deleted. A failure is only logged."""
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.warning("'%s' could not be removed (%s); remove it by hand.", directory, error)
        return False
    return True
