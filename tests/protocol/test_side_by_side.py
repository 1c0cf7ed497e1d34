"""Joined columns have responses as long as the longest part, padded by the rules of the glossary."""

import pytest
import torch

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.protocol.handle import HeldBatch
from hybridflow.protocol.side_by_side import join_columns, response_len


def rollout(**meta_info) -> DataProto:
    """Return two rows with prompts and responses of length 2; those of the second row are one token shorter."""
    return DataProto.from_dict(
        {
            "prompts": torch.tensor([[11, 12], [0, 21]]),
            "prompt_mask": torch.tensor([[True, True], [False, True]]),
            "responses": torch.tensor([[13, 14], [22, 0]]),
            "response_mask": torch.tensor([[True, True], [True, False]]),
            "input_ids": torch.tensor([[11, 12, 13, 14], [0, 21, 22, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]]),
            "position_ids": torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]]),
            "rollout_versions": torch.tensor([[5, 5], [5, -1]]),
            "rollout_log_probs": torch.tensor([[-0.5, -0.25], [-1.0, 0.0]]),
            "row_ids": torch.tensor([0, 1]),
        },
        {"finish_reasons": ["stop", "length"]},
        meta_info,
    )


def of_four_tokens() -> DataProto:
    return DataProto.from_dict({"old_log_probs": torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])})


def test_responses_are_padded_on_the_right_and_prompts_unchanged():
    joined = join_columns([rollout(), of_four_tokens()])
    columns = {name: joined.batch[name].tolist() for name in joined.batch.keys()}  # noqa: SIM118 (a TensorDict)
    assert columns == {
        "prompts": [[11, 12], [0, 21]],
        "prompt_mask": [[True, True], [False, True]],
        "responses": [[13, 14, 0, 0], [22, 0, 0, 0]],
        "response_mask": [[True, True, False, False], [True, False, False, False]],
        "input_ids": [[11, 12, 13, 14, 0, 0], [0, 21, 22, 0, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 0, 0], [0, 0, 1, 1, 0, 0]],
        "rollout_versions": [[5, 5, -1, -1], [5, -1, -1, -1]],
        "rollout_log_probs": [[-0.5, -0.25, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]],
        "row_ids": [0, 1],
        "old_log_probs": [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]],
    }
    assert joined.non_tensor_batch["finish_reasons"].tolist() == ["stop", "length"]
    assert len(joined) == 2


def test_dtypes_are_kept():
    joined, narrow = join_columns([rollout(), of_four_tokens()]), rollout()
    for name, column in narrow.batch.items():
        assert joined.batch[name].dtype == column.dtype


def test_the_shorter_part_may_come_last():
    joined = join_columns([of_four_tokens(), rollout()])
    assert joined.batch["responses"].tolist() == [[13, 14, 0, 0], [22, 0, 0, 0]]
    assert joined.batch["old_log_probs"].shape == (2, 4)


def test_three_parts_are_padded_to_the_longest():
    values = DataProto.from_dict({"values": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])})
    joined = join_columns([rollout(), values, of_four_tokens()])
    assert joined.batch["values"].tolist() == [[1.0, 2.0, 3.0, 0.0], [4.0, 5.0, 6.0, 0.0]]
    assert joined.batch["responses"].shape == (2, 4)


def test_tokens_are_padded_with_the_pad_token_and_masks_are_not():
    joined = join_columns([rollout(pad_token_id=9), of_four_tokens()])
    assert joined.batch["responses"].tolist() == [[13, 14, 9, 9], [22, 0, 9, 9]]
    assert joined.batch["input_ids"].tolist() == [[11, 12, 13, 14, 9, 9], [0, 21, 22, 0, 9, 9]]
    assert joined.batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0]]
    assert joined.batch["prompts"].tolist() == [[11, 12], [0, 21]]
    assert joined.meta_info == {"pad_token_id": 9}


def test_sequences_are_padded_if_responses_define_their_length():
    sequences = rollout().select(["responses", "input_ids", "position_ids"], [])
    joined = join_columns([sequences, of_four_tokens()])
    assert joined.batch["input_ids"].tolist() == [[11, 12, 13, 14, 0, 0], [0, 21, 22, 0, 0, 0]]
    assert joined.batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 0], [0, 0, 1, 1, 0, 0]]


def test_one_advantage_per_row_is_not_padded():
    one_per_row = DataProto.from_dict(
        {"advantages": torch.tensor([[0.5], [-0.5]]), "responses": torch.tensor([[1, 2], [3, 4]])}
    )
    joined = join_columns([one_per_row, of_four_tokens()])
    assert joined.batch["advantages"].tolist() == [[0.5], [-0.5]]
    assert joined.batch["responses"].tolist() == [[1, 2, 0, 0], [3, 4, 0, 0]]


def test_advantages_per_token_alone_are_padded():
    per_token = DataProto.from_dict({"advantages": torch.tensor([[0.5, 0.25], [1.0, 2.0]])})
    joined = join_columns([per_token, of_four_tokens()])
    assert joined.batch["advantages"].tolist() == [[0.5, 0.25, 0.0, 0.0], [1.0, 2.0, 0.0, 0.0]]
    per_row = DataProto.from_dict({"advantages": torch.tensor([[0.5], [1.0]])})
    assert join_columns([per_row, of_four_tokens()]).batch["advantages"].tolist() == [[0.5], [1.0]]


def test_longer_advantages_per_token_pad_the_other_columns():
    per_token = DataProto.from_dict({"returns": torch.ones(2, 3)})
    joined = join_columns([DataProto.from_dict({"responses": torch.tensor([[1, 2], [3, 4]])}), per_token])
    assert joined.batch["responses"].tolist() == [[1, 2, 0], [3, 4, 0]]


def test_one_advantage_with_responses_of_one_token_is_per_token():
    one_token = DataProto.from_dict({"responses": torch.tensor([[1], [2]]), "advantages": torch.tensor([[3.0], [4.0]])})
    joined = join_columns([one_token, of_four_tokens()])
    assert joined.batch["responses"].tolist() == [[1, 0, 0, 0], [2, 0, 0, 0]]
    assert joined.batch["advantages"].tolist() == [[3.0, 0.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]]


def test_objects_and_columns_of_one_number_per_row_are_unchanged():
    rows = DataProto.from_dict({"scores": torch.tensor([1.0, 2.0]), "mine": torch.ones(2, 2)}, {"texts": ["a", "b"]})
    joined = join_columns([rows, of_four_tokens(), rollout()])
    assert joined.batch["scores"].tolist() == [1.0, 2.0]
    assert joined.batch["mine"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert joined.non_tensor_batch["texts"].tolist() == ["a", "b"]


def test_part_of_objects_alone_joins_tensors():
    joined = join_columns([DataProto.from_dict(non_tensors={"texts": ["a", "b"]}), rollout(), of_four_tokens()])
    assert joined.non_tensor_batch["texts"].tolist() == ["a", "b"]
    assert joined.batch["responses"].shape == (2, 4)


def test_further_axes_are_kept():
    wide = DataProto.from_dict({"responses": torch.arange(8).reshape(2, 2, 2)})
    joined = join_columns([wide, DataProto.from_dict({"values": torch.zeros(2, 3)})])
    assert joined.batch["responses"].tolist() == [[[0, 1], [2, 3], [0, 0]], [[4, 5], [6, 7], [0, 0]]]


def test_batch_without_rows_is_padded():
    joined = join_columns([rollout()[0:0], DataProto.from_dict({"values": torch.zeros(0, 3)})])
    assert joined.batch["responses"].shape == (0, 3)
    assert joined.batch["input_ids"].shape == (0, 5)
    assert len(joined) == 0


def test_parts_are_not_changed():
    narrow, wide = rollout(), of_four_tokens()
    joined = join_columns([narrow, wide])
    joined.meta_info["k"] = 1
    assert narrow.batch["responses"].tolist() == [[13, 14], [22, 0]]
    assert narrow.meta_info == wide.meta_info == {}


def test_join_of_one_part_is_that_part():
    assert join_columns([rollout()]).batch["responses"].tolist() == [[13, 14], [22, 0]]


def test_meta_info_is_merged_as_in_union():
    first = DataProto.from_dict({"responses": torch.ones(1, 1)}, meta_info={"step": 1, "metrics": {"a": 1.0}})
    second = DataProto.from_dict({"values": torch.ones(1, 2)}, meta_info={"step": 1, "metrics": {"b": 2.0}})
    assert join_columns([first, second]).meta_info == {"step": 1, "metrics": {"a": 1.0, "b": 2.0}}
    with pytest.raises(BatchError, match="'step' is 1 in one batch and 2 in another"):
        join_columns([first, DataProto.from_dict({"values": torch.ones(1, 2)}, meta_info={"step": 2})])


def test_column_in_two_parts_is_an_error():
    with pytest.raises(FieldError, match=r"both futures have \['old_log_probs'\]"):
        join_columns([of_four_tokens(), rollout(), of_four_tokens()])
    with pytest.raises(FieldError, match=r"both futures have \['texts'\]"):
        join_columns([DataProto.from_dict(non_tensors={"texts": ["a"]}), DataProto.from_dict({"texts": torch.ones(1)})])


def test_different_numbers_of_rows_are_an_error():
    with pytest.raises(BatchError, match="this batch has 2 rows, the other has 1"):
        join_columns([rollout(), of_four_tokens()[:1]])


def test_response_len_is_the_length_of_the_responses():
    assert response_len(rollout()) == 2
    assert response_len(rollout().select(["input_ids", "prompts", "row_ids"])) == 2
    assert response_len(rollout().select(["input_ids", "row_ids"])) is None
    assert response_len(DataProto.from_dict({"advantages": torch.ones(2, 1)})) is None
    assert response_len(DataProto.from_dict({"advantages": torch.ones(2, 3)})) == 3
    assert response_len(DataProto(meta_info={"k": 1})) is None


def test_shorter_rows_of_a_future_join_columns_computed_for_all_rows():
    short = DataProto.from_dict({"responses": torch.tensor([[1], [2]]), "input_ids": torch.tensor([[7, 1], [8, 2]])})
    long = DataProto.from_dict({"responses": torch.tensor([[3, 4]]), "input_ids": torch.tensor([[9, 3, 4]])})
    future = DataProtoFuture(
        DataProto.concat, [HeldBatch(short), HeldBatch(long)], None, 3, ("responses", "input_ids"), part_rows=[2, 1]
    )
    advantages = DataProto.from_dict({"advantages": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])})
    joined = future.union(advantages)
    first = joined.slice(0, 2).get()
    assert first.batch["responses"].tolist() == [[1, 0], [2, 0]]
    assert first.batch["input_ids"].tolist() == [[7, 1, 0], [8, 2, 0]]
    assert first.batch["advantages"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert joined.get().batch["responses"].tolist() == [[1, 0], [2, 0], [3, 4]]
    assert joined.reorder([2, 0, 1]).get().batch["input_ids"].tolist() == [[9, 3, 4], [7, 1, 0], [8, 2, 0]]


def test_sequences_are_padded_if_prompts_define_the_response_length():
    sequences = rollout().select(["prompts", "input_ids"], [])
    joined = join_columns([sequences, of_four_tokens()])
    assert joined.batch["input_ids"].tolist() == [[11, 12, 13, 14, 0, 0], [0, 21, 22, 0, 0, 0]]


def test_sequences_of_unknown_response_length_are_an_error():
    with pytest.raises(BatchError, match="input_ids"):
        join_columns([rollout().select(["input_ids"], []), of_four_tokens(), rollout().select(["responses"], [])])


def test_tokens_are_padded_with_the_pad_token_of_another_part():
    wide = DataProto(of_four_tokens().batch, meta_info={"pad_token_id": 9})
    assert join_columns([rollout(), wide]).batch["responses"].tolist() == [[13, 14, 9, 9], [22, 0, 9, 9]]


def test_glossary_column_with_one_number_per_row_is_not_padded():
    narrow = DataProto.from_dict({"responses": torch.ones(1, 2), "values": torch.ones(1)})
    joined = join_columns([narrow, DataProto.from_dict({"old_log_probs": torch.ones(1, 3)})])
    assert joined.batch["values"].tolist() == [1.0]
