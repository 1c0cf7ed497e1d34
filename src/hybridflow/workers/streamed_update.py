"""The actor's optimizer step of a streamed batch: gradients are added part by part, before the whole batch is known.

Until the last part the counts that divide the loss are not known. So each part is divided by the largest counts that
the batch can have, and the optimizer step scales the sum.
"""

from hybridflow.algorithms.aggregation import count_of
from hybridflow.config import Config
from hybridflow.engines import TrainEngine
from hybridflow.errors import BatchError
from hybridflow.protocol import DataProto
from hybridflow.workers.exact_samples import exactly, samples_exactly
from hybridflow.workers.log_prob_mismatch import LARGEST
from hybridflow.workers.losses import AGGREGATED_METRICS, actor_loss
from hybridflow.workers.updates import figures_of, metrics_of_steps


class StreamedUpdate:
    """One optimizer step on the parts of a batch, added in order."""

    def __init__(self, config: Config, engine: TrainEngine) -> None:
        self._config, self._engine = config, engine
        self._most_sequences = config.data.train_batch_size * config.rollout.group_size
        self._most_tokens = self._most_sequences * config.data.max_response_length
        self._num_rows = self._num_tokens = self._num_sequences = 0

    def add(self, part: DataProto) -> DataProto:
        """Add the gradients of this rank's rows of a part; make the optimizer step after the last one.

        `part.meta_info["part"]`: number of the part, number of parts, rows of the batch. Returns
        `meta_info["metrics"]` as `run_updates`; they are empty before the last part. Raises BatchError if a part or a
        row is missing, and the errors of `TrainEngine.update`.
        """
        config, meta_info = self._config, part.meta_info
        number, num_parts, num_rows = meta_info["part"]
        rows = part.select_idxs(part.batch["row_ids"] >= 0)  # others are padded copies
        lengths = rows.batch["response_mask"].sum(-1)
        if number == 0:
            self._num_rows = self._num_tokens = self._num_sequences = 0
        loss = actor_loss(config, meta_info["kl_coef"], self._most_tokens, self._most_sequences)
        self._engine.add_to_update(
            rows,
            exactly(loss) if samples_exactly(config) else loss,
            number=number,
            is_last=number == num_parts - 1,
            with_entropy=True,
            temperature=config.rollout.temperature,
        )
        self._num_rows += len(rows)
        self._num_tokens += int(lengths.sum())
        self._num_sequences += int((lengths > 0).sum())
        if number < num_parts - 1:
            return DataProto(meta_info={"metrics": {}})
        return DataProto(meta_info={"metrics": self._finish(num_parts, num_rows)})

    def _finish(self, num_parts: int, num_rows: int) -> dict[str, float]:
        engine, aggregation = self._engine, self._config.actor.loss_aggregation
        if (added := engine.all_reduce_sum(self._num_rows)) != num_rows:
            raise BatchError(f"the parts of a batch of {num_rows} rows have {added} rows; each row must occur once.")
        num_tokens = engine.all_reduce_sum(self._num_tokens)
        num_sequences = engine.all_reduce_sum(self._num_sequences)
        of_tokens = self._most_tokens / max(num_tokens, 1)
        of_loss = count_of(aggregation, self._most_tokens, self._most_sequences) / max(
            count_of(aggregation, num_tokens, num_sequences), 1
        )
        result = engine.finish_update(num_parts, of_loss)

        def scale(name: str) -> float:
            return of_loss if name in AGGREGATED_METRICS else 1.0 if name == LARGEST else of_tokens

        scaled = {name: value * scale(name) for name, value in result.metrics.items()}
        return metrics_of_steps([figures_of(result, "actor") | scaled], "actor")
