"""Rewards of the parts of a batch, several at the same time.

begin_score    part 0, part 1, part 2 ...    gives them to the reward processes, in order
finish_score           part 0, part 1 ...    waits for them, in a second thread
"""

from collections.abc import Callable
from itertools import count

import torch

from hybridflow.config import Config
from hybridflow.controller import Dispatch, register
from hybridflow.environments.processes.closure import Closure
from hybridflow.environments.rewards import RewardResult
from hybridflow.protocol import DataProto
from hybridflow.workers.reward import SCORED_COLUMNS, RewardWorker, result_columns, score_columns, step_of


class StreamedRewardWorker(RewardWorker):
    """A worker that scores several parts of a batch at the same time (trainer.stream), in a pool of its own."""

    second_thread_methods = frozenset({"finish_score"})

    def __init__(self, config: Config, closure: Closure | None = None) -> None:
        super().__init__(config, closure)
        self._begun: dict[int, Callable[[], RewardResult]] = {}
        self._numbers = count()

    @register(Dispatch.ONE_TO_ALL)
    def abandon_step(self) -> None:
        """Forget the unfinished step and the calls that have begun."""
        super().abandon_step()
        self._begun.clear()

    @register(Dispatch.DP_COMPUTE_PROTO, reads=SCORED_COLUMNS, writes=("score_numbers",))
    def begin_score(self, batch: DataProto) -> DataProto:
        """Begin to score; return a row with the number of the call for each row, for `finish_score`."""
        number = next(self._numbers)
        self._begun[number] = self._begin(batch, step=step_of(batch))
        return DataProto.from_dict({"score_numbers": torch.full((len(batch),), number)})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("score_numbers",), writes=score_columns)
    def finish_score(self, begun: DataProto) -> DataProto:
        """Return the columns of `score` for the rows of a call of `begin_score`."""
        return result_columns(self._begun.pop(int(begun.batch["score_numbers"][0]))())
