import pytest

from hybridflow.config import leaf_keys, load_config, nearest_key
from hybridflow.config.aliases import ALIASES
from hybridflow.errors import ConfigError

ALSO_KEYS = {"batch_size", "beta", "epsilon"}
"""Last parts of our own keys that mean something else in other frameworks."""


def problems(recipe, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    return str(caught.value).split("\n  ")[1:]


def test_keys_are_dotted_and_every_alias_names_existing_ones():
    keys = leaf_keys()
    assert (keys["actor.optimizer.lr"], keys["critic.optimizer.lr"], keys["data.train_files"]) == (1e-6, 1e-5, ())
    assert "actor.optimizer" not in keys
    assert {key for aliased in ALIASES.values() for key in aliased} <= set(keys)
    assert set(ALIASES) & {key.rpartition(".")[2] for key in keys} == ALSO_KEYS


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("kl_coeff", "algorithm.kl_coef"),
        ("lr", "actor.optimizer.lr"),
        ("offline.lr", "offline.optimizer.lr"),
        ("critic.epoch", "critic.epochs"),
        ("data.batch_size", "data.train_batch_size"),
        ("algorithm.advantage", "algorithm.advantage"),
        ("qqqqqq", None),
    ],
)
def test_the_nearest_key_is_found_by_last_part_then_prefix(name, nearest):
    assert nearest_key(name) == nearest
    assert nearest_key("trian", ["train", "sft"]) == "train"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rollout.n", "the key here is rollout.group_size"),
        ("n", "the key here is rollout.group_size"),
        ("num_generations", "the key here is rollout.group_size"),
        ("data.batch_size", "the key here is data.train_batch_size"),
        ("batch_size", "the keys here are data.train_batch_size and offline.batch_size"),
        ("actor.ppo_mini_batch_size", "the key here is actor.mini_batch_size"),
        ("critic.ppo_mini_batch_size", "the key here is critic.mini_batch_size"),
        ("learning_rate", "the key here is actor.optimizer.lr"),
        ("offline.learning_rate", "the key here is offline.optimizer.lr"),
        ("beta", "the keys here are algorithm.kl_coef and offline.beta"),
        ("epsilon", "the keys here are actor.clip_ratio_low, actor.clip_ratio_high and actor.optimizer.epsilon"),
        ("actor.lr", "did you mean actor.optimizer.lr?"),
        ("max_prompt_length", "did you mean data.max_prompt_length?"),
    ],
)
def test_an_alias_of_another_framework_gets_our_key(name, hint):
    assert problems(None, [f"{name}=1"]) == [f"{name}: no such key; {hint}"]


def test_keys_of_an_unknown_section_are_listed_one_by_one(tmp_path):
    recipe = tmp_path / "foreign.toml"
    recipe.write_text("[empty]\n[a.rollout]\nn = 8\n[b.actor.optim]\nlr = 1e-6\n[algorithm.kl_ctrl]\nkl_coef = 0.001\n")
    assert sorted(problems(recipe, ["a.actor.use_kl_loss=true"])) == [
        "a.actor.use_kl_loss: no such key; the key here is algorithm.kl_in_loss",
        "a.rollout.n: no such key; the key here is rollout.group_size",
        "algorithm.kl_ctrl: no such key; the keys here are algorithm.kl_controller and algorithm.kl_coef",
        "b.actor.optim.lr: no such key; did you mean actor.optimizer.lr?",
        "empty: no such section; `hybridflow config --reference` lists all keys",
    ]
