"""Runs whose ranks have unequal shares of the rows, in generation and in training, against equal parts."""

import pytest

from fixtures.tiny_run import metrics_differ
from hybridflow.config import load_config
from hybridflow.controller.part_sizes import MeasuredParts
from hybridflow.runtime.observe import read_jsonl
from hybridflow.trainers import build_sft_trainer, build_trainer

pytestmark = [pytest.mark.exhaustive, pytest.mark.ray, pytest.mark.own_run("ray_two: with unequal parts")]

EXACT = ("model.dtype=float64", "data.val_files=[]", "trainer.total_steps=2", "trainer.val_every=0")
ON_RAY = (
    *("controller.backend=ray", "controller.cpus_per_worker=0.5"),
    *("controller.num_workers=2", "controller.threads=1"),
)
MEASURED = ("controller.parts=measured", "trainer.deterministic=false")
STREAM = ("trainer.stream=true", "actor.epochs=1", "actor.mini_batch_size=0", "algorithm.whiten_advantages=false")
APART = ("controller.num_workers=1", "placement.pools={main=[2],second=[2]}", "placement.roles.critic=second")


def shares_of(group, values):
    """Give the ranks of a group these shares, and keep them."""
    group.shares.of_ranks.values = values
    if "generate_sequences" in group.methods:
        generation = group.shares._measured["generate_sequences"] = MeasuredParts(2)
        generation.shares.values = values


def trained(tiny, task, run_dir, *changes):
    ppo = [*tiny.PPO, "critic.warmup_steps=0", *EXACT, *changes, f"trainer.run_dir={run_dir}"]
    with build_trainer(load_config(task / "rl.toml", ppo)) as trainer:
        if changes[: len(ON_RAY)] == ON_RAY:
            trainer.rank_speeds = None
            shares_of(trainer.actor, [0.8, 0.2])
            if trainer.critic.shares.of_ranks is not trainer.actor.shares.of_ranks:
                shares_of(trainer.critic, [0.3, 0.7])
        trainer.fit()
        return read_jsonl(run_dir / "metrics.jsonl"), trainer.actor.shares.least()


NAMES = (
    *("actor/loss", "actor/grad_norm", "actor/entropy"),
    *("critic/loss", "critic/grad_norm", "critic/kl", "critic/score"),
)


@pytest.mark.parametrize("changes", [(), APART, ("controller.balance=none",), STREAM], ids=str)
def test_ppo_with_unequal_shares_has_the_loss_and_gradients_of_one_process(tiny, task, tmp_path, ray_backend, changes):
    streamed = (*STREAM, "controller.backend=ray") if changes == STREAM else ()
    trained(tiny, task, tmp_path / "equal", "controller.threads=1", *streamed)
    rows, sizes = trained(tiny, task, tmp_path / "run", *ON_RAY, *MEASURED, *changes)
    assert metrics_differ(tmp_path / "equal", tmp_path / "run", *NAMES) == []
    if changes != STREAM:
        assert sizes["update_actor"] == sizes["generate_sequences"] == pytest.approx(0.4)
        assert rows[-1]["parts/gen"] == rows[-1]["parts/update_actor"] == pytest.approx(0.4)
        assert rows[-1]["parts/update_critic"] == pytest.approx(0.6 if changes == APART else 0.4)


def test_supervised_training_with_unequal_shares_equals_equal_ones(task, tmp_path, ray_backend):
    for name, changes in (("one", ()), ("uneven", (*ON_RAY, *MEASURED))):
        keys = [*EXACT, "controller.threads=1", *changes, f"trainer.run_dir={tmp_path}/{name}"]
        with build_sft_trainer(load_config(task / "sft.toml", keys)) as trainer:
            if changes:
                trainer.rank_speeds = None
                (group,) = trainer.groups.values()
                group.shares.of_ranks.values = [0.8, 0.2]
            trainer.fit()
    assert metrics_differ(tmp_path / "one", tmp_path / "uneven", "sft/loss", "sft/grad_norm") == []
    assert read_jsonl(tmp_path / "uneven" / "metrics.jsonl")[-1]["parts/update_sft"] == pytest.approx(0.4)
