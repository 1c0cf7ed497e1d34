"""Checks of the core files listed in docs/architecture.md and of their size as stated in README."""

import inspect
import re
import textwrap
from pathlib import Path

from hybridflow.trainers.ppo import PPO

ROOT = Path(__file__).parents[2]


def core_files() -> list[Path]:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## The core, in the order to read it")[2].partition("\n## ")[0]
    return [ROOT / "src" / "hybridflow" / name for name in re.findall(r"`([a-z_]+/[a-z_]+\.py)`", section)]


def test_core_is_about_6000_lines():
    files = core_files()
    assert len(files) == len(set(files)) > 30
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert 5_500 <= lines <= 6_500
    assert "6,000 lines" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_shows_the_source_of_the_ppo_loop():
    loop = textwrap.dedent(inspect.getsource(PPO.step))
    assert f"```python\n{loop}```" in (ROOT / "README.md").read_text(encoding="utf-8")
