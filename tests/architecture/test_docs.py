"""Checks of the documentation: its programs run, its tables are up to date, and its links exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridflow.cli.main import COMMANDS, main
from hybridflow.config import load_config, reference_markdown
from hybridflow.observability import metrics_markdown
from hybridflow.protocol import FIELDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = sorted(ROOT.glob("docs/*.md"))
RAY_PAGES = {"ray.md"}
TEXTS = [*PAGES, *sorted(ROOT.glob("docs/decisions/*.md")), *sorted(ROOT.glob("*.md"))]
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SCRIPT = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
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


def test_commands_are_listed_as_printed(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = capsys.readouterr().out.partition("commands:\n")[2].partition("\n\n")[0]
    page = (ROOT / "docs/commands.md").read_text("utf-8")
    assert f"commands:\n{commands}\n```" in page, f"put this into docs/commands.md:\n{commands}"


def test_reward_and_recipe_of_readme_are_valid(tmp_path):
    (tmp_path / "recipe.toml").write_text(re.findall(r"^```toml\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[0])
    assert load_config(tmp_path / "recipe.toml").trainer.run_dir == "runs/mine"
    namespace = {}
    exec(PROGRAM.findall(README)[1], namespace)
    scores = [namespace["score"]("openai/gsm8k", text, "72", {})["score"] for text in ("It is #### 72\n", "#### 7")]
    assert scores == [1.0, 0.0]


@pytest.mark.slow
def test_commands_of_the_tutorial_run(tmp_path):
    script = "".join(SCRIPT.findall((ROOT / "docs/tutorial.md").read_text("utf-8")))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "step 40/100" in done.stdout
    assert "val/accuracy" in done.stdout
    assert (tmp_path / "exported/model.safetensors").is_file()
    assert (tmp_path / "curve.png").is_file()


def test_every_command_is_documented():
    page = (ROOT / "docs/commands.md").read_text("utf-8")
    assert re.findall(r"^\| `hybridflow ([a-z-]+)", page, re.MULTILINE) == list(COMMANDS)
    targets = re.findall(r"^([a-z_-]+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert [target for target in targets if f"`make {target}`" not in page] == []


def test_configuration_table_equals_the_generated_one():
    assert _between_marks(ROOT / "docs/configuration.md") == reference_markdown()


def test_metrics_table_equals_the_generated_one():
    assert _between_marks(ROOT / "docs/metrics.md") == metrics_markdown()


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text.relative_to(ROOT)))
def test_links_within_the_repository_exist(text):
    links = [link.partition("#") for link in LINK.findall(text.read_text("utf-8")) if "://" not in link]
    targets = [(text.parent / path if path else text, anchor) for path, _, anchor in links]
    assert [str(path) for path, _ in targets if not path.exists()] == []
    assert [f"{path}#{anchor}" for path, anchor in targets if anchor and anchor not in _anchors(path)] == []


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text.relative_to(ROOT)))
def test_every_test_file_that_a_page_names_exists(text):
    named = re.findall(r"\btests/[a-z_/]+\.py", text.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_index_links_every_page():
    linked = LINK.findall((ROOT / "docs/index.md").read_text("utf-8"))
    assert [page.name for page in PAGES if page.name != "index.md" and page.name not in linked] == []


def _anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _between_marks(page):
    text = page.read_text("utf-8")
    start, end = "<!-- generated: start -->\n", "<!-- generated: end -->"
    return text[text.index(start) + len(start) : text.index(end)].strip("\n") + "\n"
