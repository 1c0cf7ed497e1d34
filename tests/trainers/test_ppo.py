"""A step on a batch that is read in parts: which rows each training rank gets."""

from types import SimpleNamespace

import pytest
import torch

from hybridflow.config import load_config
from hybridflow.controller import Role
from hybridflow.controller.part_sizes import BALANCED_PART_SIZES, even_sizes
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.ppo import PPO
from hybridflow.trainers.sampling.sampled import Sampled

KEYS = (
    *("trainer.stream=true", "algorithm.advantage=gae", "algorithm.whiten_advantages=false", "model.path="),
    *("controller.backend=ray", "placement.pools={learn=[2]}", "data.train_batch_size=4", "rollout.group_size=2"),
)
LENGTHS = ([2, 3, 9, 8], [4, 7, 20, 30])
"""The response lengths of two parts, each of two groups."""


def part_of(lengths, first_group):
    mask = torch.arange(30) < torch.tensor(lengths)[:, None]
    return DataProtoFuture.of(
        DataProto.from_dict(
            {
                "prompt_mask": torch.ones(len(lengths), 1, dtype=torch.bool),
                "response_mask": mask,
                "group_ids": first_group + torch.arange(len(lengths)) // 2,
                "scores": torch.ones(len(lengths)),
            }
        )
    )


def step(*changes, shares=None):
    """Return the lengths of each call by rank, the metrics and the lengths returned."""
    calls = {}
    of_ranks = SimpleNamespace(of_ranks=shares and SimpleNamespace(values=shares))

    def method(name, columns):
        def remote(batch):
            rows = batch.get()
            lengths = rows.batch["response_mask"].sum(-1)
            sizes = batch.meta_info.get(BALANCED_PART_SIZES, {}).get("learner") or even_sizes(len(rows), 2)
            calls.setdefault(name, []).append([rank.tolist() for rank in lengths.split(sizes)])
            return DataProtoFuture.of(DataProto.from_dict(columns(rows), meta_info={"metrics": {}}))

        return SimpleNamespace(remote=remote)

    def values(rows):
        return {"values": torch.zeros(rows.batch["response_mask"].shape)}

    actor = SimpleNamespace(
        mesh=lambda: SimpleNamespace(axes={"data": 2}),
        name="learner",
        shares=of_ranks,
        replicas=lambda name: [],
        update_actor_in_parts=method("update_actor_in_parts", lambda _: {}),
        update_actor=method("update_actor", lambda _: {}),
    )
    critic = SimpleNamespace(
        name="critic",
        shares=of_ranks,
        compute_values=method("compute_values", values),
        update_critic=method("update_critic", lambda _: {}),
    )
    rewards = SimpleNamespace(name="reward", shares=SimpleNamespace(of_ranks=None))
    groups = {Role.ActorRollout: actor, Role.Critic: critic, Role.Reward: rewards}
    parts = [part_of(lengths, 2 * part) for part, lengths in enumerate(LENGTHS)]

    class Parts:
        def __init__(self):
            self.metrics = {}

        def __call__(self, next_prompts, step):
            return Sampled(len(parts), sum(map(len, parts)), iter(parts))

    config = load_config(None, [*KEYS, *changes])
    ppo = PPO(config, groups, sample=Parts(), sync_weights=dict, costs_of=list)  # pyright: ignore[reportArgumentType]
    batch = ppo.step(lambda: DataProto.from_dict({"unused": torch.zeros(1)}))
    return calls, ppo.metrics, batch.get(["response_mask"]).batch["response_mask"].sum(-1).tolist()


def sums(call):
    return sorted(sum(lengths) for lengths in call)


def test_the_rows_of_each_part_and_of_the_critic_are_balanced_over_the_ranks():
    calls, metrics, returned = step()
    assert [sums(call) for call in calls["update_actor_in_parts"]] == [[11, 11], [27, 34]]
    assert metrics["balance/imbalance_before"] == pytest.approx(((19 / 13 - 1) + (52 / 32.5 - 1)) / 2)
    assert metrics["balance/imbalance_after"] == pytest.approx((0 + (36 / 32.5 - 1)) / 2)
    assert returned == [*LENGTHS[0], *LENGTHS[1]]
    (update,) = calls["update_critic"]  # of the whole batch
    assert sums(update) == [41, 42]


def test_an_update_that_compares_the_parts_gets_the_whole_batch_balanced():
    calls, _, returned = step("algorithm.whiten_advantages=true")
    assert "update_actor_in_parts" not in calls
    assert calls["update_actor"] == calls["update_critic"]
    assert [sums(call) for call in calls["update_actor"]] == [[41, 42]]
    assert returned == [*LENGTHS[0], *LENGTHS[1]]


def test_without_balancing_rows_of_a_part_stay_in_order():
    calls, metrics, _ = step("controller.balance=none")
    assert calls["update_actor_in_parts"] == [[[2, 3], [9, 8]], [[4, 7], [20, 30]]]
    assert calls["update_critic"] == [[LENGTHS[0], LENGTHS[1]]]
    assert not any(name.startswith("balance/") for name in metrics)


def test_a_rank_with_a_smaller_share_gets_less_of_each_mini_batch():
    calls, metrics, returned = step(shares=[0.75, 0.25])
    (update,) = calls["update_critic"]
    assert [sum(lengths) for lengths in update] == pytest.approx([0.75 * 83, 0.25 * 83], abs=3)
    assert returned == [*LENGTHS[0], *LENGTHS[1]]
    assert metrics["balance/imbalance_after"] < 0.2
