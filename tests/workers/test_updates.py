from contextlib import nullcontext

import pytest
import torch

from hybridflow.engines import UpdateResult
from hybridflow.errors import BatchError
from hybridflow.protocol import DataProto
from hybridflow.runtime.device import take_compilations
from hybridflow.workers.updates import FIGURES_WITHOUT_LOSS, mini_batches_of, run_updates


class OneRank:
    """The part of an engine that mini-batches use, with world_size 1."""

    def all_reduce_sum(self, value: int) -> int:
        return value


class FirstOfTwoRanks:
    """An engine of rank 0 of 2; rank 1 has 1 row of each mini-batch, with 5 response tokens in 1 sequence."""

    def __init__(self) -> None:
        self.others = iter([1, 5, 1] * 10)

    def all_reduce_sum(self, value: int) -> int:
        return value + next(self.others)


def batch(row_ids: list[int], mini_batches: list[list[int]] | None) -> DataProto:
    response_mask = torch.arange(4) < torch.tensor([row_id % 4 for row_id in row_ids])[:, None]
    meta_info = {} if mini_batches is None else {"mini_batches": mini_batches}
    return DataProto.from_dict({"row_ids": torch.tensor(row_ids), "response_mask": response_mask}, meta_info=meta_info)


def memberships(rows: DataProto, engine) -> list[tuple[list[int], int, int]]:
    return [
        (step.rows.batch["row_ids"].tolist(), step.num_tokens, step.num_sequences)
        for step in mini_batches_of(rows, engine)
    ]


@pytest.mark.parametrize(
    ("row_ids", "mini_batches", "engine", "expected"),
    [
        # Row 7 has 3 response tokens, 2 has 2, 9 has 1, and 4 has 0, so it does not count as a sequence.
        ([7, 2, 4, 9], [[4, 7], [9, 2]], OneRank, [([7, 4], 3, 1), ([2, 9], 3, 2)]),
        ([1, 2], [[1, 2], [2], [1]], OneRank, [([1, 2], 3, 2), ([2], 2, 1), ([1], 1, 1)]),  # another epoch
        ([3, 5, -1, -1], [[3, 5]], OneRank, [([3, 5], 4, 2)]),  # with padded copies
        ([3, 5], [[3, 8], [9, 5]], FirstOfTwoRanks, [([3], 8, 2), ([5], 6, 2)]),  # counts of all ranks
    ],
)
def test_mini_batches_have_the_rows_and_counts_of_their_row_ids(row_ids, mini_batches, engine, expected):
    assert memberships(batch(row_ids, mini_batches), engine()) == expected


@pytest.mark.parametrize(
    ("row_ids", "mini_batches", "message"),
    [
        ([3], None, r"needs meta_info\['mini_batches'\]"),
        ([3], [], r"needs meta_info\['mini_batches'\]"),
        ([3, 5], [[3, 6]], "lists 2 rows, but 1 rows of the batch"),
        ([3, 3], [[3]], "lists 1 rows, but 2 rows of the batch"),
    ],
)
def test_a_batch_without_mini_batches_or_with_other_rows_is_an_error(row_ids, mini_batches, message):
    with pytest.raises(BatchError, match=message):
        memberships(batch(row_ids, mini_batches), OneRank())


class Learner(OneRank):
    """An engine that reports its inputs as metrics; the loss of a step is its number of rows."""

    on_device = nullcontext

    def update(self, rows, loss_function, *, with_entropy, temperature):
        metrics = {"actor/policy_loss": float(loss_function), "actor/rows": rows.batch["row_ids"].sum().item()}
        metrics |= {"rollout/log_prob_mismatch_max": len(rows) / 8}
        counts = {"num_tokens": 4, "num_computed_tokens": 4, "num_padding_tokens": 1}
        return UpdateResult(float(len(rows)), grad_norm=0.5, lr=0.1, metrics=metrics, **counts)


def test_run_updates_steps_once_per_mini_batch_and_averages_metrics():
    rows = batch([1, 2, 3], [[1, 3], [2]])
    take_compilations()  # of other tests
    done = run_updates(Learner(), rows, lambda step: step.num_tokens, "actor")
    assert done.meta_info["metrics"] == {
        "actor/loss": 1.5,
        "actor/grad_norm": 0.5,
        "actor/lr": 0.1,
        "actor/padding_computed": 0.25,
        "actor/shared_prompts": 0.25,
        "actor/policy_loss": (4 + 2) / 2,
        "actor/rows": (4 + 2) / 2,
        "rollout/log_prob_mismatch_max": 2 / 8,  # of the first step, before it learns
        "perf/actor_compilations": 0,
    }
    assert next(iter(done.meta_info["metrics"])) == "actor/loss"


def test_run_updates_reports_requested_figures_and_uses_rows_of():
    rows = batch([1, 2, 3], [[1, 3], [2]])
    numbers = []

    def rows_of(step):
        numbers.append(step.number)
        return rows

    done = run_updates(
        Learner(), rows, lambda step: step.num_sequences, "dpo", figures=FIGURES_WITHOUT_LOSS, rows_of=rows_of
    )
    assert numbers == [0, 1]
    metrics = done.meta_info["metrics"]
    assert list(metrics) == [
        *("dpo/grad_norm", "dpo/lr", "dpo/padding_computed"),
        *("actor/policy_loss", "actor/rows", "rollout/log_prob_mismatch_max", "perf/dpo_compilations"),
    ]
    assert metrics["actor/rows"] == 6


def test_run_updates_reports_the_graphs_compiled_since_the_last_update():
    class Compiling(Learner):
        def update(self, rows, loss_function, **options):
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
            return super().update(rows, loss_function, **options)

    torch._dynamo.reset()
    take_compilations()
    rows = batch([1, 2, 3], [[1, 3], [2]])
    counts = [
        run_updates(engine, rows, lambda step: step.num_tokens, "sft").meta_info["metrics"]["perf/sft_compilations"]
        for engine in (Compiling(), Learner())
    ]
    assert counts == [1, 0]
