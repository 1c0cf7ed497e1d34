import pytest

from hybridflow.config import leaf_keys, load_config
from hybridflow.config.aliases import ALIASES
from hybridflow.errors import ConfigError

ALSO_KEYS = {"beta", "epsilon"}
"""Last parts of our own keys that mean something else in other frameworks."""


def test_every_alias_names_existing_keys():
    assert {key for keys in ALIASES.values() for key in keys} <= set(leaf_keys())


def test_no_alias_hides_a_name_of_ours():
    assert set(ALIASES) & {key.rpartition(".")[2] for key in leaf_keys()} == ALSO_KEYS


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rollout.n", "the key here is rollout.group_size"),
        ("n", "the key here is rollout.group_size"),
        ("algorithm.adv_estimator", "the key here is algorithm.advantage"),
        ("num_generations", "the key here is rollout.group_size"),
        ("per_device_train_batch_size", "the key here is data.train_batch_size"),
        ("actor.ppo_mini_batch_size", "the key here is actor.mini_batch_size"),
        ("critic.ppo_mini_batch_size", "the key here is critic.mini_batch_size"),
        ("trainer.total_epochs", "the key here is trainer.epochs"),
        ("data.max_completion_length", "the key here is data.max_response_length"),
        ("learning_rate", "the key here is actor.optimizer.lr"),
        ("critic.learning_rate", "the key here is critic.optimizer.lr"),
        ("offline.learning_rate", "the key here is offline.optimizer.lr"),
        ("beta", "the keys here are algorithm.kl_coef and offline.beta"),
        ("actor.clip_ratio", "the keys here are actor.clip_ratio_low and actor.clip_ratio_high"),
        (
            "epsilon",
            "the keys here are actor.clip_ratio_low, actor.clip_ratio_high and actor.optimizer.epsilon",
        ),
        ("actor.lr", "did you mean actor.optimizer.lr?"),
        ("lr", "did you mean actor.optimizer.lr?"),
        ("max_prompt_length", "did you mean data.max_prompt_length?"),
    ],
)
def test_an_alias_of_another_framework_gets_our_key(name, hint):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"{name}=1"])
    assert str(caught.value).split("\n  ")[1:] == [f"{name}: no such key; {hint}"]


def test_aliases_in_an_unknown_section_are_listed_one_by_one(tmp_path):
    recipe = tmp_path / "foreign.toml"
    recipe.write_text("[actor_rollout_ref.rollout]\nn = 8\n[algorithm.kl_ctrl]\ntype = 'fixed'\nkl_coef = 0.001\n")
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, ["actor_rollout_ref.actor.use_kl_loss=true"])
    assert str(caught.value).split("\n  ")[1:] == [
        "algorithm.kl_ctrl: no such key; the keys here are algorithm.kl_controller and algorithm.kl_coef",
        "actor_rollout_ref.rollout.n: no such key; the key here is rollout.group_size",
        "actor_rollout_ref.actor.use_kl_loss: no such key; the key here is algorithm.kl_in_loss",
    ]


def test_other_keys_of_an_unknown_section_are_listed_too(tmp_path):
    recipe = tmp_path / "foreign.toml"
    recipe.write_text("[empty]\n[a.rollout]\nn = 8\n[a.actor.optim]\nlr = 1e-6\n[b.actor.optim]\nlr = 1e-6\n")
    with pytest.raises(ConfigError) as caught:
        load_config(recipe)
    assert str(caught.value).split("\n  ")[1:] == [
        "empty: no such section; `hybridflow config --reference` lists all keys",
        "a.rollout.n: no such key; the key here is rollout.group_size",
        "a.actor.optim.lr: no such key; did you mean actor.optimizer.lr?",
        "b.actor.optim.lr: no such key; did you mean actor.optimizer.lr?",
    ]
