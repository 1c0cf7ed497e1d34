"""Public names are exported once, importable and documented."""

import importlib
import re
from pathlib import Path

import pytest

import hybridflow

DOCS = "\n".join(path.read_text("utf-8") for path in sorted((Path(__file__).parents[2] / "docs").glob("*.md")))
PACKAGES = (
    "hybridflow",
    "hybridflow.algorithms",
    "hybridflow.api",
    "hybridflow.checkpoint",
    "hybridflow.config",
    "hybridflow.controller",
    "hybridflow.controller.ray",
    "hybridflow.data",
    "hybridflow.engines",
    "hybridflow.environments",
    "hybridflow.hub",
    "hybridflow.kernels",
    "hybridflow.migration",
    "hybridflow.models",
    "hybridflow.observability",
    "hybridflow.protocol",
    "hybridflow.rewards",
    "hybridflow.rollout",
    "hybridflow.trainers",
    "hybridflow.workers",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_names_exist_and_are_unique(package):
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_names_are_documented(package):
    names = importlib.import_module(package).__all__
    assert [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", DOCS)] == []


def test_root_package_exports_exactly_the_designed_names():
    assert set(hybridflow.__all__) == {
        "DataProto",
        "DataProtoFuture",
        "Dispatch",
        "Execute",
        "Run",
        "Worker",
        "dpo",
        "load_config",
        "open_run",
        "register",
        "reward_model",
        "sft",
        "train",
    }
    assert set(hybridflow.__all__) <= set(dir(hybridflow))


def test_unknown_root_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'hybridflow' has no attribute 'DataProtos'"):
        hybridflow.DataProtos  # noqa: B018


def test_the_citation_has_the_version_of_the_package():
    citation = (Path(__file__).parents[2] / "CITATION.cff").read_text("utf-8")
    assert f"version: {hybridflow.__version__}\n" in citation
