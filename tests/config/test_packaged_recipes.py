import pytest

from hybridflow.cli.main import main
from hybridflow.config import load_config
from hybridflow.config.packaged_recipes import algorithm_names, packaged_recipe
from hybridflow.errors import ConfigError


def test_recipes_of_the_package_are_found_from_any_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert load_config("dapo").algorithm.filter_groups
    assert load_config(["recipes/countdown_grpo.toml", "dr-grpo"]).algorithm.norm_by_std is False
    assert main(["config", "dapo"]) == 0
    assert "filter_groups = true" in capsys.readouterr().out


def test_a_file_here_comes_before_one_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dapo").write_text("trainer.seed = 7")
    assert load_config("dapo").trainer.seed == 7


@pytest.mark.parametrize("name", ["dapoo", "recipes/../pyproject.toml", "recipes/absent.toml", "other/dapo"])
def test_other_names_are_files_that_do_not_exist(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert packaged_recipe(name) is None
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(name)


def test_every_algorithm_has_a_name():
    assert "grpo" in algorithm_names()
    assert all(packaged_recipe(name) for name in algorithm_names())
