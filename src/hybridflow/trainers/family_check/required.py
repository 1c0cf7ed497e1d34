"""What a run requires of the check of its models' families, with results kept in this user's cache.

A result belongs to a small configuration and to the versions of torch, transformers and this package's sources.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

import hybridflow
from hybridflow.config import Config
from hybridflow.errors import ModelError
from hybridflow.models.kernels.library import user_cache
from hybridflow.models.loading import model_config
from hybridflow.runtime.files import write_text_atomically
from hybridflow.runtime.observe.slow_start import named_if_slow
from hybridflow.trainers.family_check.check import LINES, Finding, Report, run_check
from hybridflow.trainers.family_check.lines import Difference
from hybridflow.trainers.family_check.small_config import SmallConfig

ROOMS = ("algorithms", "engines", "models", "rollout", "trainers/family_check")
"""Folders of this package on which a result depends."""


def require_families(config: Config, models: Mapping[str, str], *, generates: bool) -> None:
    """Raise ModelError if the family of one of the models, by key, fails a line of the check that the run needs."""
    needed = lines_of_run(config, generates=generates)
    for key, path in models.items():
        settings = model_config(path)
        if type(settings) not in AutoModelForCausalLM._model_mapping:  # loading the model reports it
            continue
        report = report_of(settings)
        if causes := report.causes(needed):
            raise ModelError(
                f"{key}='{path}': {report.model_type} models fail the check of their family: {causes[0]} "
                f"`hybridflow check-model {path}` prints all lines."
            )


def lines_of_run(config: Config, *, generates: bool) -> set[str]:
    """Return the lines of the check that a run depends on."""
    memory, lines = config.memory, {"transformers"}
    lines |= {"packed", "order"} if memory.packing else {"padded"}
    lines |= {"shared"} if memory.packing and memory.share_prompts else set()
    if generates and config.rollout.backend == "embedded":
        lines |= {line for line in LINES if line.startswith(("decoded", "reused"))}
    return lines


def report_of(config: PretrainedConfig, *, anew: bool = False) -> Report:
    """Return the report of a configuration's family: the one that is kept (not if `anew`), or of a check that runs now.

    Raises ModelError for a model that cannot be loaded at all.
    """
    file = _file_of(config)
    with suppress(OSError, ValueError, TypeError, KeyError):
        if file is not None and not anew:
            return _report(json.loads(file.read_text(encoding="utf-8")))
    with named_if_slow(f"checking {config.model_type} models on a small copy"):
        report = run_check(config)
    with suppress(OSError):
        if file is not None:
            write_text_atomically(file, json.dumps(asdict(report)))
    return report


def _report(values: dict) -> Report:
    findings = [Finding(each["line"], Difference(**each["difference"]), each["kind"]) for each in values["findings"]]
    return Report(values["model_type"], tuple(values["kinds"]), tuple(findings), tuple(values["without_gradient"]))


def _file_of(config: PretrainedConfig) -> Path | None:
    """Return the file of a configuration's result; None without a cache."""
    try:
        directory = user_cache()
    except OSError:
        return None
    facts = (SmallConfig(config).facts(), torch.__version__, transformers.__version__, _sources())
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return directory and directory / f"family-{digest[:16]}.json"


@cache
def _sources() -> str:
    """Return a digest of the sources that the check runs."""
    root, digest = Path(hybridflow.__file__).parent, hashlib.sha256()
    files: Iterable[Path] = (file for room in ROOMS for file in (root / room).rglob("*.*") if file.suffix in SUFFIXES)
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


SUFFIXES = (".py", ".c", ".h")
