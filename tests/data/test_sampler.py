from collections import Counter

import pytest
import torch

from hybridflow.data import BatchLoader, EpochSampler, RLHFDataset
from hybridflow.errors import DataError


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


def test_tiny_and_huge_weights_are_valid():
    assert set(EpochSampler(3, order="weighted", numbers=[1e-300, 0.0, 0.0]).order(0)) == {0}
    assert set(EpochSampler(3, order="weighted", numbers=[1e308, 1e308, 0.0]).order(0)) <= {0, 1}


@pytest.mark.parametrize("numbers", [[0.0, 0.0], [-1.0, 2.0]])
def test_negative_and_all_zero_weights_are_errors(numbers):
    with pytest.raises(DataError, match="expected weights of 0 or more, at least one of them above 0"):
        EpochSampler(2, order="weighted", numbers=numbers).order(0)


def test_user_order_may_leave_out_and_repeat_rows(tmp_path):
    file = tmp_path / "orders.py"
    file.write_text("def hard(numbers, generator):\n    return [r for r, n in enumerate(numbers) if n > 1] * 2\n")
    sampler = EpochSampler(4, order=f"{file}:hard", numbers=[0.0, 2.0, 1.0, 3.0])
    assert sampler.order(0) == [1, 3, 1, 3]
    for numbers, problem in (([0.0, 2.0, 2.0, 3.0], "returned 6 rows"), ([0.0] * 4, "returned 0 rows")):
        with pytest.raises(DataError, match=problem):
            EpochSampler(4, order=f"{file}:hard", numbers=numbers).order(0)
    file.write_text("def beyond(numbers, generator):\n    return [0, 1, 2, 4]\n")
    with pytest.raises(DataError, match="returned row 4; expected 4 indices of rows 0 to 3"):
        EpochSampler(4, order=f"{file}:beyond").order(0)


def test_dropped_prompts_lose_their_numbers_too(char_tokenizer, prompt_file):
    file = prompt_file(["aaa", "b", "c", "d"], extra_infos=[{"hard": n} for n in (9.0, 3.0, 1.0, 2.0)])
    dataset = RLHFDataset(file, char_tokenizer(), 2, order_by="hard")
    assert dataset.numbers == [3.0, 1.0, 2.0]
    batch = BatchLoader(dataset, 3, order="curriculum").next_batch()
    assert [messages[0]["content"] for messages in batch.non_tensor_batch["raw_prompts"]] == ["c", "d", "b"]


def test_row_without_a_number_is_an_error(char_tokenizer, prompt_file):
    with pytest.raises(
        DataError, match=r"row 0: data.order_by='hard' has the value None; expected a finite number in each row"
    ):
        RLHFDataset(prompt_file(["a", "b"]), char_tokenizer(), 2, order_by="hard")


def test_position_with_other_numbers_is_an_error(char_tokenizer, prompt_file):
    def loader(weights):
        infos = [{"weight": weight, "same": 1} for weight in weights]
        return BatchLoader(
            RLHFDataset(prompt_file(["a", "b"], extra_infos=infos), char_tokenizer(), 2, order_by="weight"),
            1,
            order="weighted",
        )

    state = loader([1.0, 2.0]).state_dict()
    loader([1.0, 2.0]).load_state_dict(state)
    with pytest.raises(DataError, match="numbers was"):
        loader([1.0, 3.0]).load_state_dict(state)
