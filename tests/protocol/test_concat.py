import numpy as np
import pytest
import torch

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol import FIELDS, DataProto, Field

T = torch.tensor


def short_and_long() -> list[DataProto]:
    """Return a row of prompt [5, 6], response [7] and a row of prompt [1, 2, 3], response [4, 8]."""
    first = DataProto.from_dict(
        {
            "prompts": T([[5, 6]]),
            "responses": T([[7]]),
            "input_ids": T([[5, 6, 7]]),
            "attention_mask": T([[1, 1, 1]]),
            "position_ids": T([[0, 1, 2]]),
            "response_mask": T([[True]]),
            "values": T([[0.5]]),
            "rollout_versions": T([[3]]),
            "scores": T([1.0]),
        }
    )
    second = DataProto.from_dict(
        {
            "prompts": T([[1, 2, 3]]),
            "responses": T([[4, 8]]),
            "input_ids": T([[1, 2, 3, 4, 8]]),
            "attention_mask": T([[0, 1, 1, 1, 1]]),
            "position_ids": T([[0, 0, 1, 2, 3]]),
            "response_mask": T([[True, True]]),
            "values": T([[0.1, 0.2]]),
            "rollout_versions": T([[3, 4]]),
            "scores": T([2.0]),
        }
    )
    return [first, second]


def test_concat_joins_columns_of_equal_lengths():
    first = DataProto.from_dict({"x": T([[1, 2]])}, {"o": ["a"], "s": np.array(["long"])}, {"k": 1})
    second = DataProto.from_dict({"x": T([[3, 4], [5, 6]])}, {"o": [[1], {}], "s": np.array(["b", "c"])}, {"m": 2})
    both = DataProto.concat([first, second])
    assert both.batch["x"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert both.non_tensor_batch["o"].tolist() == ["a", [1], {}]
    assert both.non_tensor_batch["s"].tolist() == ["long", "b", "c"]
    assert both.meta_info == {"k": 1, "m": 2}


def test_concat_pads_prompts_on_the_left_and_responses_on_the_right():
    both = DataProto.concat(short_and_long()).batch
    assert both["prompts"].tolist() == [[0, 5, 6], [1, 2, 3]]
    assert both["responses"].tolist() == [[7, 0], [4, 8]]


def test_concat_pads_every_column_with_its_own_value():
    both = DataProto.concat(short_and_long()).batch
    assert both["response_mask"].tolist() == [[True, False], [True, True]]
    assert both["values"].tolist() == T([[0.5, 0.0], [0.1, 0.2]]).tolist()
    assert both["rollout_versions"].tolist() == [[3, -1], [3, 4]]
    assert both["scores"].tolist() == [1.0, 2.0]


def test_concat_rebuilds_sequences_from_prompt_and_response():
    both = DataProto.concat(short_and_long()).batch
    assert both["input_ids"].tolist() == [[0, 5, 6, 7, 0], [1, 2, 3, 4, 8]]
    assert both["attention_mask"].tolist() == [[0, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert both["position_ids"].tolist() == [[0, 0, 1, 2, 0], [0, 0, 1, 2, 3]]


def test_concat_aligns_sequences_of_equal_total_length():
    first = DataProto.from_dict({"prompts": T([[1, 2]]), "responses": T([[3]]), "input_ids": T([[1, 2, 3]])})
    second = DataProto.from_dict({"prompts": T([[4]]), "responses": T([[5, 6]]), "input_ids": T([[4, 5, 6]])})
    both = DataProto.concat([first, second]).batch
    assert both["input_ids"].tolist() == [[1, 2, 3, 0], [0, 4, 5, 6]]


@pytest.mark.parametrize("known", ["prompts", "responses"])
def test_prompts_or_responses_suffice_to_rebuild_sequences(known):
    parts = [part.select([known, "input_ids"]) for part in short_and_long()]
    assert DataProto.concat(parts).batch["input_ids"].tolist() == [[0, 5, 6, 7, 0], [1, 2, 3, 4, 8]]


def test_batch_of_prompts_is_padded_on_the_left():
    first = DataProto.from_dict({"prompts": T([[5]]), "input_ids": T([[5]]), "attention_mask": T([[1]])})
    second = DataProto.from_dict({"prompts": T([[6, 7]]), "input_ids": T([[6, 7]]), "attention_mask": T([[1, 1]])})
    both = DataProto.concat([first, second]).batch
    assert both["input_ids"].tolist() == [[0, 5], [6, 7]]
    assert both["attention_mask"].tolist() == [[0, 1], [1, 1]]


def test_concat_pads_tokens_with_the_pad_token_of_the_batch():
    parts = short_and_long()
    for part in parts:
        part.meta_info["pad_token_id"] = 9
    both = DataProto.concat(parts).batch
    assert both["input_ids"].tolist() == [[9, 5, 6, 7, 9], [1, 2, 3, 4, 8]]
    assert both["prompts"].tolist() == [[9, 5, 6], [1, 2, 3]]
    assert both["attention_mask"].tolist() == [[0, 1, 1, 1, 0], [0, 1, 1, 1, 1]]


def test_sequences_alone_cannot_be_padded():
    parts = [part.select(["input_ids"]) for part in short_and_long()]
    with pytest.raises(BatchError, match=r"'input_ids'.*\(1, 3\), \(1, 5\); the batch needs prompts or responses"):
        DataProto.concat(parts)


def test_sequence_length_must_be_prompt_plus_response_length():
    first, second = short_and_long()
    second.batch["input_ids"] = T([[1, 2, 3, 4]])
    with pytest.raises(BatchError, match="in part 1 a prompt of length 3 and a response of length 2"):
        DataProto.concat([first.select(["prompts", "responses", "input_ids"]),
                          second.select(["prompts", "responses", "input_ids"])])  # fmt: skip


def test_advantages_of_one_number_per_row_are_not_padded():
    first, second = (part.select(["responses"]) for part in short_and_long())
    first.batch["advantages"], second.batch["advantages"] = T([[0.5]]), T([[1.5]])
    assert DataProto.concat([second, first]).batch["advantages"].tolist() == [[1.5], [0.5]]


def test_advantages_per_token_are_padded_but_not_mixed_with_per_row():
    first, second = (part.select(["responses"]) for part in short_and_long())
    first.batch["advantages"], second.batch["advantages"] = T([[0.5]]), T([[1.5, 2.5]])
    assert DataProto.concat([first, second]).batch["advantages"].tolist() == [[0.5, 0.0], [1.5, 2.5]]
    first.batch["responses"] = T([[7, 7, 7]])
    with pytest.raises(BatchError, match="part 0 has one number per row"):
        DataProto.concat([first, second])


def test_column_outside_the_glossary_is_not_padded():
    with pytest.raises(BatchError, match=r"'mine' has different lengths in the parts: \(1, 2\), \(1, 3\)"):
        DataProto.concat([DataProto.from_dict({"mine": torch.zeros(1, n)}) for n in (2, 3)])


def test_column_added_to_the_glossary_is_padded(monkeypatch):
    monkeypatch.setitem(FIELDS, "mine", Field("mine", ("batch", "my_len"), torch.float32, "left", -2.0))
    both = DataProto.concat([DataProto.from_dict({"mine": torch.ones(1, n)}) for n in (1, 2)])
    assert both.batch["mine"].tolist() == [[-2.0, 1.0], [1.0, 1.0]]


def test_parts_without_rows_change_nothing():
    parts = short_and_long()
    both = DataProto.concat([parts[1][0:0], *parts, parts[0][0:0]])
    assert both.batch["input_ids"].tolist() == [[0, 5, 6, 7, 0], [1, 2, 3, 4, 8]]
    assert len(DataProto.concat([parts[0][0:0], parts[0][0:0]])) == 0


def test_concat_of_one_part_and_of_none():
    (part, _) = short_and_long()
    assert DataProto.concat([part]).batch["input_ids"].tolist() == [[5, 6, 7]]
    with pytest.raises(BatchError, match="at least one batch"):
        DataProto.concat([])


def test_parts_with_different_columns_are_an_error():
    with pytest.raises(FieldError, match=r"batch of part 0 has \['x'\], but that of part 1 has \['y'\]"):
        DataProto.concat([DataProto.from_dict({"x": torch.zeros(1)}), DataProto.from_dict({"y": torch.zeros(1)})])
    with pytest.raises(FieldError, match="non_tensor_batch of part 0"):
        DataProto.concat([DataProto.from_dict(non_tensors={"x": [1]}), DataProto()])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.zeros(1), torch.zeros(1, dtype=torch.int64)),
        (torch.zeros(1), torch.zeros(1, 1)),
        (torch.zeros(1, 2, 3), torch.zeros(1, 2, 4)),
        (np.zeros(1), np.zeros(1, dtype=np.int64)),
        (np.zeros(1), np.array(["text"])),
        (np.zeros((1, 2)), np.zeros((1, 3))),
    ],
)
def test_parts_of_different_dtypes_raise_without_conversion(first, second):
    with pytest.raises(BatchError, match=r"'x' is .* in part 0, but .* in part 1"):
        DataProto.concat([DataProto.from_single_dict({"x": first}), DataProto.from_single_dict({"x": second})])


def test_concat_does_not_change_its_parts():
    parts = short_and_long()
    DataProto.concat(parts).batch["scores"][0] = 100
    assert parts[0].batch["scores"].tolist() == [1.0]
    assert parts[0].batch["input_ids"].tolist() == [[5, 6, 7]]
