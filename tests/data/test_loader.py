import json
import logging

import pytest
import torch

from hybridflow.data import BatchLoader, EpochSampler, RLHFDataset
from hybridflow.errors import DataError
from hybridflow.protocol import DataProto

LETTERS = "abcdefghij"


@pytest.fixture
def dataset(char_tokenizer, prompt_file) -> RLHFDataset:
    return RLHFDataset(prompt_file(list(LETTERS)), char_tokenizer(), 4)


def letters(batch: DataProto) -> str:
    return "".join(messages[0]["content"] for messages in batch.non_tensor_batch["raw_prompts"])


def test_order_is_a_permutation_that_depends_only_on_seed_and_epoch():
    sampler = EpochSampler(50, seed=3)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = sampler.order(0)
    assert sorted(first) == list(range(50))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert EpochSampler(50, seed=3).order(0) == first
    assert len({tuple(EpochSampler(50, seed=seed).order(epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert EpochSampler(4, seed=3, order="sequential").order(7) == [0, 1, 2, 3]
    with pytest.raises(DataError, match="num_rows=0 is invalid"):
        EpochSampler(0)


def test_sequential_order_repeats_in_each_epoch(dataset):
    loader = BatchLoader(dataset, 5, order="sequential")
    assert [letters(loader.next_batch()) for _ in range(3)] == ["abcde", "fghij", "abcde"]
    assert (loader.epoch, loader.batch_in_epoch) == (1, 1)


def test_each_shuffled_epoch_has_every_row_once_in_a_new_order(dataset):
    loader = BatchLoader(dataset, 2, seed=1)
    epochs = ["".join(letters(batch) for batch in loader) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(LETTERS)] * 3
    assert len(set(epochs)) == 3
    assert loader.epoch == 3


def test_drop_last_leaves_out_incomplete_batches_and_logs_it_once(dataset, caplog):
    with caplog.at_level(logging.INFO):
        loader = BatchLoader(dataset, 4, order="sequential")
        assert [letters(loader.next_batch()) for _ in range(4)] == ["abcd", "efgh", "abcd", "efgh"]
    assert len(loader) == 2
    assert caplog.text.count("2 of 10 rows are left out of each epoch") == 1


def test_without_drop_last_the_last_batch_is_shorter(dataset):
    loader = BatchLoader(dataset, 4, order="sequential", drop_last=False)
    assert len(loader) == 3
    assert [letters(batch) for batch in loader] == ["abcd", "efgh", "ij"]
    assert [letters(batch) for batch in BatchLoader(dataset, 64, order="sequential", drop_last=False)] == [LETTERS]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_before", range(8))
def test_restored_loader_equals_an_uninterrupted_one(dataset, num_before, drop_last):
    uninterrupted = BatchLoader(dataset, 3, seed=5, drop_last=drop_last)
    for _ in range(num_before):
        uninterrupted.next_batch()
    state = json.loads(json.dumps(uninterrupted.state_dict()))
    restored = BatchLoader(dataset, 3, seed=5, drop_last=drop_last)
    restored.next_batch()  # a loader's earlier position is replaced
    restored.load_state_dict(state)
    assert [letters(restored.next_batch()) for _ in range(7)] == [letters(uninterrupted.next_batch()) for _ in range(7)]
    assert restored.state_dict() == uninterrupted.state_dict()


def test_iteration_after_a_restore_yields_the_rest_of_the_epoch(dataset):
    loader = BatchLoader(dataset, 2, order="sequential")
    for batch in loader:
        if letters(batch) == "ef":
            break
    other = BatchLoader(dataset, 2, order="sequential")
    other.load_state_dict(loader.state_dict())
    assert [letters(batch) for batch in other] == ["gh", "ij"]
    assert [letters(batch) for batch in other] == ["ab", "cd", "ef", "gh", "ij"]


def test_state_of_other_data_or_settings_is_an_error_and_changes_nothing(dataset, char_tokenizer, prompt_file):
    state = BatchLoader(dataset, 2, seed=1).state_dict()
    other_text = RLHFDataset(prompt_file([*LETTERS[:9], "z"]), char_tokenizer(), 4)
    fewer = RLHFDataset(prompt_file(list(LETTERS[:8])), char_tokenizer(), 4)
    for loader, message in [
        (BatchLoader(other_text, 2, seed=1), "fingerprint was"),
        (BatchLoader(fewer, 2, seed=1), "num_rows was 10 and is 8"),
        (BatchLoader(dataset, 5, seed=1), "train_batch_size was 2 and is 5"),
        (BatchLoader(dataset, 2, seed=2), "seed was 1 and is 2"),
        (BatchLoader(dataset, 2, seed=1, order="sequential"), "order was 'shuffled' and is 'sequential'"),
    ]:
        loader.next_batch()
        with pytest.raises(DataError, match=message):
            loader.load_state_dict({**state, "epoch": 7})
        assert (loader.epoch, loader.batch_in_epoch) == (0, 1)


def test_malformed_state_is_an_error(dataset):
    loader = BatchLoader(dataset, 2)
    state = loader.state_dict()
    with pytest.raises(DataError, match="lacks batch_in_epoch"):
        loader.load_state_dict({key: value for key, value in state.items() if key != "batch_in_epoch"})
    with pytest.raises(DataError, match="epoch 0, batch 5, but an epoch has batches 0 to 4"):
        loader.load_state_dict({**state, "batch_in_epoch": 5})
    with pytest.raises(DataError, match="epoch 'one'"):
        loader.load_state_dict({**state, "epoch": "one"})


def test_batch_larger_than_the_data_set_is_an_error(dataset):
    with pytest.raises(DataError, match="train_batch_size=11 is larger than the data set of 10 rows; use at most 10"):
        BatchLoader(dataset, 11)
    with pytest.raises(DataError, match="train_batch_size=0"):
        BatchLoader(dataset, 0)
