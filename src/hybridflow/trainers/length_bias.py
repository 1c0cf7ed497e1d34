"""The bias of `rollout.order = "ready"`: long responses are trained on later than short ones."""

from collections.abc import Mapping
from typing import Any

from hybridflow.config import Config
from hybridflow.trainers.reading import Batch, read


class LengthBias:
    """The response lengths of the groups trained on so far, against those of as many groups as they began.

    A group that runs has no length yet. So the first m batches that were trained on are compared with the first m that
    began, which order "sampled" would have trained on, when all groups of the latter were trained on. m grows by one at
    most with each step: no comparison is left out, also not while a long group runs.
    """

    def __init__(self, config: Config) -> None:
        self._is_ready = config.rollout.order == "ready"
        self._num_prompts, self._group_size = config.data.train_batch_size, config.rollout.group_size
        self._num_compared = 0
        self._trained_tokens = self._begun_tokens = 0  # of the first `_num_compared` batches
        self._trained: list[int] = []  # tokens of each later batch that was trained on
        self._begun: dict[int, list[int]] = {}  # number and tokens of the groups seen, by later batch that began

    def note(self, batch: Batch, step: int) -> dict[str, float]:
        """Count the batch of a step; return the metrics `ready/...`, or an empty dictionary with order "sampled"."""
        if not self._is_ready:
            return {}
        columns = read(batch, ("group_ids", "response_mask")).batch
        tokens = columns["response_mask"].sum(-1).tolist()
        of_groups: dict[int, int] = {}
        for group, length in zip(columns["group_ids"].tolist(), tokens, strict=True):
            of_groups[group] = of_groups.get(group, 0) + length
        began = [group // self._num_prompts for group in of_groups]
        for batch_of_group, length in zip(began, of_groups.values(), strict=True):
            seen = self._begun.setdefault(batch_of_group, [0, 0])
            seen[0], seen[1] = seen[0] + 1, seen[1] + length
        self._trained.append(sum(tokens))
        if self._begun.get(self._num_compared, [0])[0] == self._num_prompts:
            self._begun_tokens += self._begun.pop(self._num_compared)[1]
            self._trained_tokens += self._trained.pop(0)
            self._num_compared += 1
        late = sum(batch_of_group < step for batch_of_group in began) / len(began)
        return {"ready/late_share": late, **self._means()}

    def _means(self) -> dict[str, float]:
        responses = self._num_compared * self._num_prompts * self._group_size
        if not responses:
            return {}
        return {
            "ready/compared_batches": float(self._num_compared),
            "ready/length_trained": self._trained_tokens / responses,
            "ready/length_begun": self._begun_tokens / responses,
            "ready/tokens_behind": float(self._begun_tokens - self._trained_tokens),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; empty with order "sampled"."""
        if not self._is_ready:
            return {}
        return {
            "compared": [self._num_compared, self._trained_tokens, self._begun_tokens],
            "trained": list(self._trained),
            "begun": [[batch, *seen] for batch, seen in self._begun.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; an empty one is that of a run at its start."""
        if state:
            self._num_compared, self._trained_tokens, self._begun_tokens = state["compared"]
            self._trained = list(state["trained"])
            self._begun = {batch: seen for batch, *seen in state["begun"]}
