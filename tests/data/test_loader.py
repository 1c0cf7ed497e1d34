import json
import logging
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridflow.data import BatchLoader, EpochSampler, RLHFDataset
from hybridflow.errors import DataError
from hybridflow.protocol import DataProto

LETTERS = "abcdefghij"


@pytest.fixture
def dataset(char_tokenizer, prompt_file) -> RLHFDataset:
    return RLHFDataset(prompt_file(list(LETTERS)), char_tokenizer(), 4)


def letters(batch: DataProto) -> str:
    return "".join(messages[0]["content"] for messages in batch.non_tensor_batch["raw_prompts"])


# Orders


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


def test_curriculum_ascends_and_shuffles_equal_numbers_in_each_epoch():
    numbers = [3.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    sampler = EpochSampler(7, order="curriculum", numbers=numbers)
    orders = [sampler.order(epoch) for epoch in range(5)]
    assert all([numbers[row] for row in order] == sorted(numbers) for order in orders)
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert EpochSampler(7, order="curriculum", numbers=numbers).order(3) == orders[3]


def test_weighted_rows_are_drawn_in_proportion_to_their_weights():
    sampler = EpochSampler(4, order="weighted", numbers=[0.0, 1.0, 3.0, 0.0], seed=5)
    before = torch.get_rng_state()
    drawn = Counter(row for epoch in range(2000) for row in sampler.order(epoch))
    assert torch.equal(torch.get_rng_state(), before)
    assert set(drawn) == {1, 2}
    assert drawn[1] / sum(drawn.values()) == pytest.approx(0.25, abs=0.015)  # 3 standard deviations of 8,000 draws
    assert set(EpochSampler(3, order="weighted", numbers=[1e-300, 0.0, 0.0]).order(0)) == {0}
    assert set(EpochSampler(3, order="weighted", numbers=[1e308, 1e308, 0.0]).order(0)) <= {0, 1}


def test_user_order_may_leave_out_and_repeat_rows(tmp_path):
    file = tmp_path / "orders.py"
    file.write_text(
        "def hard(numbers, generator):\n    return [r for r, n in enumerate(numbers) if n > 1] * 2\n"
        "def beyond(numbers, generator):\n    return [0, 1, 2, 4]\n"
    )
    assert EpochSampler(4, order=f"{file}:hard", numbers=[0.0, 2.0, 1.0, 3.0]).order(0) == [1, 3, 1, 3]
    for name, numbers, problem in (
        ("hard", [0.0, 2.0, 2.0, 3.0], "returned 6 rows"),
        ("hard", [0.0] * 4, "returned 0 rows"),
        ("beyond", None, "returned row 4; expected 4 indices of rows 0 to 3"),
    ):
        with pytest.raises(DataError, match=problem):
            EpochSampler(4, order=f"{file}:{name}", numbers=numbers).order(0)


@pytest.mark.parametrize("numbers", [[0.0, 0.0], [-1.0, 2.0]])
def test_negative_and_all_zero_weights_are_errors(numbers):
    with pytest.raises(DataError, match="expected weights of 0 or more, at least one of them above 0"):
        EpochSampler(2, order="weighted", numbers=numbers).order(0)
    with pytest.raises(DataError, match="num_rows=0 is invalid"):
        EpochSampler(0)


def test_dropped_prompts_lose_their_numbers_too(char_tokenizer, prompt_file):
    file = prompt_file(["aaa", "b", "c", "d"], extra_infos=[{"hard": n} for n in (9.0, 3.0, 1.0, 2.0)])
    dataset = RLHFDataset(file, char_tokenizer(), 2, order_by="hard")
    assert dataset.numbers == [3.0, 1.0, 2.0]
    assert letters(BatchLoader(dataset, 3, order="curriculum").next_batch()) == "cdb"


# Batches


@pytest.mark.parametrize(
    ("size", "drop_last", "epoch"),
    [
        (5, True, ["abcde", "fghij"]),
        (4, True, ["abcd", "efgh"]),
        (4, False, ["abcd", "efgh", "ij"]),
        (64, False, [LETTERS]),
    ],
)
def test_an_epoch_has_whole_batches_or_a_shorter_last_one(dataset, caplog, size, drop_last, epoch):
    with caplog.at_level(logging.INFO):
        loader = BatchLoader(dataset, size, order="sequential", drop_last=drop_last)
        assert [letters(batch) for batch in loader] == epoch
        assert letters(loader.next_batch()) == epoch[0]
    assert (len(loader), loader.epoch, loader.batch_in_epoch) == (len(epoch), *divmod(len(epoch) + 1, len(epoch)))
    assert caplog.text.count("2 of 10 rows are left out of each epoch") == (size == 4 and drop_last)


def test_each_shuffled_epoch_has_every_row_once_in_a_new_order(dataset):
    loader = BatchLoader(dataset, 2, seed=1)
    epochs = ["".join(letters(batch) for batch in loader) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(LETTERS)] * 3
    assert len(set(epochs)) == 3


@settings(deadline=None, derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_before=st.integers(0, 8), size=st.integers(1, 4), drop_last=st.booleans())
def test_restored_loader_equals_an_uninterrupted_one(dataset, num_before, size, drop_last):
    uninterrupted = BatchLoader(dataset, size, seed=5, drop_last=drop_last)
    for _ in range(num_before):
        uninterrupted.next_batch()
    state = json.loads(json.dumps(uninterrupted.state_dict()))
    restored = BatchLoader(dataset, size, seed=5, drop_last=drop_last)
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
    for loader, changes, message in [
        (BatchLoader(other_text, 2, seed=1), {}, "fingerprint was"),
        (BatchLoader(fewer, 2, seed=1), {}, "num_rows was 10 and is 8"),
        (BatchLoader(dataset, 5, seed=1), {}, "train_batch_size was 2 and is 5"),
        (BatchLoader(dataset, 2, seed=2), {}, "seed was 1 and is 2"),
        (BatchLoader(dataset, 2, seed=1, order="sequential"), {}, "order was 'shuffled' and is 'sequential'"),
        (BatchLoader(dataset, 2, seed=1), {"batch_in_epoch": 5}, "epoch 7, batch 5, but an epoch has batches 0 to 4"),
        (BatchLoader(dataset, 2, seed=1), {"epoch": "one"}, "epoch 'one'"),
    ]:
        loader.next_batch()
        with pytest.raises(DataError, match=message):
            loader.load_state_dict({**state, "epoch": 7, **changes})
        assert (loader.epoch, loader.batch_in_epoch) == (0, 1)
    with pytest.raises(DataError, match="lacks batch_in_epoch"):
        loader.load_state_dict({key: value for key, value in state.items() if key != "batch_in_epoch"})


def test_position_with_other_numbers_is_an_error(char_tokenizer, prompt_file):
    def loader(weights):
        file = prompt_file(["a", "b"], extra_infos=[{"weight": weight, "same": 1} for weight in weights])
        return BatchLoader(RLHFDataset(file, char_tokenizer(), 2, order_by="weight"), 1, order="weighted")

    state = loader([1.0, 2.0]).state_dict()
    loader([1.0, 2.0]).load_state_dict(state)
    with pytest.raises(DataError, match="numbers was"):
        loader([1.0, 3.0]).load_state_dict(state)


def test_batch_larger_than_the_data_set_is_an_error(dataset):
    with pytest.raises(DataError, match="train_batch_size=11 is larger than the data set of 10 rows; use at most 10"):
        BatchLoader(dataset, 11)
    with pytest.raises(DataError, match="train_batch_size=0"):
        BatchLoader(dataset, 0)
