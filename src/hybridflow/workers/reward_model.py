"""The reward model: a model with a scalar head that scores whole conversations, as the reward worker scores by rule."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.config import Config
from hybridflow.controller import Dispatch, register
from hybridflow.data import load_tokenizer
from hybridflow.data.chat_prompts import PromptEncoder
from hybridflow.errors import ModelError, RewardError
from hybridflow.models import StoredModel
from hybridflow.protocol import DataProto
from hybridflow.workers.model_worker import TO_REPLICAS, ModelWorker
from hybridflow.workers.process import prepare_process
from hybridflow.workers.reward import SCORE_COLUMNS

TEXT_COLUMNS = ("solution_texts", "raw_prompts")


class RewardModelWorker(ModelWorker):
    """Scores the prompt and the response together, by its own tokenizer and chat template: the value at the last token.

    `reward.model_path` is the directory of a sequence classifier with one label. It never learns, so it is not part of
    a checkpoint.
    """

    component = "reward_model"
    role = "reward"

    def __init__(self, config: Config) -> None:
        prepare_process(self, config)
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
        self.positions = getattr(self.engine.model.config, "max_position_embeddings", None)

    @register(TO_REPLICAS, reads=TEXT_COLUMNS, writes=SCORE_COLUMNS, parts=lambda config: config.controller.parts)
    def score(self, batch: DataProto) -> DataProto:
        """`scores` of the rows, (batch,); none of them fails, and there are no further numbers."""
        columns = batch.non_tensor_batch
        ids = self._encode(columns["raw_prompts"].tolist(), columns["solution_texts"].tolist())
        values = self.engine.forward(_rows(ids))["values"][:, 0].float()
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
        texts = []
        for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            messages = [*_messages(prompt), {"role": "assistant", "content": response}]
            texts.append(self.encoder.text(messages, f"response {number}", add_generation_prompt=False))
        ids = self.encoder.encode(texts)
        longest = max(range(len(ids)), key=lambda row: len(ids[row]))
        if not all(ids):
            raise RewardError(
                f"response {[not row for row in ids].index(True)} and its prompt have no tokens to score."
            )
        if self.positions is not None and len(ids[longest]) >= self.positions:
            raise RewardError(
                f"response {longest} and its prompt have {len(ids[longest])} tokens for the reward model, which has "
                f"{self.positions} positions; lower data.max_prompt_length or data.max_response_length."
            )
        return ids


def _messages(prompt: Any) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _rows(ids: list[list[int]]) -> DataProto:
    """Rows whose one response token, which nobody looks at, follows the text: its value is read at the last token."""
    width = max(map(len, ids))
    tokens = torch.zeros(len(ids), width + 1, dtype=torch.int64)
    is_real = torch.ones(len(ids), width + 1, dtype=torch.int64)
    for row, of_text in enumerate(ids):
        tokens[row, width - len(of_text) : width] = torch.tensor(of_text)
        is_real[row, : width - len(of_text)] = 0
    mask = torch.ones(len(ids), 1, dtype=torch.bool)
    return DataProto.from_dict({"input_ids": tokens, "attention_mask": is_real, "response_mask": mask})
