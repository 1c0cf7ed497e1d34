import re
from pathlib import Path

import pytest

from hybridflow.config import Config, load_config
from hybridflow.errors import ConfigError


def problems(recipe, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    return str(caught.value).split("\n  ")


def write(tmp_path, text):
    path = tmp_path / "my.toml"
    path.write_text(text)
    return path


def test_the_defaults_are_a_valid_configuration():
    assert load_config(None) == Config()


def test_a_recipe_changes_only_what_it_names(tmp_path):
    config = load_config(write(tmp_path, "[data]\ntrain_batch_size = 32\ntrain_files = ['a.parquet', 'b.parquet']\n"))
    assert config.data.train_batch_size == 32
    assert config.data.train_files == ("a.parquet", "b.parquet")
    assert config.data.max_prompt_length == Config().data.max_prompt_length


def test_a_section_keeps_its_own_defaults_of_unset_keys(tmp_path):
    config = load_config(write(tmp_path, "[critic.optimizer]\nweight_decay = 0.0\n"))
    assert config.critic.optimizer.lr == 1e-5
    assert config.actor.optimizer.lr == 1e-6


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("data.chat_template=false", "data", "chat_template", False),
        ("data.train_batch_size=16", "data", "train_batch_size", 16),
        ("rollout.temperature=1", "rollout", "temperature", 1.0),
        ("algorithm.kl_estimator=k1", "algorithm", "kl_estimator", "k1"),
        ('algorithm.kl_estimator="k1"', "algorithm", "kl_estimator", "k1"),
        ('data.train_files=["a=b.parquet"]', "data", "train_files", ("a=b.parquet",)),
        ("data.train_files=[]", "data", "train_files", ()),
        ("trainer.run_dir=2024", "trainer", "run_dir", "2024"),
        ("model.path=true", "model", "path", "true"),
        ("model.path='a b'", "model", "path", "a b"),
        ("model.path=", "model", "path", ""),
        (" data.train_batch_size = 16 ", "data", "train_batch_size", 16),
        ("actor.clip_ratio_dual=none", "actor", "clip_ratio_dual", None),
        ("model.compile=true", "model", "compile", True),
        ("model.compile=false", "model", "compile", False),
        ("model.compile=auto", "model", "compile", "auto"),
        ('model.compile="auto"', "model", "compile", "auto"),
        ("memory.max_tokens_per_micro_batch=auto", "memory", "max_tokens_per_micro_batch", "auto"),
    ],
)
def test_an_override_is_read_as_toml_or_else_as_text(override, section, key, value):
    assert getattr(getattr(load_config(None, [override]), section), key) == value


def test_later_overrides_win_over_earlier_ones_and_the_recipe(tmp_path):
    recipe = write(tmp_path, "[trainer]\nseed = 1\nepochs = 7\n")
    config = load_config(recipe, ["trainer.seed=2", "trainer.seed=3"])
    assert (config.trainer.seed, config.trainer.epochs) == (3, 7)


def test_a_table_as_override_replaces_the_table_and_a_dotted_key_one_entry(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "controller.backend = 'ray'\nplacement.roles.reward = 'score'\n[placement.pools]\nlearn = [1]\nscore = [1]\n"
    )
    assert load_config(recipe, ["placement.pools.score=[2]"]).placement.pools == {"learn": (1,), "score": (2,)}
    assert load_config(recipe, ["placement.pools={a=[3]}", "placement.roles={}"]).placement.pools == {"a": (3,)}
    local = load_config(recipe, ["placement.pools={}", "placement.roles={}", "controller.backend=local"])
    assert local.placement.pools == {}


def test_a_config_cannot_be_changed():
    config = load_config(None)
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.seed = 1  # type: ignore[misc]


def test_an_old_name_gets_the_new_one(tmp_path):
    recipe = write(tmp_path, "[data]\nshuffle = true\n\n[sft]\nbatch_size = 8\n")
    assert problems(recipe)[1:] == [
        "data.shuffle: no such key; replaced by data.order = 'shuffled' or 'sequential'",
        "sft: no such section; renamed to [offline]",
    ]


def test_a_removed_key_is_an_error_with_its_fixed_value(tmp_path):
    recipe = write(tmp_path, "[advice]\nwarmup = 0.6\nmicro_batches = 5\n")
    assert problems(recipe, ["advice.contradictory_prompts=1"])[1:] == [
        "advice.warmup: no such key; it was removed, and its value is fixed at 0.5; leave it out",
        "advice.micro_batches: no such key; it was removed, and its value is fixed at 64; leave it out",
        "advice.contradictory_prompts: no such key; it was removed, and its value is fixed at 0.0; leave it out",
    ]


def test_a_removed_key_with_its_fixed_value_is_accepted_as_in_earlier_runs(tmp_path):
    recipe = write(tmp_path, "[advice]\nwarmup = 0.5\nmicro_batches = 64\nkl = 0.2\n")
    assert load_config(recipe).advice.kl == 0.2


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
        ("kl_coeff=1", "kl_coeff: no such key; did you mean algorithm.kl_coef?"),
        ("critic.lr=1", "critic.lr: no such key; did you mean critic.optimizer.lr?"),
        ("data.batch_size=1", "data.batch_size: no such key; did you mean validation.batch_size?"),
        ("actor.minibatch_size=1", "actor.minibatch_size: no such key; did you mean actor.mini_batch_size?"),
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


def test_a_duplicate_key_is_an_error_with_file_and_line(tmp_path):
    recipe = write(tmp_path, "[data]\nchat_template = true\n\nchat_template = false\n")
    assert problems(recipe) == [
        f"{recipe}, line 4: this key already has a value: each key once: chat_template = false",
    ]


def test_a_syntax_error_is_an_error_with_file_and_line(tmp_path):
    recipe = write(tmp_path, "[data]\nchat_template = maybe\n")
    assert problems(recipe) == [f"{recipe}, line 2: Invalid value: chat_template = maybe"]


def test_a_syntax_error_at_the_end_of_the_file_names_the_file(tmp_path):
    recipe = write(tmp_path, "[data]\nval_files = ['a',")
    assert problems(recipe) == [f"{recipe}: Invalid value (at end of document)"]


def test_an_error_for_a_missing_recipe_lists_its_neighbors(tmp_path):
    write(tmp_path, "")
    assert problems(tmp_path / "mine.toml") == [
        f"recipe {tmp_path / 'mine.toml'} does not exist; recipes in {tmp_path}: {tmp_path / 'my.toml'}"
    ]


def test_a_directory_is_not_a_recipe(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(f"recipe {tmp_path} is not a file")):
        load_config(tmp_path)


def test_a_recipe_that_is_not_utf_8_is_an_error(tmp_path):
    (tmp_path / "my.toml").write_bytes(b"# \xff\n")
    with pytest.raises(ConfigError, match="byte 2 is not UTF-8"):
        load_config(tmp_path / "my.toml")


def test_contradictions_of_recipe_and_overrides_are_found(tmp_path):
    recipe = write(tmp_path, "[data]\ntrain_batch_size = 128\n")
    assert problems(recipe, ["actor.mini_batch_size=48"]) == [
        f"1 problem(s) in {recipe} with overrides:",
        "actor.mini_batch_size=48 does not divide data.train_batch_size=128; use 1, 2, 4, 8, 16, 32, 64 or 128",
    ]


def test_deeply_nested_values_are_an_error_not_a_crash(tmp_path):
    recipe = tmp_path / "deep.toml"
    recipe.write_text(f"x = {'[' * 3000}")
    assert "nested too deeply" in problems(recipe)[0]
    assert problems(None, [f"data.train_files={'[' * 3000}"])


def test_a_tilde_in_a_path_is_the_home_directory(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[data]\ntrain_files = ["~/rows.jsonl", "other.jsonl"]\n')
    config = load_config(recipe, ["trainer.run_dir=~/run", "model.path=~", "critic.model_path=a~b"])
    home = str(Path.home())
    assert config.data.train_files == (f"{home}/rows.jsonl", "other.jsonl")
    assert (config.trainer.run_dir, config.model.path) == (f"{home}/run", home)
    assert config.critic.model_path == "a~b"
