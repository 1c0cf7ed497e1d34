"""The reward model: a model with a scalar head that scores conversations, instead of a reward function."""

from collections.abc import Sequence
from typing import Any

import torch

from hybridflow.checkpoint import SavedFile
from hybridflow.config import Config
from hybridflow.controller import Dispatch, register
from hybridflow.data import load_tokenizer
from hybridflow.data.chat_prompts import PromptEncoder
from hybridflow.data.preference_dataset import collate_conversations, encode_conversations
from hybridflow.errors import ModelError, RewardError
from hybridflow.models.stored_model import StoredModel
from hybridflow.protocol import DataProto
from hybridflow.runtime.fault_points import fault_point
from hybridflow.workers.model_worker import ModelWorker, on_replicas
from hybridflow.workers.reward import SCORE_COLUMNS
from hybridflow.workers.worker_process import prepare_worker_process

TEXT_COLUMNS = ("solution_texts", "raw_prompts")


class RewardModelWorker(ModelWorker):
    """A worker that scores a prompt and its response together: the score is the value at the last token.

    `reward.model_path` is the directory of a sequence classifier with one label; its tokenizer and chat template are
    used. The model is frozen, so it is not part of a checkpoint.
    """

    component = "reward_model"
    role = "reward"

    def __init__(self, config: Config) -> None:
        config = prepare_worker_process(self, config)
        path = config.reward.model_path
        with StoredModel(path) as stored:
            labels = stored.shape("score.weight")[0] if "score.weight" in stored.names else 0
        if labels != 1:
            has = f"a head of {labels} labels" if labels else "no weights of a head (score.weight)"
            raise ModelError(f"reward.model_path='{path}' has {has}; use a sequence classifier with one label.")
        self.tokenizer = load_tokenizer(path, config.data.date)
        self.encoder = PromptEncoder(self.tokenizer, chat_template=True)
        self.engine = self.build_engine(config, path, "value")

    @on_replicas(reads=TEXT_COLUMNS, writes=SCORE_COLUMNS)
    def score(self, batch: DataProto) -> DataProto:
        """Compute `scores`, (batch,); no row fails, and `reward_extras` are empty."""
        fault_point("score")
        columns = batch.non_tensor_batch
        ids = self._encode(columns["raw_prompts"].tolist(), columns["solution_texts"].tolist())
        values = self.engine.forward(collate_conversations(ids))["values"][:, 0].float()
        failed = torch.zeros(len(ids), dtype=torch.bool)
        tensors = {"scores": values, "reward_failed": failed, "reward_timed_out": failed.clone()}
        return DataProto.from_dict(tensors, {"reward_extras": [{} for _ in ids]})

    @on_replicas(reads=TEXT_COLUMNS, writes=(*SCORE_COLUMNS, "answers"))
    def score_validation(self, batch: DataProto) -> DataProto:
        """Compute the columns of `score`, and `answers`, which are None: a reward model extracts no answers."""
        return self.score(batch).union(DataProto.from_dict({}, {"answers": [None] * len(batch)}))

    @register(Dispatch.ONE_TO_ALL)
    def save(self, directory: str, in_background: bool = False) -> list[SavedFile]:
        """Return no files: the model is frozen."""
        return []

    @register(Dispatch.ONE_TO_ALL)
    def load(self, directory: str) -> None:
        """Do nothing: the model is frozen."""

    @register(Dispatch.ONE_TO_ALL)
    def verify(self, directory: str) -> None:
        """Do nothing: the model is frozen."""

    def _encode(self, prompts: Sequence[Any], responses: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each conversation. Raises RewardError if one exceeds the model's positions."""
        ids = encode_conversations(self.encoder, prompts, responses, [f"response {i}" for i in range(len(responses))])
        longest = max(range(len(ids)), key=lambda row: len(ids[row]))
        positions = self.engine.num_positions
        if positions is not None and len(ids[longest]) >= positions:
            raise RewardError(
                f"response {longest} and its prompt have {len(ids[longest])} tokens, but the reward model has only "
                f"{positions} positions; lower data.max_prompt_length or data.max_response_length."
            )
        return ids
