import pytest

from hybridflow.cli.main import main
from hybridflow.config import load_config, reference_markdown, reference_text, to_toml


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("[trainer]\nseed = 5\n")
    return path


def test_config_prints_the_resolved_configuration(recipe, capsys):
    assert main(["config", str(recipe), "trainer.epochs=3"]) == 0
    assert capsys.readouterr().out == to_toml(load_config(recipe, ["trainer.epochs=3"]))


def test_config_prints_the_defaults_with_overrides(capsys):
    assert main(["config", "trainer.epochs=3", "trainer.seed=1"]) == 0
    assert capsys.readouterr().out == to_toml(load_config(None, ["trainer.epochs=3", "trainer.seed=1"]))


def test_config_prints_the_defaults(capsys):
    assert main(["config"]) == 0
    assert capsys.readouterr().out == to_toml(load_config(None))


def test_config_prints_every_key_for_reference(capsys):
    assert main(["config", "--reference"]) == 0
    assert capsys.readouterr().out == reference_text()


def test_config_prints_the_reference_as_markdown(capsys):
    assert main(["config", "--reference", "--markdown"]) == 0
    assert capsys.readouterr().out == reference_markdown()


def test_config_reports_all_problems_and_prints_nothing(recipe, capsys):
    assert main(["config", str(recipe), "trainer.seeds=3", "rollout.group_size=0"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        f"error: 2 problem(s) in {recipe} with overrides:\n"
        "  rollout.group_size=0 is invalid: expected a value greater than 0\n"
        "  trainer.seeds: no such key; did you mean trainer.seed?\n"
    )
