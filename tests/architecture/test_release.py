"""A version has one number: of the package, of the citation, and of a tag at this commit."""

import re
import subprocess
from pathlib import Path

from hybridflow import __version__

ROOT = Path(__file__).parents[2]


def tags_of_this_commit() -> list[str]:
    """Return the tags of versions; none outside a checkout."""
    command = ["git", "tag", "--points-at", "HEAD", "--list", "v*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []


def test_a_tag_of_this_commit_is_its_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert all(tag == f"v{__version__}" for tag in tags_of_this_commit())


def test_the_citation_has_the_version_of_the_package():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_changelog_has_the_version_of_a_tagged_commit():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    expected = [f"## {tag.removeprefix('v')}" for tag in tags_of_this_commit()] or ["## Unreleased"]
    assert all(heading in changelog for heading in expected)
