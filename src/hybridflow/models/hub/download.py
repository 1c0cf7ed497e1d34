"""Downloads into the cache of the Hugging Face hub, with errors that say what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridflow.errors import DataConfigError, HybridFlowError, ModelConfigError
from hybridflow.models.hub.confinement import inside_cache, require_inside
from hybridflow.models.hub.names import FileName, ModelName
from hybridflow.runtime.observe import get_logger

logger = get_logger(__name__)

CONFIGURATION = ("config.json", "generation_config.json")
MODEL_FILES = (
    *("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken"),
    *("tokenizer*", "chat_template*", "merges.txt", "vocab.*"),
)
"""The files of a model that are downloaded: weights without code, configuration and tokenizer; never *.py or *.bin."""

UNUSED = ("*/*",)
"""Files of subdirectories, which hold other formats of the same weights."""

DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")

TIMEOUT_S = 30.0
"""Time after which a request without an answer fails; the hub's library repeats some of them five times."""

NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)
"""Errors of a cache directory that cannot be made or written."""


def download_model(key: str, name: ModelName, *, weights: bool = True) -> Path:
    """Return the directory of a model in the hub's cache, after a download of what is missing.

    `weights=False`: only its configuration. Raises ModelConfigError, which names the configuration key.
    """
    wanted = MODEL_FILES if weights else CONFIGURATION
    with _explained(f"{key}='{name}'", name, "model", ModelConfigError):
        directory = _snapshot(
            name.repository, revision=name.revision, allow_patterns=list(wanted), ignore_patterns=list(UNUSED)
        )
    logger.info("%s=%s: revision %s in '%s'", key, name.repository, Path(directory).name, directory)
    return Path(directory)


def download_files(key: str, name: FileName) -> list[Path]:
    """Return the files of a data set in the hub's cache, sorted by name, after a download of what is missing.

    Raises DataConfigError, which names the configuration key, also if the data set has no such file.
    """
    with _explained(f"{key}: '{name}'", name, "data set", DataConfigError):
        if name.path:
            directory = _snapshot(
                name.repository,
                repo_type="dataset",
                revision=name.revision,
                allow_patterns=[name.path, name.path.replace("**/", "")],  # for us, `**` may stand for no directory
                ignore_patterns=_deeper(name.path),
            )
            if found := sorted(path for path in Path(directory).glob(name.path) if path.is_file()):
                return found
        listed = _data_files(name)
    shown = ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
    raise DataConfigError(
        f"{key}: '{name}' names no file; data files of {name.repository}: {shown or 'none'} (parquet, JSON or CSV)."
    )


def _snapshot(repository: str, **options: Any) -> str:
    """Return the directory of a downloaded snapshot. Raises ValueError before a file outside the cache changes."""
    from huggingface_hub import snapshot_download

    with inside_cache():
        directory = snapshot_download(repository, **options)
        require_inside(directory)
    return directory


def _deeper(path: str) -> list[str]:
    """Return the pattern of files below those of `path`: for the hub's library, a `*` matches slashes as well."""
    return [] if "**" in path else ["*/" * (path.count("/") + 1) + "*"]


def _data_files(name: FileName) -> list[str]:
    from huggingface_hub import HfApi

    files = HfApi().list_repo_files(name.repository, repo_type="dataset", revision=name.revision)
    return sorted(file for file in files if file.endswith(DATA_SUFFIXES))


@contextmanager
def timeouts(seconds: float) -> Iterator[None]:
    """Let no request wait for ever: the hub's library sets no limit for those that list a repository."""
    from huggingface_hub import get_session

    def limit(request: Any) -> None:
        given = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            name: seconds if given.get(name) is None else given[name] for name in ("connect", "read", "write", "pool")
        }

    session = get_session()
    hooks = session.event_hooks
    session.event_hooks = {**hooks, "request": [*hooks["request"], limit]}
    try:
        yield
    finally:
        session.event_hooks = hooks


@contextmanager
def _explained(what: str, name: ModelName | FileName, kind: str, error_type: type[HybridFlowError]) -> Iterator[None]:
    """Raise the errors of the hub's library as `error_type`, with what to do."""
    from huggingface_hub import constants, errors

    try:
        with timeouts(TIMEOUT_S):
            yield
    except errors.GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{'' if kind == 'model' else 'datasets/'}{name.repository}"
        raise error_type(
            f"{what}: the {kind} is gated; accept its terms on {page}, then log in with `hf auth login`, or set "
            "HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise error_type(
            f"{what}: neither a path here (a relative path starts at '{Path.cwd()}') nor a {kind} on the hub; check "
            "the name, or log in with `hf auth login` if it is private."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise error_type(f"{what}: the {kind} has no such revision; expected a branch, a tag or a commit.") from error
    except errors.LocalEntryNotFoundError as error:
        reason = (
            "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the hub cannot be reached ({first_line(error)})"
        )
        options = "" if kind == "model" else " --repo-type dataset"
        options += f" --revision {name.revision}" if name.revision else ""
        raise error_type(
            f"{what}: neither a path here (a relative path starts at '{Path.cwd()}') nor complete in the cache "
            f"'{constants.HF_HUB_CACHE}', and {reason}; run `hf download {name.repository}{options}` where there is a "
            "network, or give a local path."
        ) from error
    except errors.HFValidationError as error:
        raise error_type(f"{what}: not a name that a {kind} on the hub can have: {error}") from error
    except OSError as error:
        cache = f"the cache '{constants.HF_HUB_CACHE}'"
        if error.errno == errno.ENOSPC:
            raise error_type(
                f"{what}: the disk of {cache} is full; free space, or set HF_HOME to a directory on another disk. "
                "What is complete is kept."
            ) from error
        if error.errno in NOT_WRITABLE:
            raise error_type(
                f"{what}: {cache} cannot be written ({first_line(error)}); set HF_HOME to a directory that can."
            ) from error
        raise error_type(f"{what}: the download failed: {first_line(error)}{_hint(error)}") from error
    except Exception as error:  # of the library, for an answer that is not the hub's: JSON, types, missing values
        raise error_type(f"{what}: the download failed: {first_line(error)}{_hint(error)}") from error


def _hint(error: Exception) -> str:
    from httpx2 import HTTPError
    from huggingface_hub import constants

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return "; the token is not valid: log in again with `hf auth login`, or correct or unset HF_TOKEN."
    if isinstance(error, HTTPError | OSError):
        return "; run the command again: what is complete is kept."
    return (
        f"; check that {constants.ENDPOINT} (HF_ENDPOINT) is a hub, without a proxy that answers in its place, and "
        f"that the cache '{constants.HF_HUB_CACHE}' is not damaged."
    )


def first_line(error: BaseException) -> str:
    """Return the first line of what caused an error of the hub's library."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {str(cause)[:300]}".splitlines()[0]
