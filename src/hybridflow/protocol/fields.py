"""The glossary: every column a batch may carry, once, with its shape, dtype, padding, producer and consumer.

`concat` pads columns of different lengths by it, and padding of rows marks copies by it. A program with columns of
its own adds them: `FIELDS["my_column"] = Field("my_column", ("batch", "response_len"), torch.float32, "right", 0.0)`.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Number = int | float | bool


@dataclass(frozen=True)
class Field:
    """One column.

    `shape` names the axes; "response_len|1" is one number per token or one per row. `dtype` is a torch dtype, or
    `object` for a numpy column of Python objects. `padding_side` is where concat lengthens the second axis with
    `padding_value`; "both" is a prompt part, lengthened on the left, before a response part, lengthened on the right.
    `duplicate_value` is what a row appended only for padding holds; None copies the row. `example` is a Python literal:
    this column of a batch of two responses to one prompt; the second response is shorter.
    """

    name: str
    shape: tuple[str, ...]
    dtype: torch.dtype | type[object]
    padding_side: Literal["left", "right", "both"] | None = None
    padding_value: Number | None = None
    duplicate_value: Number | None = None
    example: str = ""
    description: str = ""
    producer: str = ""
    consumer: str = ""

    @property
    def is_tensor(self) -> bool:
        """Whether the column lives in `batch` (else in `non_tensor_batch`)."""
        return isinstance(self.dtype, torch.dtype)


PROMPT, RESPONSE, SEQUENCE = ("batch", "prompt_len"), ("batch", "response_len"), ("batch", "seq_len")
CANDIDATES = ("batch", "response_len", "candidates")
RESPONSE_OR_ROW = ("batch", "response_len|1")
ROW = ("batch",)


# fmt: off
_FIELDS = (
    Field("prompts", PROMPT, torch.int64, "left", 0,
          example="[[0, 7, 8], [0, 7, 8]]",
          description="Prompt tokens.", producer="data", consumer="rollout"),
    Field("prompt_mask", PROMPT, torch.bool, "left", False,
          example="[[False, True, True], [False, True, True]]",
          description="True where prompts holds a real token.", producer="data", consumer="rollout"),
    Field("responses", RESPONSE, torch.int64, "right", 0,
          example="[[4, 2], [2, 0]]",
          description="Generated tokens.", producer="rollout", consumer="actor, critic, rewards"),
    Field("input_ids", SEQUENCE, torch.int64, "both", 0,
          example="[[0, 7, 8, 4, 2], [0, 7, 8, 2, 0]]",
          description="Prompt tokens, then response tokens.", producer="data, rollout", consumer="every model"),
    Field("attention_mask", SEQUENCE, torch.int64, "both", 0,
          example="[[0, 1, 1, 1, 1], [0, 1, 1, 1, 0]]",
          description="1 where input_ids holds a real token.", producer="data, rollout", consumer="every model"),
    Field("position_ids", SEQUENCE, torch.int64, "both", 0,
          example="[[0, 0, 1, 2, 3], [0, 0, 1, 2, 2]]",
          description="Position of each token among the real ones.", producer="data, rollout", consumer="every model"),
    Field("response_mask", RESPONSE, torch.bool, "right", False,
          example="[[True, True], [True, False]]",
          description="True where a response token counts.", producer="rollout", consumer="losses, metrics"),
    Field("rollout_versions", RESPONSE, torch.int64, "right", -1,
          example="[[3, 3], [3, -1]]",
          description="Version of the weights that made each token.", producer="rollout", consumer="metrics"),
    Field("rollout_log_probs", RESPONSE, torch.float32, "right", 0.0,
          example="[[-0.7, -0.2], [-1.6, 0.0]]",
          description="Log-probs of the tokens under the distribution they were sampled from.",
          producer="rollout", consumer="old log-probs, metrics"),
    Field("old_log_probs", RESPONSE, torch.float32, "right", 0.0,
          example="[[-0.7, -0.2], [-1.6, 0.0]]",
          description="Log-probs under the policy before the update.", producer="actor", consumer="policy loss, KL"),
    Field("ref_log_probs", RESPONSE, torch.float32, "right", 0.0,
          example="[[-0.8, -0.2], [-1.5, 0.0]]",
          description="Log-probs under the reference policy.", producer="reference", consumer="KL"),
    Field("teacher_log_probs", RESPONSE, torch.float32, "right", 0.0,
          example="[[-0.3, -0.1], [-2.3, 0.0]]",
          description="Log-probs under the teacher.", producer="teacher", consumer="distillation"),
    Field("candidate_ids", CANDIDATES, torch.int64, "right", 0,
          example="[[[4, 2], [2, 4]], [[4, 2], [0, 0]]]",
          description="The tokens that the teacher finds most likely at each place.",
          producer="teacher", consumer="distillation"),
    Field("teacher_candidate_log_probs", CANDIDATES, torch.float32, "right", 0.0,
          example="[[[-0.3, -2.3], [-0.1, -2.5]], [[-0.3, -2.3], [0.0, 0.0]]]",
          description="Their log-probs under the teacher.", producer="teacher", consumer="distillation"),
    Field("entropies", RESPONSE, torch.float32, "right", 0.0,
          example="[[1.1, 0.6], [1.1, 0.0]]",
          description="Entropy of the policy at each response token.", producer="actor", consumer="metrics"),
    Field("sum_squared_probs", RESPONSE, torch.float32, "right", 0.0,
          example="[[0.4, 0.7], [0.4, 0.0]]",
          description="Sum over the vocabulary of the squared probabilities at each response token.",
          producer="actor", consumer="optimal token baseline"),
    Field("values", RESPONSE, torch.float32, "right", 0.0,
          example="[[0.5, 0.8], [0.5, 0.0]]",
          description="The critic's estimate of the return.", producer="critic", consumer="gae, value loss"),
    Field("token_level_scores", RESPONSE, torch.float32, "right", 0.0,
          example="[[0.0, 1.0], [0.0, 0.0]]",
          description="Score given at each token, before the KL penalty.", producer="rewards", consumer="KL penalty"),
    Field("token_level_rewards", RESPONSE, torch.float32, "right", 0.0,
          example="[[-0.01, 1.0], [0.01, 0.0]]",
          description="Score minus the KL penalty.", producer="KL penalty", consumer="gae"),
    Field("advantages", RESPONSE_OR_ROW, torch.float32, "right", 0.0,
          example="[[0.7], [-0.7]]",
          description="Advantage per token, or one per row.", producer="advantages", consumer="policy loss"),
    Field("returns", RESPONSE_OR_ROW, torch.float32, "right", 0.0,
          example="[[0.7], [-0.7]]",
          description="Return per token, or one per row.", producer="advantages", consumer="value loss"),
    Field("scores", ROW, torch.float32,
          example="[1.0, 0.0]",
          description="Score of the whole response.", producer="rewards", consumer="grpo, metrics"),
    Field("baseline_scores", ROW, torch.float32,
          example="[1.0, 1.0]",
          description="Score of the greedy response to the same prompt.", producer="rewards", consumer="remax"),
    Field("reward_components", ("batch", "components"), torch.float32,
          example="[[1.0, 0.0], [0.0, 0.0]]",
          description="The rewards that reward.weights names, before they are added.",
          producer="rewards", consumer="gdpo"),
    Field("selected_tokens", RESPONSE, torch.bool, "right", False,
          example="[[True, False], [False, False]]",
          description="True where the policy loss treats a token apart.", producer="actor", consumer="policy loss"),
    Field("rollout_weights", RESPONSE, torch.float32, "right", 0.0,
          example="[[1.0, 1.0], [1.0, 0.0]]",
          description="What each token's loss is multiplied with, since another policy sampled it.",
          producer="rollout correction", consumer="policy loss"),
    Field("loss_slopes", ROW, torch.float32,
          example="[-0.5, 0.5]",
          description="Derivative of the loss by the sum of a row's log-probs, or by its score.",
          producer="DPO, reward model", consumer="their updates"),
    Field("reward_failed", ROW, torch.bool,
          example="[False, False]",
          description="True where the reward function failed.", producer="rewards", consumer="metrics"),
    Field("reward_timed_out", ROW, torch.bool,
          example="[False, False]",
          description="True where it failed because it took too long.", producer="rewards", consumer="metrics"),
    Field("group_ids", ROW, torch.int64,
          example="[0, 0]",
          description="Equal for the responses of one prompt.", producer="trainer", consumer="grpo, pass@k"),
    Field("row_ids", ROW, torch.int64, duplicate_value=-1,
          example="[0, 1]",
          description="Row of this step's batch; -1 marks a padded copy, which every update ignores.",
          producer="trainer", consumer="updates"),
    Field("raw_prompts", ROW, object,
          example="['7 + 5 =', '7 + 5 =']",
          description="Chat messages or text of the prompt.", producer="data", consumer="rewards, samples"),
    Field("prompt_texts", ROW, object,
          example="['7 + 5 =', '7 + 5 =']",
          description="The prompt as the model reads it, rendered by the chat template.",
          producer="data", consumer="samples"),
    Field("data_sources", ROW, object,
          example="['arithmetic', 'arithmetic']",
          description="Name of the data set, which chooses the reward.", producer="data", consumer="rewards, metrics"),
    Field("ground_truths", ROW, object,
          example="['12', '12']",
          description="What the reward compares with.", producer="data", consumer="rewards, samples"),
    Field("extra_infos", ROW, object,
          example="[{'digits': 1}, {'digits': 1}]",
          description="A dict with whatever else the data set knows of the row.", producer="data", consumer="rewards"),
    Field("solution_texts", ROW, object,
          example="['12', '']",
          description="The decoded response.", producer="rollout", consumer="rewards, samples"),
    Field("reward_extras", ROW, object,
          example="[{'tries': 1}, {'tries': 1}]",
          description="A dict with the further numbers of the reward.", producer="rewards", consumer="metrics"),
    Field("answers", ROW, object,
          example="['12', None]",
          description="What a validation response answers, a text; None where there is no answer.",
          producer="rewards", consumer="maj@k"),
    Field("finish_reasons", ROW, object,
          example="['stop', 'stop']",
          description="Why generation ended: 'stop', 'length' or 'abort'.", producer="rollout", consumer="metrics"),
)
# fmt: on

FIELDS: dict[str, Field] = {field.name: field for field in _FIELDS}

# Columns of token ids: padded with meta_info["pad_token_id"] where the batch carries it.
TOKEN_COLUMNS = ("prompts", "responses", "input_ids")
