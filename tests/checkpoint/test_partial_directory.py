import re
from pathlib import Path

import pytest

from hybridflow.checkpoint.partial_directory import _replace_by_two_renames, partial_directory, remove_leftovers

ANY = re.compile(".*")


def make(directory: Path, text: str) -> Path:
    directory.mkdir()
    (directory / "file").write_text(text)
    return directory


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_target_appears_only_when_complete(tmp_path):
    with partial_directory(tmp_path / "deep" / "target") as partial:
        (partial / "file").write_text("new")
        assert not (tmp_path / "deep" / "target").exists()
    assert names(tmp_path / "deep") == ["target"]
    assert (tmp_path / "deep" / "target" / "file").read_text() == "new"


def test_old_target_exists_until_it_is_replaced(tmp_path):
    target = make(tmp_path / "target", "old")
    with partial_directory(target) as partial:
        (partial / "other").write_text("new")
        assert names(target) == ["file"]
    assert names(tmp_path) == ["target"]
    assert names(target) == ["other"]


def test_two_renames_replace_target_without_exchange(tmp_path):
    target = make(tmp_path / "target", "old")
    _replace_by_two_renames(make(tmp_path / ".tmp-target-0123456789abcdef", "new"), target)
    assert names(tmp_path) == ["target"]
    assert (target / "file").read_text() == "new"


@pytest.mark.parametrize(("renamed", "kept"), [(".tmp-target-0123456789abcdef", "old"), ("target", "new")])
def test_kill_between_or_after_two_renames_is_repaired(tmp_path, renamed, kept):
    old = make(tmp_path / ".old-target-0123456789abcdef", "old")
    make(tmp_path / renamed, "new")
    assert (old in remove_leftovers(tmp_path, ANY)) == (kept == "new")
    assert names(tmp_path) == ["target"]
    assert (tmp_path / "target" / "file").read_text() == kept


def test_only_directories_that_match_pattern_are_leftovers(tmp_path):
    ours = make(tmp_path / ".tmp-step_7-0123456789abcdef", "")
    make(tmp_path / ".tmp-model-0123456789abcdef", "")
    make(tmp_path / ".tmp-step_7-short", "")
    make(tmp_path / "elsewhere", "precious")
    (tmp_path / ".tmp-step_8-0123456789abcdef").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".tmp-step_9-0123456789abcdef").write_text("a file")
    assert remove_leftovers(tmp_path, re.compile(r"step_\d")) == [ours]
    assert len(names(tmp_path)) == 5
    assert (tmp_path / "elsewhere" / "file").read_text() == "precious"


def test_directory_being_written_is_not_a_leftover(tmp_path):
    with partial_directory(tmp_path / "target") as partial:
        assert remove_leftovers(tmp_path, ANY) == []
        assert partial.is_dir()
