"""Expected response lengths: moving means by prompt, by data source and over all prompts."""

import pytest
import torch

from hybridflow.checkpoint import load_state, save_state
from hybridflow.errors import CheckpointError
from hybridflow.trainers.length_history import LengthHistory, prompt_keys


def test_a_known_prompt_is_expected_as_long_as_its_moving_mean():
    history = LengthHistory()
    assert not history
    assert history.expected([1, 2], ["a", "a"]).tolist() == [0, 0]
    history.note([1, 2], ["a", "a"], [10.0, 30.0])
    history.note([1], ["a"], [20.0])
    assert history
    assert history.expected([1, 2], ["a", "a"]).tolist() == [15, 30]


def test_an_unknown_prompt_is_expected_as_long_as_its_source_or_all():
    history = LengthHistory()
    history.note([1, 2, 3], ["a", "a", "b"], [10.0, 30.0, 80.0])
    assert history.expected([8, 9, 10], ["a", "b", "c"]).tolist() == [20, 80, 40]


def test_a_restored_history_expects_the_same_lengths(tmp_path):
    history, restored = LengthHistory(), LengthHistory()
    history.note([-(2**63), 2**63 - 1], ["", "$a"], [1 / 3, 7.0])
    save_state(history.state_dict(), tmp_path / "state")
    restored.load_state_dict(load_state(tmp_path / "state"))
    keys, sources = [-(2**63), 2**63 - 1, 5, 6, 7], ["", "$a", "", "$a", "c"]
    assert restored.expected(keys, sources).tolist() == history.expected(keys, sources).tolist()
    assert restored.state_dict()["prompts"].tolist() == history.state_dict()["prompts"].tolist()


def test_a_state_without_lengths_is_an_error():
    state = LengthHistory().state_dict()
    del state["lengths"]
    with pytest.raises(CheckpointError, match="the saved response lengths lack lengths"):
        LengthHistory().load_state_dict(state)


def test_a_key_depends_on_tokens_and_source_but_not_on_padding():
    prompts = torch.tensor([[0, 5, 6], [5, 6, 0], [0, 5, 6], [0, 5, 7]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 0], [0, 1, 1], [0, 1, 1]])
    first, shifted, other_source, other_tokens = prompt_keys(prompts, mask, ["a", "a", "b", "a"])
    assert first == shifted
    assert len({first, other_source, other_tokens}) == 3
    assert first == -6841353820572609803  # the same in every process
