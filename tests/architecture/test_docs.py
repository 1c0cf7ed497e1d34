"""Checks of the documentation: its programs run, its tables are up to date, and its links exist."""

import re
from pathlib import Path

import pytest
import torch

from hybridflow.config import reference_markdown
from hybridflow.observability import metrics_markdown
from hybridflow.protocol import FIELDS

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("docs/*.md"))
RAY_PAGES = {"ray.md"}
TEXTS = [*PAGES, *sorted(ROOT.glob("docs/decisions/*.md")), *sorted(ROOT.glob("*.md"))]
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture
def restore_process():
    """Restore thread count, determinism and the field glossary, which documentation programs may change."""
    glossary = dict(FIELDS)
    num_threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(deterministic)
    FIELDS.clear()
    FIELDS.update(glossary)


@pytest.mark.usefixtures("restore_process")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.ray, pytest.mark.slow] * (page.name in RAY_PAGES))
        for page in PAGES
    ],
)
def test_programs_of_a_page_run_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text("utf-8")
    namespace = {"__name__": f"docs_{page.stem}"}
    for block in PROGRAM.finditer(text):
        blank_lines = text[: block.start(1)].count("\n")  # make traceback line numbers match the page
        exec(compile("\n" * blank_lines + block[1], str(page), "exec"), namespace)


def test_configuration_table_equals_the_generated_one():
    assert _between_marks(ROOT / "docs/configuration.md") == reference_markdown()


def test_metrics_table_equals_the_generated_one():
    assert _between_marks(ROOT / "docs/metrics.md") == metrics_markdown()


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text.relative_to(ROOT)))
def test_links_within_the_repository_exist(text):
    links = [link.partition("#")[0] for link in LINK.findall(text.read_text("utf-8")) if "://" not in link]
    assert [link for link in links if link and not (text.parent / link).exists()] == []


def test_index_links_every_page():
    linked = LINK.findall((ROOT / "docs/index.md").read_text("utf-8"))
    assert [page.name for page in PAGES if page.name != "index.md" and page.name not in linked] == []


def _between_marks(page):
    text = page.read_text("utf-8")
    start, end = "<!-- generated: start -->\n", "<!-- generated: end -->"
    return text[text.index(start) + len(start) : text.index(end)].strip("\n") + "\n"
