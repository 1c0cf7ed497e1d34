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
SUMS = ("entropy_sum", "mismatch_sum", "mismatch_kl_sum", "mismatch_share_sum", "mismatch_max", "num_tokens")
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
    calls, coefs = {}, []
    of_ranks = SimpleNamespace(of_ranks=shares and SimpleNamespace(values=shares))

    def method(name, columns):
        def remote(batch):
            rows = batch.get()
            lengths = rows.batch["response_mask"].sum(-1)
            sizes = batch.meta_info.get(BALANCED_PART_SIZES, {}).get("learner") or even_sizes(len(rows), 2)
            calls.setdefault(name, []).append([rank.tolist() for rank in lengths.split(sizes)])
            coefs.append(batch.meta_info.get("kl_coef"))
            return DataProtoFuture.of(DataProto.from_dict(columns(rows), meta_info={"metrics": {}}))

        return SimpleNamespace(remote=remote)

    def filled(name, value=0.0):
        return lambda rows: {name: torch.full(rows.batch["response_mask"].shape, value)}

    actor = SimpleNamespace(
        mesh=lambda: SimpleNamespace(axes={"data": 2}),
        name="learner",
        shares=of_ranks,
        replicas=lambda name: [],
        update_actor_in_parts=method("update_actor_in_parts", lambda _: {}),
        update_actor=method("update_actor", lambda _: {}),
        compute_log_probs=method("compute_log_probs", filled("old_log_probs")),
        sum_log_prob_metrics=method("sum_log_prob_metrics", lambda rows: dict.fromkeys(SUMS, torch.ones(len(rows)))),
    )
    critic = SimpleNamespace(
        name="critic",
        shares=of_ranks,
        compute_values=method("compute_values", filled("values")),
        update_critic=method("update_critic", lambda _: {}),
    )
    rewards = SimpleNamespace(name="reward", shares=SimpleNamespace(of_ranks=None))
    reference = SimpleNamespace(
        name="reference",
        shares=of_ranks,
        compute_ref_log_probs=method("compute_ref_log_probs", filled("ref_log_probs", -1.0)),
    )
    groups = {Role.ActorRollout: actor, Role.Critic: critic, Role.Reward: rewards}
    parts = [part_of(lengths, 2 * part) for part, lengths in enumerate(LENGTHS)]

    class Parts:
        def __init__(self):
            self.metrics = {}

        def __call__(self, next_prompts, step):
            return Sampled(len(parts), sum(map(len, parts)), iter(parts))

    config = load_config(None, [*KEYS, *changes])
    if config.uses_reference:
        groups[Role.RefPolicy] = reference
    ppo = PPO(config, groups, sample=Parts(), sync_weights=dict, costs_of=list)  # pyright: ignore[reportArgumentType]
    batch = ppo.step(lambda: DataProto.from_dict({"unused": torch.zeros(1)}))
    metrics = ppo.metrics | {"coefs": {coef for coef in coefs if coef is not None}}
    return calls, metrics, batch.get(["response_mask"]).batch["response_mask"].sum(-1).tolist()


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


@pytest.mark.parametrize("stream", ["true", "false"])
def test_the_loss_of_a_step_has_the_kl_coefficient_of_its_rewards(stream):
    kl = ("kl_in_reward=true", "kl_in_loss=true", "kl_controller=adaptive", "kl_coef=0.1", "kl_horizon=10")
    _, metrics, _ = step(f"trainer.stream={stream}", *(f"algorithm.{key}" for key in kl))
    assert metrics["coefs"] == {0.1} == {metrics["critic/kl_coeff"]}
