import pytest
import torch

from hybridflow.engines.packing import pack, pad, prompt_families, sequence_lengths
from hybridflow.errors import BatchError
from hybridflow.models.attention import PackedPlan, PaddedPlan
from hybridflow.models.shared_prompts import SharedPromptPlan, sharing_pays
from hybridflow.protocol import DataProto

# Prompts 11 12 | 13 14 15 | 16, responses 21 22 | 23 | none.
ROWS = DataProto.from_dict(
    {
        "input_ids": torch.tensor([[0, 11, 12, 21, 22], [13, 14, 15, 23, 0], [0, 0, 16, 0, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0], [0, 0, 1, 0, 0]]),
        "response_mask": torch.tensor([[True, True], [True, False], [False, False]]),
    }
)


def with_masks(attention_mask: list[int], response_mask: list[bool]) -> DataProto:
    return DataProto.from_dict(
        {
            "input_ids": torch.tensor([[11, 12, 13, 21, 22, 23]]),
            "attention_mask": torch.tensor([attention_mask]),
            "response_mask": torch.tensor([response_mask]),
        }
    )


def test_packed_rows_are_concatenated_without_padding():
    packed = pack(ROWS)
    assert packed.input_ids.tolist() == [[11, 12, 21, 22, 13, 14, 15, 23, 16]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0]]
    assert packed.plan == PackedPlan(((2, 4), (1, 1)))
    assert packed.positions.tolist() == [1, 2, 6]
    assert packed.labels.tolist() == [21, 22, 23]
    assert (packed.num_tokens, packed.num_computed_tokens) == (9, 9)


def test_padded_rows_are_left_aligned():
    padded = pad(ROWS)
    assert padded.input_ids.tolist() == [[11, 12, 21, 22], [13, 14, 15, 23], [16, 0, 0, 0]]
    assert padded.position_ids.tolist() == [[0, 1, 2, 3]] * 3
    assert padded.plan == PaddedPlan()
    assert padded.positions.tolist() == [1, 2, 6]
    assert padded.labels.tolist() == [21, 22, 23]
    assert (padded.num_tokens, padded.num_computed_tokens) == (9, 12)
    assert sequence_lengths(ROWS).tolist() == [4, 4, 1]


@pytest.mark.parametrize("arrange", [pack, pad])
@pytest.mark.parametrize(
    ("attention_mask", "response_mask", "labels", "predictors"),
    [
        ([1, 1, 1, 1, 1, 1], [True, False, True], [21, 23], [13, 22]),
        ([0, 1, 1, 1, 1, 0], [False, True, False], [22], [21]),
    ],
)
def test_counted_tokens_may_have_holes(arrange, attention_mask, response_mask, labels, predictors):
    arranged = arrange(with_masks(attention_mask, response_mask))
    assert arranged.labels.tolist() == labels
    assert arranged.input_ids.flatten()[arranged.positions].tolist() == predictors


def test_to_rows_scatters_values_and_is_differentiable():
    packed = pack(ROWS)
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    rows = packed.to_rows(values)
    assert rows.tolist() == [[1, 2], [3, 0], [0, 0]]
    (rows * torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [10, 20, 30]


@pytest.mark.parametrize("arrange", [pack, pad])
@pytest.mark.parametrize(
    ("attention_mask", "response_mask"),
    [([0, 0, 0, 1, 1, 1], [True, True, True]), ([1, 1, 1, 1, 0, 0], [True, True, False])],
)
def test_counted_token_without_predictor_is_an_error(arrange, attention_mask, response_mask):
    with pytest.raises(BatchError, match="row 0: response_mask is true for a token that is padding by attention_mask"):
        arrange(with_masks(attention_mask, response_mask))


# Prompts 11 12 13 | the same | 11 12 | the same | 14 | the same, responses 21 22 | 23 | 24 | none | 25 | 26.
GROUPS = DataProto.from_dict(
    {
        "input_ids": torch.tensor(
            [
                *([11, 12, 13, 21, 22], [11, 12, 13, 23, 0], [0, 11, 12, 24, 0], [7, 11, 12, 0, 0]),
                *([0, 0, 14, 25, 0], [0, 0, 14, 26, 0]),
            ]
        ),
        "attention_mask": torch.tensor(
            [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [0, 1, 1, 1, 0], [0, 1, 1, 0, 0]] + 2 * [[0, 0, 1, 1, 0]]
        ),
        "response_mask": torch.tensor(
            [[True, True], [True, False], [True, False], [False, False], [True, False], [True, False]]
        ),
    }
)


def test_adjacent_rows_share_prompt_except_last_token():
    packed = pack(GROUPS)
    assert packed.input_ids.tolist() == [[11, 12, 13, 21, 22, 13, 23, 11, 12, 24, 12, 14, 25, 14, 26]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 1, 0, 1, 0, 1]]
    assert packed.plan == SharedPromptPlan(((2, 3, 2), (1, 2, 1), (2,), (2,)))
    assert packed.positions.tolist() == [2, 3, 5, 8, 11, 13]
    assert packed.labels.tolist() == [21, 22, 23, 24, 25, 26]
    assert (packed.num_tokens, packed.num_computed_tokens, packed.num_padding_tokens) == (18, 15, 0)


def test_prompts_are_packed_whole_without_sharing():
    packed = pack(GROUPS, share_prompts=False)
    assert packed.plan == PackedPlan(((1, 5), (1, 4), (1, 3), (3, 2)))
    assert packed.num_computed_tokens == 18
    assert pack(GROUPS.select_idxs([0, 2, 1])).plan == PackedPlan(((1, 5), (1, 3), (1, 4)))  # not adjacent


def test_rows_with_the_same_prompt_are_a_family():
    families, shared = prompt_families(GROUPS, attention="cpu_kernel")
    assert families.tolist() == [0, 0, 1, 1, 2, 2]
    assert shared.tolist() == [2, 2, 1, 1, 0, 0]


def test_short_prompts_are_not_shared_without_compiled_attention():
    assert prompt_families(GROUPS, attention="sdpa")[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert pack(GROUPS, attention="sdpa").plan == pack(GROUPS, share_prompts=False).plan


def test_row_that_is_slower_shared_is_packed_whole():
    ids = torch.ones(4, 305, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[1:, 290:] = 0
    rows = DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, 280:].bool()})
    shared_prompts = pack(rows, attention="sdpa")
    assert shared_prompts.plan == SharedPromptPlan(((279, 26, 11, 11, 11),))
    lengths, shared = torch.tensor([600, 600, 600, 500]), torch.tensor([400, 299, 20, 20])
    assert sharing_pays(shared, lengths, attention="cpu_kernel").tolist() == [True, False, False, True]
    assert sharing_pays(shared, lengths, attention="sdpa").tolist() == [True, False, False, False]


def test_prompt_of_an_eighth_of_the_sequence_is_shared_by_flex_attention():
    shared, lengths = torch.tensor([0, 1, 75, 74, 4000]), torch.tensor([2, 8, 600, 600, 8000])
    assert sharing_pays(shared, lengths, attention="flex").tolist() == [False, True, True, False, True]
    assert prompt_families(GROUPS, attention="flex")[0].tolist() == [0, 0, 1, 1, 2, 3]


def test_row_without_prompt_shares_nothing():
    rows = DataProto.from_dict(
        {
            "input_ids": torch.tensor([[0, 5, 6], [0, 5, 7]]),
            "attention_mask": torch.tensor([[0, 1, 1]] * 2),
            "response_mask": torch.tensor([[False, True]] * 2),
        }
    )
    assert pack(rows).input_ids.tolist() == [[5, 6, 5, 7]]
    assert pack(rows).positions.tolist() == [0, 2]
