"""The reward model: a model with a scalar head that scores whole conversations, as the reward worker scores by rule."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.config import Config
from hybridflow.controller import Dispatch, register
from hybridflow.data import load_tokenizer
from hybridflow.data.chat_prompts import PromptEncoder
from hybridflow.data.conversations import collate_conversations, encode_conversations
from hybridflow.errors import ModelError, RewardError
from hybridflow.models import StoredModel
from hybridflow.protocol import DataProto
from hybridflow.workers.model_worker import TO_REPLICAS, ModelWorker
from hybridflow.workers.reward import SCORE_COLUMNS
from hybridflow.workers.worker_process import prepare_worker_process

TEXT_COLUMNS = ("solution_texts", "raw_prompts")


class RewardModelWorker(ModelWorker):
    """Scores the prompt and the response together, by its own tokenizer and chat template: the value at the last token.

    `reward.model_path` is the directory of a sequence classifier with one label. It never learns, so it is not part of
    a checkpoint.
    """

    component = "reward_model"
    role = "reward"

    def __init__(self, config: Config) -> None:
        prepare_worker_process(self, config)
        path = config.reward.model_path
        with StoredModel(path) as stored:
            head = stored.name_of("score.weight")
            labels = stored.shape(head)[0] if head else 0
        if labels != 1:
            has = f"a head of {labels} labels" if labels else "no weights of a head (score.weight)"
            raise ModelError(f"reward.model_path='{path}' has {has}; give a sequence classifier with one label.")
        self.tokenizer = load_tokenizer(path)
        self.encoder = PromptEncoder(self.tokenizer, chat_template=True)
        self.engine = self.build_engine(config, path, "value")

    @register(TO_REPLICAS, reads=TEXT_COLUMNS, writes=SCORE_COLUMNS, parts=lambda config: config.controller.parts)
    def score(self, batch: DataProto) -> DataProto:
        """`scores` of the rows, (batch,); none of them fails, and there are no further numbers."""
        columns = batch.non_tensor_batch
        ids = self._encode(columns["raw_prompts"].tolist(), columns["solution_texts"].tolist())
        values = self.engine.forward(collate_conversations(ids))["values"][:, 0].float()
        extras = np.empty(len(batch), dtype=object)
        extras[:] = [{} for _ in ids]
        failed = torch.zeros(len(ids), dtype=torch.bool)
        tensors = {"scores": values, "reward_failed": failed, "reward_timed_out": failed.clone()}
        return DataProto.from_dict(tensors, {"reward_extras": extras})

    @register(TO_REPLICAS, reads=TEXT_COLUMNS, writes=(*SCORE_COLUMNS, "answers"))
    def score_validation(self, batch: DataProto) -> DataProto:
        """As `score`; what a response answers a reward model does not know."""
        return self.score(batch).union(DataProto.from_dict({}, {"answers": np.full(len(batch), None, dtype=object)}))

    @register(Dispatch.ONE_TO_ALL)
    def save(self, directory: str, in_background: bool = False) -> None:
        """Nothing: it stays as it is."""

    @register(Dispatch.ONE_TO_ALL)
    def load(self, directory: str) -> None:
        """Nothing: it stays as it is."""

    def _encode(self, prompts: Sequence[Any], responses: Sequence[str]) -> list[list[int]]:
        """Token ids of each conversation."""
        ids = encode_conversations(self.encoder, prompts, responses, [f"response {i}" for i in range(len(responses))])
        longest = max(range(len(ids)), key=lambda row: len(ids[row]))
        positions = self.engine.num_positions
        if positions is not None and len(ids[longest]) >= positions:
            raise RewardError(
                f"response {longest} and its prompt have {len(ids[longest])} tokens for the reward model, which has "
                f"{positions} positions; lower data.max_prompt_length or data.max_response_length."
            )
        return ids
