"""`checkpoint.json`, the list of a checkpoint's files, written last. A directory without it is not a checkpoint."""

import hashlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.saved_files import SHARE_IT, SavedFile, read_document, saved_files, unreadable
from hybridflow.errors import CheckpointError
from hybridflow.runtime.files import fsync_path
from hybridflow.runtime.plain_files import open_plain_file

MANIFEST_NAME = "checkpoint.json"
CHECKPOINT_FORMAT = "hybridflow-checkpoint"
CHECKPOINT_VERSION = 1

_ALLOWED_SUFFIXES = (".safetensors", ".json")


@dataclass(frozen=True)
class Manifest:
    """The step, the writer's `info`, and the files: relative path -> (size in bytes, SHA-256)."""

    step: int
    info: dict[str, Any]
    files: dict[str, tuple[int, str]]


def check_info(info: dict[str, Any]) -> None:
    """Raise CheckpointError unless `info` is unchanged by writing it as JSON and reading it back."""
    try:
        same = json.loads(json.dumps(info, allow_nan=False)) == info
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"info={info!r} cannot be written as JSON: {error}.") from error
    if not same:
        raise CheckpointError(f"info={info!r} is changed by JSON; use str keys, and lists instead of tuples.")


def write_manifest(directory: Path, step: int, info: dict[str, Any], saved: Sequence[SavedFile] = ()) -> None:
    """Write the sizes and hashes of all files of `directory` to `checkpoint.json`.

    Files in `saved` are on disk and hashed; the others are flushed and hashed here. Raises CheckpointError for a file
    that is neither safetensors nor JSON (it might hold code) or that another process wrote but this one does not see,
    and OSError if the disk fails.
    """
    for file in saved:
        _require_visible(directory / file.path, file.num_bytes)
    written_elsewhere = {directory / file.path for file in saved}
    found = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    own = sorted(path for path in found if path not in written_elsewhere)
    for path in (*written_elsewhere, *own):
        if path.suffix not in _ALLOWED_SUFFIXES or path.is_symlink() or not path.is_file():
            raise CheckpointError(
                f"'{path}' is not a plain {' or '.join(_ALLOWED_SUFFIXES)} file; write it with save_state."
            )
    entries = sorted([*saved, *saved_files(directory, own)])
    files = {file.path: {"bytes": file.num_bytes, "sha256": file.sha256} for file in entries}
    document = {"format": CHECKPOINT_FORMAT, "version": CHECKPOINT_VERSION, "step": step, "info": info, "files": files}
    document["sha256"] = _digest_of(document)
    (directory / MANIFEST_NAME).write_text(json.dumps(document, indent=1), encoding="utf-8")
    fsync_path(directory / MANIFEST_NAME)
    for folder in {(directory / name).parent for name in files} | {directory}:
        fsync_path(folder)


def read_manifest(directory: Path, *, verify_hashes: bool) -> Manifest:
    """Read the manifest of a checkpoint, and verify that its files exist with the recorded sizes.

    `verify_hashes` also compares the contents. Raises CheckpointError naming a file that is missing, damaged, foreign,
    not a regular file, not listed, or of a newer format version.
    """
    manifest = _parse(directory / MANIFEST_NAME)
    for name, (num_bytes, digest) in manifest.files.items():
        file = directory / name
        try:
            _require_plain_folders(directory, file)
            with open_plain_file(file) as opened:
                found_bytes = os.fstat(opened.fileno()).st_size
                if found_bytes != num_bytes:
                    raise CheckpointError(
                        f"'{file}' is damaged: it has {found_bytes} bytes, but was saved with {num_bytes}."
                    )
                found_digest = hashlib.file_digest(opened, "sha256").hexdigest() if verify_hashes else digest
            if found_digest != digest:
                raise CheckpointError(
                    f"'{file}' is damaged: its SHA-256 is {found_digest}, but was {digest} when it was saved."
                )
        except FileNotFoundError as error:
            raise CheckpointError(f"'{file}' is missing.") from error
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise unreadable(file, error) from error
    _require_listed(directory, manifest)
    return manifest


def _require_plain_folders(directory: Path, file: Path) -> None:
    """Raise CheckpointError if a folder between them is a symbolic link, which may lead elsewhere."""
    for folder in file.relative_to(directory).parents[:-1]:
        if (directory / folder).is_symlink():
            raise CheckpointError(f"'{directory / folder}' is a symbolic link, not a directory.")


def _require_listed(directory: Path, manifest: Manifest) -> None:
    """Raise CheckpointError for a file of shards that the manifest does not list: a reader of the folder reads it."""
    for component in {name.split("/")[0].removesuffix(".safetensors") for name in manifest.files}:
        for file in sorted((directory / component).rglob("*.safetensors")):
            if file.relative_to(directory).as_posix() not in manifest.files:
                raise CheckpointError(
                    f"'{file}' is not listed in {MANIFEST_NAME}, so it is not of this checkpoint; remove it."
                )


def _parse(path: Path) -> Manifest:
    if not path.exists():
        raise CheckpointError(f"'{path}' is missing, so '{path.parent}' is not a checkpoint.")
    document = read_document(path, CHECKPOINT_FORMAT, CHECKPOINT_VERSION)
    if document.pop("sha256", None) != _digest_of(document):
        raise CheckpointError(f"'{path}' is damaged: its SHA-256 differs from the one it was saved with.")
    try:
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in document["files"].items()}
        manifest = Manifest(int(document["step"]), dict(document["info"]), files)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"'{path}' is damaged: {type(error).__name__} {error}.") from error
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts or not name.endswith(_ALLOWED_SUFFIXES):
            raise CheckpointError(
                f"'{path}' lists '{name}', which is not a file of a checkpoint; hybridflow did not write it."
            )
    return manifest


def _require_visible(path: Path, num_bytes: int) -> None:
    """Raise CheckpointError unless the file that another process wrote has its size in this process's view."""
    found = path.stat().st_size if path.is_file() else None
    if found != num_bytes:
        state = "is missing" if found is None else f"has {found} bytes"
        raise CheckpointError(
            f"'{path}' {state} on node {socket.gethostname()}, but a rank wrote {num_bytes} bytes to it. {SHARE_IT}"
        )


def _digest_of(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
