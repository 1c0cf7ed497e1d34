"""Names of models and of data files on the Hugging Face hub, and the names of their copies in its cache."""

import re
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Self

from hybridflow.errors import DataConfigError

REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
REVISION = r"[A-Za-z0-9][\w./-]*"
_MODEL = re.compile(rf"({REPOSITORY})(?:@({REVISION}))?")
FILES = "hf://"
_FILE = re.compile(rf"hf://datasets/({REPOSITORY})(?:@([\w.-]+))?(?:/(.*))?")
_COPY = re.compile(r".*/(models|datasets)--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})(?:/(.*))?")
LOCAL = Path("models")
"""The directory of downloaded models in the documentation and in recipes; not an owner of models on the hub."""


@dataclass(frozen=True)
class ModelName:
    """A model `OWNER/NAME` on the hub; revision: a branch, a tag or a commit, None for the main branch."""

    repository: str
    revision: str | None = None

    @classmethod
    def of(cls, path: str) -> Self | None:
        """Return the name that the value of a key is; None for a path: of a directory, or below one that exists.

        With a revision, as a run records it, only what exists is a path.
        """
        found = _MODEL.fullmatch(path)
        parent = Path(path).parent
        if found is None or Path(path).exists() or parent == LOCAL or (found[2] is None and parent.exists()):
            return None
        return cls(*found.groups())

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


@dataclass(frozen=True)
class FileName:
    """A file of a data set on the hub, or several: `path` may have the wildcards of a shell."""

    repository: str
    revision: str | None
    path: str

    @classmethod
    def of(cls, name: str) -> Self | None:
        """Return the name that a data file has; None for a local path. Raises DataConfigError for another hf:// name.

        `path` is empty if the name has none.
        """
        if not name.startswith(FILES):
            return None
        found = _FILE.fullmatch(name)
        if found is None or not _is_pattern(found[3] or ""):
            raise DataConfigError(
                f"'{name}' is not a file of a data set on the hub; expected hf://datasets/OWNER/NAME/PATH, or "
                "hf://datasets/OWNER/NAME@REVISION/PATH, where PATH may have wildcards, as in data/train-*.parquet or "
                "**/*.parquet."
            )
        return cls(found[1], found[2], found[3] or "")

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"hf://datasets/{self.repository}{revision}/{self.path}"


def _is_pattern(path: str) -> bool:
    """Return whether a path, which may be empty, names files below a directory: `**` is a directory of its own."""
    *above, last = path.split("/")
    return not path or (
        last not in ("", ".", "..")
        and "**" not in last
        and all(part == "**" or (part not in ("", ".", "..") and "**" not in part) for part in above)
    )


def name_of(path: str | Path) -> str:
    """Return the name, with the exact revision, of a copy in the hub's cache; any other path as it is."""
    found = _COPY.fullmatch(str(path))
    if found is None:
        return str(path)
    kind, owner, name, revision, rest = found.groups()
    if kind == "models":
        return str(path) if rest else str(ModelName(f"{owner}/{name}", revision))
    return str(FileName(f"{owner}/{name}", revision, escape(rest or "")))
