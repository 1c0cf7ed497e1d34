import pytest
import torch

from hybridflow.errors import BatchError
from hybridflow.protocol import FIELDS
from hybridflow.rollout import Completion
from hybridflow.workers.generating import rollout_batch

PROMPTS = torch.tensor([[7, 11, 12], [13, 14, 15]])
PROMPT_MASK = torch.tensor([[False, True, True], [True, True, True]])
COMPLETIONS = [
    Completion(0, 0, [21, 1], [-0.5, -1.5], [3, 4], "stop"),
    Completion(0, 1, [22, 23, 24], [-0.1, -0.2, -0.3], [4, 4, 4], "length"),
]


def test_completions_become_padded_columns_of_the_glossary():
    columns = rollout_batch(PROMPTS, PROMPT_MASK, COMPLETIONS, pad_token_id=7)
    assert columns["responses"].tolist() == [[21, 1, 7], [22, 23, 24]]
    assert columns["response_mask"].tolist() == [[True, True, False], [True, True, True]]
    assert columns["input_ids"].tolist() == [[7, 11, 12, 21, 1, 7], [13, 14, 15, 22, 23, 24]]
    assert columns["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    assert columns["position_ids"].tolist() == [[0, 0, 1, 2, 3, 3], [0, 1, 2, 3, 4, 5]]
    assert columns["rollout_versions"].tolist() == [[3, 4, -1], [4, 4, 4]]
    torch.testing.assert_close(columns["rollout_log_probs"], torch.tensor([[-0.5, -1.5, 0.0], [-0.1, -0.2, -0.3]]))
    assert {name: column.dtype for name, column in columns.items()} == {name: FIELDS[name].dtype for name in columns}


def test_an_aborted_response_without_tokens_is_an_empty_row():
    aborted = [Completion(0, index, finish_reason="abort") for index in range(2)]
    columns = rollout_batch(PROMPTS, PROMPT_MASK, [COMPLETIONS[0], aborted[1]], pad_token_id=7)
    assert columns["responses"].tolist() == [[21, 1], [7, 7]]
    assert columns["response_mask"].tolist() == [[True, True], [False, False]]
    columns = rollout_batch(PROMPTS, PROMPT_MASK, aborted, pad_token_id=7)
    assert columns["responses"].shape == columns["rollout_log_probs"].shape == (2, 0)
    assert torch.equal(columns["input_ids"], PROMPTS)


@pytest.mark.parametrize("completions", [[], COMPLETIONS[:1]])
def test_each_prompt_row_needs_one_completion(completions):
    with pytest.raises(BatchError, match=f"{len(completions)} completions for 2 prompt rows"):
        rollout_batch(PROMPTS, PROMPT_MASK, completions, pad_token_id=7)
