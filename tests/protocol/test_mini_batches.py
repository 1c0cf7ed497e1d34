import numpy as np
import pytest
import torch

from hybridflow.errors import BatchError
from hybridflow.protocol import DataProto


def numbered(num_rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(num_rows)}, {"o": np.arange(num_rows)}, {"k": 1})


def rows(iterator) -> list[list[int]]:
    return [part.batch["x"].tolist() for part in iterator]


def test_without_a_seed_every_epoch_keeps_the_order():
    assert rows(numbered(4).make_iterator(mini_batch_size=2, epochs=2)) == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_all_parts_of_a_row_are_shuffled_together():
    for part in numbered(8).make_iterator(4, 1, seed=5):
        assert part.batch["x"].tolist() == part.non_tensor_batch["o"].tolist()
        assert part.meta_info == {"k": 1}


def test_another_seed_is_another_order():
    assert rows(numbered(64).make_iterator(64, 1, seed=1)) != rows(numbered(64).make_iterator(64, 1, seed=2))


def test_shuffle_false_keeps_the_order_even_with_a_seed():
    iterator = numbered(4).make_iterator(2, 1, seed=1, dataloader_kwargs={"shuffle": False})
    assert rows(iterator) == [[0, 1], [2, 3]]


def test_size_that_does_not_divide_needs_drop_last():
    with pytest.raises(BatchError, match="mini_batch_size=2 does not divide the 5 rows"):
        numbered(5).make_iterator(2, 1)
    assert rows(numbered(5).make_iterator(2, 1, dataloader_kwargs={"drop_last": False})) == [[0, 1], [2, 3], [4]]
    assert rows(numbered(5).make_iterator(2, 1, dataloader_kwargs={"drop_last": True})) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"mini_batch_size": 0, "epochs": 1}, "mini_batch_size=0"),
        ({"mini_batch_size": 2, "epochs": -1}, "epochs=-1"),
        ({"mini_batch_size": 2, "epochs": 1, "seed": "x"}, "seed='x' is invalid: must be an integer"),
        ({"mini_batch_size": 2, "epochs": 1, "dataloader_kwargs": {"num_workers": 2}}, r"\['num_workers'\]; valid are"),
        ({"mini_batch_size": 2, "epochs": 1, "dataloader_kwargs": {"shuffle": True}}, "needs a seed"),
    ],
)
def test_invalid_arguments_raise_before_the_first_mini_batch(kwargs, message):
    with pytest.raises(BatchError, match=message):
        numbered(4).make_iterator(**kwargs)


def test_no_rows_and_no_epochs_yield_nothing():
    assert rows(numbered(0).make_iterator(2, 3, seed=1)) == []
    assert rows(numbered(4).make_iterator(2, 0)) == []
