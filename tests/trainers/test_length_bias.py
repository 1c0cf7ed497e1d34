"""The bias of batches of the groups that finish next, by hand."""

import pytest
import torch

from hybridflow.config import load_config
from hybridflow.protocol import DataProto
from hybridflow.trainers.length_bias import LengthBias

READY = (
    *("rollout.order=ready", "rollout.on_new_weights=retract", "trainer.deterministic=false", "trainer.lag=1"),
    *("algorithm.rollout_weights=token", "controller.backend=ray", "placement.roles.rollout=generate"),
    *("placement.pools={learn=[1],generate=[1]}", "data.train_batch_size=2", "rollout.group_size=2"),
)


def trained(*groups):
    """Return a batch of groups, each as its id and the lengths of its two responses."""
    ids = torch.tensor([group for group, _ in groups]).repeat_interleave(2)
    lengths = torch.tensor([length for _, of_group in groups for length in of_group])
    return DataProto.from_dict({"group_ids": ids, "response_mask": torch.arange(20) < lengths[:, None]})


# Batches 0, 1 and 2 begin with the groups 0 and 1, 2 and 3, 4 and 5; group 1 is long.
STEPS = (
    trained((0, (2, 4)), (2, (3, 3))),
    trained((3, (5, 5)), (4, (1, 3))),
    trained((5, (6, 6)), (1, (20, 12))),
)


@pytest.fixture
def bias():
    """Return a function that builds the bias of a run with batches of two prompts."""
    return lambda *changes: LengthBias(load_config(None, [*READY, *changes]))


def test_the_first_batches_trained_on_are_compared_with_the_first_begun(bias):
    of_run = bias()
    assert of_run.note(STEPS[0], 0) == {"ready/late_share": 0.0}
    assert of_run.note(STEPS[1], 1) == {"ready/late_share": 0.0}
    assert of_run.note(STEPS[2], 2) == {
        "ready/late_share": 0.5,
        "ready/compared_batches": 1,
        "ready/length_trained": 12 / 4,
        "ready/length_begun": 38 / 4,
        "ready/tokens_behind": 26,
    }
    assert of_run.note(trained((6, (1, 1)), (7, (1, 1))), 3) == {
        "ready/late_share": 0.0,
        "ready/compared_batches": 2,
        "ready/length_trained": 26 / 8,
        "ready/length_begun": 54 / 8,
        "ready/tokens_behind": 28,
    }


def test_batches_trained_on_as_they_begin_have_no_bias(bias):
    of_run = bias()
    for step, lengths in enumerate(((3, 9), (20, 1))):
        metrics = of_run.note(trained((2 * step, lengths), (2 * step + 1, (4, 4))), step)
        assert metrics["ready/late_share"] == metrics["ready/tokens_behind"] == 0
        assert metrics["ready/length_trained"] == metrics["ready/length_begun"]
        assert metrics["ready/compared_batches"] == step + 1


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_a_restored_bias_continues_as_the_saved_one(bias, stop):
    whole, resumed = bias(), bias()
    for step in range(stop):
        whole.note(STEPS[step], step)
    resumed.load_state_dict(whole.state_dict())
    for step in range(stop, 3):
        assert resumed.note(STEPS[step], step) == whole.note(STEPS[step], step)


def test_other_runs_have_no_bias_and_no_state(bias):
    of_run = bias("rollout.order=sampled")
    assert of_run.note(STEPS[0], 0) == of_run.state_dict() == {}
