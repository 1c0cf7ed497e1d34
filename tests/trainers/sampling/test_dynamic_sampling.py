"""Rounds of generation until as many groups as prompts have differing scores."""

from types import SimpleNamespace

import pytest
import torch

from hybridflow.config import load_config
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.sampling.ahead import Ahead
from hybridflow.trainers.sampling.dynamic_sampling import dynamic_sampling
from hybridflow.trainers.sampling.generation import Begun
from hybridflow.trainers.sampling.sampled import Sampled
from hybridflow.trainers.sampling.sampling import Sampling

FILTERED = (
    "algorithm.filter_groups=true",
    "rollout.group_size=2",
    "data.train_batch_size=2",
    "actor.mini_batch_size=2",
)


def rows(scores):
    """Return the rows of groups, by their ids."""
    ids = torch.tensor([group for group in scores for _ in range(2)])
    values = torch.tensor([score for of_group in scores.values() for score in of_group])
    return DataProtoFuture.of(DataProto.from_dict({"group_ids": ids, "scores": values}))


def sampled(*parts):
    return Sampled(len(parts), sum(map(len, parts)), iter(parts))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=["in order", "as groups finish"])
def test_the_first_groups_of_a_round_are_kept_in_any_order_of_its_parts(order):
    scores = {0: (0.0, 1.0), 1: (0.0, 0.0), 2: (2.0, 3.0)}
    later = {3: (4.0, 5.0), 4: (6.0, 7.0), 5: (8.0, 9.0)}
    rounds = [sampled(*(rows({group: scores[group]}) for group in order)), sampled(rows(later))]
    config = load_config(None, [*FILTERED])
    begun = Begun(0, lambda: ())
    sampling = SimpleNamespace(config=config, begin=lambda *_, **__: begun, score=lambda _: rounds.pop(0))
    batch, metrics = dynamic_sampling(sampling, begun, lambda: DataProto())
    assert batch.get(["scores"]).batch["scores"].tolist() == [0, 1, 2, 3, 4, 5]
    assert metrics == {"sampling/rounds": 2, "sampling/differing_groups": 5 / 6, "sampling/filled_groups": 0}


def test_with_a_lag_a_round_that_is_missing_follows_the_batches_that_have_begun():
    """Prompt p has scores (p, p) if it is divisible by 3, else (p, p + 0.5)."""
    begun = []

    def generate(prompts):
        begun.append(prompts.batch["prompts"][:, 0].tolist())
        return DataProtoFuture.of(DataProto.from_dict({"responses": prompts.batch["prompts"].repeat_interleave(2, 0)}))

    def score(batch):
        values = batch.get(["responses"]).batch["responses"][:, 0].double()
        values[1::2] += 0.5 * (values[1::2] % 3 > 0)
        return DataProtoFuture.of(DataProto.from_dict({"scores": values}))

    rollout = SimpleNamespace(generate_sequences=SimpleNamespace(remote=generate))
    rewards = SimpleNamespace(score=SimpleNamespace(remote=score))
    config = load_config(None, [*FILTERED, "trainer.lag=1", "algorithm.rollout_weights=token"])
    ahead = Ahead(Sampling(config, rollout, rewards), 1, total_steps=3)  # pyright: ignore[reportArgumentType]
    numbers = iter(range(3, 99))

    def next_prompts():
        return DataProto.from_dict({"prompts": torch.tensor([[next(numbers)], [next(numbers)]])})

    steps = []
    for step in range(3):
        (batch,) = ahead(next_prompts, step)
        steps.append((batch.get(["scores"]).batch["scores"].tolist(), ahead.metrics["sampling/rounds"]))
    assert steps == [
        ([4, 4.5, 7, 7.5], 2),  # 3 has equal scores; 5 and 6 have begun before 7
        ([5, 5.5, 11, 11.5], 2),
        ([10, 10.5, 13, 13.5], 2),
    ]
    assert begun == [[3, 4], [5, 6], [7, 8], [9, 10], [11, 12], [13, 14]]
