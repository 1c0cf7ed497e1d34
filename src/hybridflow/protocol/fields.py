"""The glossary of batch columns: shape, dtype, padding, producer and consumer of each.

`concat` uses it to pad columns of different lengths, and row padding uses it to mark copies. Add a custom column with
`FIELDS["my_column"] = Field("my_column", ("batch", "response_len"), torch.float32, "right", 0.0)`.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Number = int | float | bool


@dataclass(frozen=True)
class Field:
    """The definition of one column.

    `shape` names the axes; "response_len|1" means one number per token or one per row. `dtype` is a torch dtype, or
    `object` for a numpy column of Python objects. `padding_side` is the side on which concat pads the second axis with
    `padding_value`; "both" means that the prompt part is padded on the left and the response part on the right.
    `duplicate_value` is the value in rows appended as padding; None copies the row. `example` is a Python literal: this
    column of a batch of two responses to one prompt, the second response being shorter.
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
        """Whether the column is in `batch`; otherwise it is in `non_tensor_batch`."""
        return isinstance(self.dtype, torch.dtype)


PROMPT, RESPONSE, SEQUENCE = ("batch", "prompt_len"), ("batch", "response_len"), ("batch", "seq_len")
CANDIDATES = ("batch", "response_len", "candidates")
RESPONSE_OR_ROW = ("batch", "response_len|1")
ROW = ("batch",)
ROUTES = ("batch", "seq_len", "expert_layers", "experts_per_token")


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
          description="Position of each token, without padding.", producer="data, rollout", consumer="every model"),
    Field("response_mask", RESPONSE, torch.bool, "right", False,
          example="[[True, True], [True, False]]",
          description="True for the tokens that losses and metrics count.",
          producer="rollout", consumer="losses, metrics"),
    Field("rollout_versions", RESPONSE, torch.int64, "right", -1,
          example="[[3, 3], [3, -1]]",
          description="Version of the weights that generated each token.", producer="rollout", consumer="metrics"),
    Field("routes", ROUTES, torch.int16, "both", -1,
          example="[[[[-1]], [[1]], [[0]], [[1]], [[-1]]], [[[-1]], [[1]], [[0]], [[-1]], [[-1]]]]",
          description="Experts that sampling used, per token and layer; -1: not recorded, the model chooses.",
          producer="rollout", consumer="actor"),
    Field("rollout_log_probs", RESPONSE, torch.float32, "right", 0.0,
          example="[[-0.7, -0.2], [-1.6, 0.0]]",
          description="Log-probs of the tokens under the sampled distribution.",
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
          description="The tokens most likely under the teacher at each position.",
          producer="teacher", consumer="distillation"),
    Field("teacher_candidate_log_probs", CANDIDATES, torch.float32, "right", 0.0,
          example="[[[-0.3, -2.3], [-0.1, -2.5]], [[-0.3, -2.3], [0.0, 0.0]]]",
          description="Log-probs of candidate_ids under the teacher.", producer="teacher", consumer="distillation"),
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
          description="Score of each token, before the KL penalty.", producer="rewards", consumer="KL penalty"),
    Field("token_level_rewards", RESPONSE, torch.float32, "right", 0.0,
          example="[[-0.01, 1.0], [0.01, 0.0]]",
          description="Score minus the KL penalty.", producer="KL penalty", consumer="gae"),
    Field("advantages", RESPONSE_OR_ROW, torch.float32, "right", 0.0,
          example="[[0.7], [-0.7]]",
          description="Advantage per token, or one per row.", producer="advantages", consumer="policy loss"),
    Field("returns", RESPONSE_OR_ROW, torch.float32, "right", 0.0,
          example="[[0.7], [-0.7]]",
          description="Return per token, or one per row.", producer="advantages", consumer="value loss"),
    Field("scores", ROW, torch.float32, example="[1.0, 0.0]",
          description="Score of the whole response.", producer="rewards", consumer="grpo, metrics"),
    Field("baseline_scores", ROW, torch.float32, example="[1.0, 1.0]",
          description="Score of the greedy response to the same prompt.", producer="rewards", consumer="remax"),
    Field("reward_components", ("batch", "components"), torch.float32,
          example="[[1.0, 0.0], [0.0, 0.0]]",
          description="The rewards named by reward.weights, before the weighted sum.",
          producer="rewards", consumer="gdpo"),
    Field("selected_tokens", RESPONSE, torch.bool, "right", False,
          example="[[True, False], [False, False]]",
          description="True for tokens that Clip-Cov or KL-Cov treats separately in the policy loss.",
          producer="actor", consumer="policy loss"),
    Field("rollout_weights", RESPONSE, torch.float32, "right", 0.0,
          example="[[1.0, 1.0], [1.0, 0.0]]",
          description="Importance weight of each token in the policy loss, because another policy sampled it.",
          producer="rollout correction", consumer="policy loss"),
    Field("loss_slopes", ROW, torch.float32, example="[-0.5, 0.5]",
          description="Derivative of the loss with respect to the sum of a row's log-probs, or to its score.",
          producer="DPO, reward model", consumer="their updates"),
    Field("reward_failed", ROW, torch.bool, example="[False, False]",
          description="True where the reward function failed.", producer="rewards", consumer="metrics"),
    Field("reward_timed_out", ROW, torch.bool, example="[False, False]",
          description="True where the reward function timed out.", producer="rewards", consumer="metrics"),
    Field("group_ids", ROW, torch.int64, example="[0, 0]",
          description="Group of the response; equal for all responses to one prompt.",
          producer="trainer", consumer="grpo, pass@k"),
    Field("row_ids", ROW, torch.int64, duplicate_value=-1, example="[0, 1]",
          description="Row in this step's batch; -1 marks a copy added as padding, which every update ignores.",
          producer="trainer", consumer="updates"),
    Field("raw_prompts", ROW, object, example="['7 + 5 =', '7 + 5 =']",
          description="Chat messages or text of the prompt.", producer="data", consumer="rewards, samples"),
    Field("prompt_texts", ROW, object, example="['7 + 5 =', '7 + 5 =']",
          description="The prompt as the model reads it, rendered by the chat template.",
          producer="data", consumer="samples"),
    Field("data_sources", ROW, object, example="['arithmetic', 'arithmetic']",
          description="Name of the data set, which chooses the reward.", producer="data", consumer="rewards, metrics"),
    Field("ground_truths", ROW, object, example="['12', '12']",
          description="Correct answer, which the reward compares with the response.",
          producer="data", consumer="rewards, samples"),
    Field("extra_infos", ROW, object, example="[{'digits': 1}, {'digits': 1}]",
          description="A dict with further data from the data set.", producer="data", consumer="rewards"),
    Field("solution_texts", ROW, object, example="['12', '']",
          description="The decoded response.", producer="rollout", consumer="rewards, samples"),
    Field("reward_extras", ROW, object, example="[{'tries': 1}, {'tries': 1}]",
          description="A dict with further numbers from the reward function.", producer="rewards", consumer="metrics"),
    Field("answers", ROW, object, example="['12', None]",
          description="Answer extracted from a validation response, a text; None without an answer.",
          producer="rewards", consumer="maj@k"),
    Field("finish_reasons", ROW, object, example="['stop', 'stop']",
          description="Why it ended: 'stop', 'length', 'abort', 'done', 'turns', 'tokens', 'seconds', 'rows', 'error'.",
          producer="rollout", consumer="metrics"),
    # of episodes
    Field("episode_ids", ROW, torch.int64, example="[0, 1]",
          description="Episode of the row; an episode's rows are adjacent when they are made.",
          producer="rollout", consumer="advantages, metrics"),
    Field("turn_ids", RESPONSE, torch.int64, "right", -1,
          example="[[0, 1], [0, -1]]",
          description="Turn of each token; messages after a turn belong to it. -1: padding.",
          producer="rollout", consumer="metrics"),
    Field("turn_rewards", RESPONSE, torch.float32, "right", 0.0,
          example="[[0.0, 0.5], [0.0, 0.0]]",
          description="Reward of a turn, at its last generated token; it is part of the score.",
          producer="rollout", consumer="gae"),
    Field("row_lengths", ROW, torch.int64, example="[4, 3]",
          description="Number of tokens in prompt, turns and answers.",
          producer="rollout", consumer="balance, metrics"),
    Field("num_tool_calls", ROW, torch.int64, example="[2, 0]",
          description="Number of tool calls in the episode.", producer="rollout", consumer="metrics"),
    Field("num_tool_errors", ROW, torch.int64, example="[1, 0]",
          description="Number of tool calls that were invalid, failed or timed out.",
          producer="rollout", consumer="metrics"),
    Field("episode_messages", ROW, object, example="[[{'role': 'assistant', 'content': '12'}], []]",
          description="The messages of the episode after its prompt.", producer="rollout", consumer="samples"),
    Field("agent_outputs", ROW, object, example="['7\\n1.0\\n', '']",
          description="Output of the agent's command.", producer="rollout", consumer="samples"),
)
# fmt: on

FIELDS: dict[str, Field] = {field.name: field for field in _FIELDS}

TOKEN_COLUMNS = ("prompts", "responses", "input_ids")
"""Columns of token ids, padded with meta_info["pad_token_id"] if the batch has it."""
