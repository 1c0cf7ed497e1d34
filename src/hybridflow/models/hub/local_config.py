"""Configurations with local copies in place of names on the hub, and back."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.config import Config, leaf_keys
from hybridflow.config.keys import FILES, MODELS
from hybridflow.config.run_paths import ON_HUB
from hybridflow.errors import CheckpointConfigError, DataConfigError
from hybridflow.models.hub.download import download_files, download_model
from hybridflow.models.hub.names import FileName, ModelName, name_of


def with_local_files(config: Config, *, weights: bool = True) -> Config:
    """Return the configuration with the path of a copy for each model and data file on the hub.

    A name without a revision gets the one that the run in trainer.run_dir has recorded, so that a run that continues
    has the same files; in a new run, that of the main branch now. `weights=False`: only configurations of models.
    Raises ModelConfigError, DataConfigError, and CheckpointConfigError for a damaged record.
    """
    values, changes = leaf_keys(config), dict[str, Any]()
    models = {key: ModelName.of(str(values[key])) for key in MODELS if values[key]}
    files = {key: [FileName.of(file) for file in _texts(values[key])] for key in FILES}
    if not any(models.values()) and not any(any(names) for names in files.values()):
        return config
    given = (*models.values(), *(name for names in files.values() for name in names))
    recorded = dict[tuple[str, str], str]()
    if any(name.revision is None for name in given if name):
        recorded = _recorded(Path(config.trainer.run_dir) / "config.toml")
    for key, model in models.items():
        if model:
            pinned = ModelName(model.repository, model.revision or _revision(recorded, key, model.repository))
            changes[key] = str(download_model(key, pinned, weights=weights))
    for key, names in files.items():
        found: list[str] = []
        for path, file in zip(_texts(values[key]), names, strict=True):
            if file is None:
                found.append(path)
                continue
            revision = file.revision or _revision(recorded, key, f"datasets/{file.repository}")
            found += map(str, download_files(key, FileName(file.repository, revision, file.path)))
        changes[key] = tuple(found)
    return _replaced(config, changes)


def with_names(config: Config) -> Config:
    """Return the configuration with the name and exact revision for each copy in the hub's cache: what is recorded."""
    values = leaf_keys(config)
    changes: dict[str, Any] = {key: name_of(str(values[key])) for key in MODELS if values[key]}
    changes |= {key: tuple(map(name_of, _texts(values[key]))) for key in FILES}
    return _replaced(config, {key: value for key, value in changes.items() if value != values[key]})


def local_model(key: str, path: str, *, weights: bool = True) -> Path:
    """Return the directory of a model: `path`, or the copy of what it names on the hub, which may lack its weights."""
    name = ModelName.of(path)
    return Path(path) if name is None else download_model(key, name, weights=weights)


def local_file(key: str, path: str) -> Path:
    """Return a data file: `path`, or the copy of what it names on the hub.

    Raises DataConfigError, which names `key`, for a name of several files.
    """
    name = FileName.of(path)
    if name is None:
        return Path(path)
    found = download_files(key, name)
    if len(found) > 1:
        raise DataConfigError(f"{key}: '{path}' names {len(found)} files, such as {found[0].name}; name one of them.")
    return found[0]


def _texts(value: object) -> tuple[str, ...]:
    assert isinstance(value, tuple)
    return value


def _revision(recorded: Mapping[tuple[str, str], str], key: str, repository: str) -> str | None:
    """Return what the run recorded for a key; for one that is new in the run, what another key recorded."""
    others = (revision for (_, other), revision in recorded.items() if other == repository)
    return recorded.get((key, repository)) or next(others, None)


def _recorded(file: Path) -> dict[tuple[str, str], str]:
    """Return the revisions in a run's config.toml by key and repository; that of a data set begins with datasets/.

    Raises CheckpointConfigError if the file is damaged: another revision would be another model.
    """
    if not file.is_file():
        return {}
    found: dict[tuple[str, str], str] = {}
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
        for key in (*MODELS, *FILES):
            section, _, name = key.rpartition(".")
            value = document.get(section, {}).get(name, ())
            for path in [value] if isinstance(value, str) else value:
                if ON_HUB.match(path):
                    repository, _, rest = path.removeprefix("hf://").partition("@")
                    found.setdefault((key, repository), rest.partition("/")[0])
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointConfigError(
            f"'{file}' is damaged ({error}), and has the revisions that the run began with; restore it, name them as "
            "OWNER/NAME@REVISION (run.json has them), or choose another trainer.run_dir."
        ) from error
    return found


def _replaced(config: Config, changes: dict[str, Any]) -> Config:
    """Return the configuration with other values of some keys of its sections."""
    by_section: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        by_section.setdefault(section, {})[name] = value
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in by_section.items()}
    return config.model_copy(update=sections)
