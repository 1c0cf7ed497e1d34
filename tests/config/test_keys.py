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
def test_the_last_part_decides_first_and_what_stands_before_it_next(name, nearest):
    assert nearest_key(name) == nearest


def test_any_candidates_can_be_given():
    assert nearest_key("trian", ["train", "sft"]) == "train"
