from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.config import Config, leaf_keys, load_config
from hybridflow.config.load import algorithm_names, packaged_recipe
from hybridflow.errors import ConfigError


def problems(recipe, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    return str(caught.value).split("\n  ")


def write(tmp_path, text):
    path = tmp_path / "my.toml"
    path.write_text(text)
    return path


def test_a_recipe_changes_only_what_it_names(tmp_path):
    text = "[data]\ntrain_batch_size = 32\ntrain_files = ['a.parquet', 'b.parquet']\n"
    config = load_config(write(tmp_path, f"{text}[critic.optimizer]\nweight_decay = 0.0\n"))
    assert (config.data.train_batch_size, config.data.train_files) == (32, ("a.parquet", "b.parquet"))
    assert config.data.max_prompt_length == Config().data.max_prompt_length
    assert (config.critic.optimizer.lr, config.actor.optimizer.lr) == (1e-5, 1e-6)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.chat_template=false", False),
        ("rollout.temperature=1", 1.0),
        ("algorithm.kl_estimator=k1", "k1"),
        ('data.train_files=["a=b.parquet"]', ("a=b.parquet",)),
        ("data.train_files=[]", ()),
        ("trainer.run_dir=2024", "2024"),
        ("model.path=true", "true"),
        ("model.path='a b'", "a b"),
        ("model.path=", ""),
        (" data.train_batch_size = 16 ", 16),
        ("actor.clip_ratio_dual=none", None),
        ("model.compile=true", True),
        ("model.compile=auto", "auto"),
    ],
)
def test_an_override_is_read_as_toml_or_else_as_text(override, value):
    assert leaf_keys(load_config(None, [override]))[override.partition("=")[0].strip()] == value


def test_later_overrides_win_over_earlier_ones_and_the_recipe(tmp_path):
    recipe = write(tmp_path, "[trainer]\nseed = 1\nepochs = 7\n")
    config = load_config(recipe, ["trainer.seed=2", "trainer.seed=3"])
    assert (config.trainer.seed, config.trainer.epochs) == (3, 7)
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.seed = 1  # type: ignore[misc]


def test_a_table_as_override_replaces_the_table_and_a_dotted_key_one_entry(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "controller.backend = 'ray'\nplacement.roles.reward = 'score'\n[placement.pools]\nlearn = [1]\nscore = [1]\n"
    )
    assert load_config(recipe, ["placement.pools.score=[2]"]).placement.pools == {"learn": (1,), "score": (2,)}
    assert load_config(recipe, ["placement.pools={a=[3]}", "placement.roles={}"]).placement.pools == {"a": (3,)}
    local = load_config(recipe, ["placement.pools={}", "placement.roles={}", "controller.backend=local"])
    assert local.placement.pools == {}


def test_all_problems_are_reported_at_once(tmp_path):
    recipe = write(tmp_path, "[algorithm]\nadvantage = 'grop'\nkl_coeff = 0.1\n")
    assert problems(recipe, ["data.train_batch_size=0", "lr=1e-3"]) == [
        f"4 problem(s) in {recipe} with overrides:",
        "data.train_batch_size=0 is invalid: expected a value greater than 0",
        "algorithm.advantage='grop' is invalid: expected one of 'gae', 'grpo', 'rloo', 'reinforce++', "
        "'reinforce++-baseline', 'remax', 'opo', 'gpg', 'pass@k', 'gdpo', 'optimal-token-baseline', 'distillation', "
        "'none', or your own function as 'path.py:function' or 'module:function'",
        "algorithm.kl_coeff: no such key; did you mean algorithm.kl_coef?",
        "lr: no such key; did you mean actor.optimizer.lr?",
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data.batch_size=1", "data.batch_size: no such key; the key here is data.train_batch_size"),
        ("zzzz=1", "zzzz: no such key; `hybridflow config --reference` lists all keys"),
        ("algoritm.kl_coef=1", "algoritm: no such section; did you mean algorithm?"),
        ("critic.optim.lr=1", "critic.optim: no such section; did you mean critic.optimizer?"),
        ("offline=3", "offline=3 is invalid: expected a section; set one of its keys, such as offline.batch_size"),
        ("data.chat_template=1", "data.chat_template=1 is invalid: expected a valid boolean"),
        ("data.chat_template.x=1", "data.chat_template={'x': 1} is invalid: expected a valid boolean"),
        ("trainer.seed=true", "trainer.seed=True is invalid: expected a valid integer"),
        (
            "controller.gpus_per_worker=1e-6",
            "controller.gpus_per_worker=1e-06 is invalid: expected a value greater than or equal to 0.01",
        ),
        ("trainer.seed='1'", "trainer.seed='1' is invalid: expected a valid integer"),
        ("rollout.temperature=nan", "rollout.temperature=nan is invalid: expected a finite number"),
        ("data.val_files=a", 'data.val_files=\'a\' is invalid: expected an array, as in ["a", "b"]'),
        (
            "memory.offload=idle",
            "memory.offload='idle' is invalid: expected a table, as in {key = 'value'} (with quotes)",
        ),
        (
            "memory.max_tokens_per_micro_batch=many",
            "memory.max_tokens_per_micro_batch='many' is invalid: expected a positive integer or \"auto\"",
        ),
        ("data.val_files=[1]", "data.val_files.0=1 is invalid: expected a valid string"),
        ("actor.clip_ratio_dual=1", "actor.clip_ratio_dual=1 is invalid: expected a value greater than 1"),
        ("actor", "'actor' is not an override; write section.key=value"),
        ("actor..epochs=1", "'actor..epochs=1' is not an override; write section.key=value"),
        ("=1", "'=1' is not an override; write section.key=value"),
    ],
)
def test_a_problem_shows_key_value_and_fix(override, problem):
    assert problems(None, [override]) == ["1 problem(s) in overrides:", problem]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "[data]\nchat_template = true\n\nchat_template = false\n",
            ", line 4: this key already has a value: each key once: chat_template = false",
        ),
        ("[data]\nchat_template = maybe\n", ", line 2: Invalid value: chat_template = maybe"),
        ("[data]\nval_files = ['a',", ": Invalid value (at end of document)"),
        (b"# \xff\n", ": byte 2 is not UTF-8"),
        (f"x = {'[' * 3000}", ": nested too deeply"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_an_error_with_file_and_line(tmp_path, text, problem):
    path = tmp_path / "my.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (line,) = problems(path)
    assert str(path) in line
    assert problem.lstrip(": ") in line


def test_a_recipe_that_is_not_a_file_is_an_error(tmp_path):
    write(tmp_path, "")
    assert problems(tmp_path / "mine.toml") == [
        f"recipe {tmp_path / 'mine.toml'} does not exist; recipes in {tmp_path}: {tmp_path / 'my.toml'}"
    ]
    assert problems(tmp_path)[0].startswith(f"recipe {tmp_path} is not a file")
    assert problems(None, [f"data.train_files={'[' * 3000}"])


def test_a_tilde_in_a_path_is_the_home_directory(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[data]\ntrain_files = ["~/rows.jsonl", "other.jsonl"]\n')
    config = load_config(recipe, ["trainer.run_dir=~/run", "model.path=~", "critic.model_path=a~b"])
    home = str(Path.home())
    assert config.data.train_files == (f"{home}/rows.jsonl", "other.jsonl")
    assert (config.trainer.run_dir, config.model.path) == (f"{home}/run", home)
    assert config.critic.model_path == "a~b"


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
