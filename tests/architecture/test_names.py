"""Names agree everywhere: configuration and tables, metrics and glossary, exports and documentation, versions."""

import ast
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

import pytest

import hybridflow
from hybridflow.algorithms import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES
from hybridflow.algorithms.declarations import ESTIMATORS, LOSSES
from hybridflow.config import leaf_keys
from hybridflow.config.keys import sections
from hybridflow.config.roles import ROLES
from hybridflow.config.sections.advice import AdviceConfig
from hybridflow.config.sections.base import RoleName
from hybridflow.config.sections.learning import AdvantageName, AggregationName, KLEstimatorName, PolicyLossName
from hybridflow.config.sections.models import DTypeName
from hybridflow.controller import Role
from hybridflow.models.loading import DTYPES
from hybridflow.runtime.observe import METRICS, RL_FIGURES, SFT_FIGURES, find_metric
from hybridflow.runtime.observe.findings import FINDINGS
from hybridflow.runtime.observe.metrics import Unit

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "hybridflow"
DOCS = {word for page in ROOT.glob("docs/*.md") for word in re.findall(r"\w+", page.read_text("utf-8"))}
PACKAGES = ["hybridflow", *(f"hybridflow.{each.name}" for each in pkgutil.iter_modules([str(SOURCE)]) if each.ispkg)]
INTERNAL = {f"hybridflow.{name}" for name in ("cli", "models", "runtime")}
"""Packages without names of their own: their modules are imported from."""
NAMES_OF_ALGORITHMS = {*ESTIMATORS, *LOSSES} - {"none"}
FAMILIES = sorted({name.partition("/")[0] for name in METRICS})
METRIC_NAME = re.compile(rf'"((?:{"|".join(FAMILIES)})/[^"\s{{}}]+)"')


def test_names_in_the_configuration_are_the_keys_of_their_tables():
    tables = {
        AdvantageName: ADVANTAGES,
        AggregationName: AGGREGATIONS,
        DTypeName: DTYPES,
        KLEstimatorName: KL_ESTIMATORS,
        PolicyLossName: POLICY_LOSSES,
        RoleName: ROLES,
    }
    assert [(names, set(table)) for names, table in tables.items() if set(get_args(names)) != set(table)] == []
    assert {role.value for role in Role} == {*ROLES, "reward_model"}  # a documented role; runs use Role.Reward


def test_every_key_has_a_description():
    fields = {f"{name}.{key}": info for name, section in sections() for key, info in type(section).model_fields.items()}
    assert [key for key in leaf_keys() if not (fields[key].description or "").endswith(".")] == []


def test_every_metric_in_the_code_is_in_the_glossary():
    named = {name for path in SOURCE.rglob("*.py") for name in METRIC_NAME.findall(path.read_text("utf-8"))}
    assert "actor/loss" in named
    named |= {*RL_FIGURES.values(), *SFT_FIGURES.values()}
    prefixes = {name.rpartition("/")[0] for name in METRICS}
    assert sorted(name for name in named - prefixes if find_metric(name) is None) == []


def test_units_agree_with_the_names_of_metrics():
    assert {metric.unit for metric in METRICS.values()} == set(get_args(Unit))
    endings = {"_tokens_per_s": "tokens/s", "perf/tokens_per_s": "tokens/s", "bytes": "bytes", "/lr": "1"}
    starts = {"timing_s/": "s", "timing_per_token_ms/": "ms/token", "memory_bytes/": "bytes", "mfu/": "1"}
    for name, metric in METRICS.items():
        expected = {unit for end, unit in endings.items() if name.endswith(end)}
        expected |= {unit for start, unit in starts.items() if name.startswith(start)}
        assert expected <= {metric.unit}, name


@pytest.mark.parametrize("finding", [each for each in FINDINGS if each.threshold], ids=lambda finding: finding.name)
def test_when_to_worry_repeats_the_thresholds_of_the_advice(finding):
    threshold = finding.threshold
    if isinstance(threshold, str):
        threshold = getattr(AdviceConfig(), threshold)
    for named in re.findall(r"`([^`/]+/[^`]+)`", finding.found_if):
        pattern = re.sub("<[^>]+>", "*", named)
        names = [named] if named in METRICS else [name for name in METRICS if fnmatchcase(name, pattern)]
        metrics = [METRICS[name] for name in names]
        assert metrics, named
        for metric in metrics:
            numbers = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", metric.worry)}
            assert numbers & {threshold, round(1 - threshold, 6)}, f"{named}: {metric.worry!r} lacks {threshold}"


@pytest.mark.parametrize("package", [*(each for each in PACKAGES if each not in INTERNAL), "hybridflow.controller.ray"])
def test_exported_names_exist_once_and_are_documented(package):
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert [name for name in module.__all__ if name not in DOCS] == []


def test_the_site_has_a_page_of_every_public_package_with_its_names():
    spec = importlib.util.spec_from_file_location("hook", ROOT / "docs/theme/hook.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    paths = {"hybridflow.controller.ray", "hybridflow.rewards", "hybridflow.observability", "hybridflow.errors"}
    assert set(hook.PACKAGES) == {*PACKAGES, *paths} - INTERNAL
    for package in hook.PACKAGES.keys() - {"hybridflow.errors"}:
        assert set(hook.names_of(package)) == set(importlib.import_module(package).__all__), package
        page = hook.reference(package)
        assert [name for name in hook.names_of(package) if not re.search(rf"\b{name}\b", page)] == [], package


def test_a_tag_in_a_docstring_is_code():
    found = []
    for path, node in nodes():
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            tags = re.findall(r"</?[a-z]+>", re.sub(r"`[^`]*`", "", node.value.value))  # the site would drop them
            found += [f"{path.relative_to(SOURCE)}:{node.lineno}: {tag}" for tag in tags]
    assert found == []


def test_names_of_the_root_package_are_listed_and_others_are_errors():
    assert {"DataProto", "Worker", "register", "train", "sft", "dpo", "open_run"} <= set(hybridflow.__all__)
    assert set(hybridflow.__all__) <= set(dir(hybridflow))
    with pytest.raises(AttributeError, match="module 'hybridflow' has no attribute 'DataProtos'"):
        hybridflow.DataProtos  # noqa: B018


@pytest.mark.parametrize(
    ("path", "package"), [("rewards", "environments.rewards"), ("observability", "runtime.observe")]
)
def test_a_public_path_has_the_objects_of_its_package_and_no_modules(path, package):
    public, own = importlib.import_module(f"hybridflow.{path}"), importlib.import_module(f"hybridflow.{package}")
    assert all(getattr(public, name) is getattr(own, name) for name in own.__all__)
    assert set(own.__all__) <= set(dir(public))
    with pytest.raises(ModuleNotFoundError, match=f"'hybridflow.{path}' is not a package"):
        importlib.import_module(f"hybridflow.{path}.table")


def test_the_citation_has_the_version_of_the_package():
    assert re.fullmatch(r"\d+\.\d+\.\d+", hybridflow.__version__)
    assert f"\nversion: {hybridflow.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    """Yield every node of the source, except that of the table of algorithms and of names of other frameworks."""
    for path in sorted(SOURCE.rglob("*.py")):
        if path != SOURCE / "algorithms" / "declarations.py" and path.parent.name != "migration":
            yield from ((path, node) for node in ast.walk(ast.parse(path.read_text("utf-8"))))


def test_an_algorithm_is_one_line_of_a_table():
    found, keyword_values = [], set()  # defaults, descriptions and docstrings name algorithms
    for path, node in nodes():
        if isinstance(node, ast.keyword | ast.Expr):
            keyword_values.add(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in keyword_values:
            if {node.value, *re.findall(r"'([^']*)'", node.value)} & NAMES_OF_ALGORITHMS:
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {node.value!r}")
        elif isinstance(node, ast.Compare | ast.Match):
            sides = [node.subject] if isinstance(node, ast.Match) else [node.left, *node.comparators]
            keys = {ast.unparse(side).rpartition(".")[2] for side in sides}
            texts = [side for side in sides if isinstance(side, ast.Constant | ast.Tuple | ast.List | ast.Set)]
            if {"advantage", "policy_loss"} & keys and (texts or isinstance(node, ast.Match)):
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert found == []
