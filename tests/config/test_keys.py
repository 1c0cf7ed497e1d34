import pytest

from hybridflow.config import leaf_keys, nearest_key


def test_keys_are_dotted_and_carry_their_defaults():
    keys = leaf_keys()
    assert keys["actor.optimizer.lr"] == 1e-6
    assert keys["critic.optimizer.lr"] == 1e-5
    assert keys["data.train_files"] == ()
    assert "actor.optimizer" not in keys


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("kl_coeff", "algorithm.kl_coef"),
        ("lr", "actor.optimizer.lr"),
        ("offline.lr", "offline.optimizer.lr"),
        ("critic.epoch", "critic.epochs"),
        ("algorithm.advantage", "algorithm.advantage"),
        ("qqqqqq", None),
    ],
)
def test_the_nearest_key_is_found_by_last_part_then_prefix(name, nearest):
    assert nearest_key(name) == nearest


def test_the_nearest_of_given_candidates_is_found():
    assert nearest_key("trian", ["train", "sft"]) == "train"
