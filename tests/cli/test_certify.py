"""`hybridflow certify` says what is wrong before a run starts, and leaves nothing behind."""

from pathlib import Path

import pytest

RECIPE = str(Path(__file__).parents[2] / "recipes/algorithms/grpo.toml")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--steps", "1"], "'1' is invalid: expected a number of steps from 2 to 1,000,000"),
        (["trainer.total_steps=3"], "trainer.total_steps=3 has fewer steps than the 4 that are compared"),
        (["trainer.total_steps=1", "--quick"], "fewer steps than the 2"),
        (["--output", "full"], "'full' exists and is not an empty directory"),
        (["--output", "full/file"], "'full/file' exists and is not an empty directory"),
        (["--output", "full/file/new"], "--output 'full/file/new' cannot be made: Not a directory"),
        (["actor.lr=1"], "actor.lr: no such key"),
    ],
)
def test_a_certificate_that_cannot_be_made_is_an_error(shown, tmp_path, monkeypatch, arguments, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    out, err = shown("certify", RECIPE, *arguments, status=2)
    assert problem in err
    assert out == ""
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]
