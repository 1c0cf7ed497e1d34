"""The columns of episodes in the glossary."""

import torch

from hybridflow.protocol.fields import FIELDS, RESPONSE, ROW, Field

# fmt: off
_EPISODE_FIELDS = (
    Field("episode_ids", ROW, torch.int64,
          example="[0, 1]",
          description="Episode of the row; an episode may have several rows, which are adjacent when they are made.",
          producer="rollout", consumer="advantages, metrics"),
    Field("turn_ids", RESPONSE, torch.int64, "right", -1,
          example="[[0, 1], [0, -1]]",
          description="Turn of each token; messages after a turn belong to it. -1: padding.",
          producer="rollout", consumer="metrics"),
    Field("turn_rewards", RESPONSE, torch.float32, "right", 0.0,
          example="[[0.0, 0.5], [0.0, 0.0]]",
          description="Reward of a turn, at its last generated token; it is part of the score.",
          producer="rollout", consumer="gae"),
    Field("row_lengths", ROW, torch.int64,
          example="[4, 3]",
          description="Number of tokens of the row: those of prompt, turns and answers.",
          producer="rollout", consumer="balance, metrics"),
    Field("num_tool_calls", ROW, torch.int64,
          example="[2, 0]",
          description="Number of calls of tools in the episode.", producer="rollout", consumer="metrics"),
    Field("num_tool_errors", ROW, torch.int64,
          example="[1, 0]",
          description="Number of these calls that were wrong, failed or took too long.",
          producer="rollout", consumer="metrics"),
    Field("episode_messages", ROW, object,
          example="[[{'role': 'assistant', 'content': '12'}], []]",
          description="The messages of the episode after its prompt.", producer="rollout", consumer="samples"),
)
# fmt: on

FIELDS.update({field.name: field for field in _EPISODE_FIELDS})
