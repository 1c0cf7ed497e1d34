import json
from dataclasses import replace

import pytest

from hybridflow.config import Config, load_config
from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Role, Worker, WorkerGroup, register
from hybridflow.models.model_sizes import DecoderShape, decoder_shape, forward_flops, training_flops
from hybridflow.trainers.read_columns import Lengths
from hybridflow.trainers.run.speed import LearnerWork, Speedometer, measured_speedometer, num_devices

SHAPE = DecoderShape(
    num_layers=2, hidden_size=8, intermediate_size=16, num_heads=2, num_key_value_heads=1, vocab_size=10, head_dim=6
)
LENGTHS = Lengths(prompt_lens=[2, 1], response_lens=[2, 1], group_ids=[0, 1])


def test_speed_is_computed_from_seconds_and_tokens():
    times = {"timing_s/step": 2.0, "timing_s/gen": 0.5, "timing_s/update_actor": 0.25}
    assert Speedometer({"actor": LearnerWork(3, SHAPE, 1e6), "critic": LearnerWork(1, SHAPE)}, 2e6, 4).read(
        times, LENGTHS
    ) == pytest.approx(
        {
            "perf/num_tokens": 6,
            "perf/tokens_per_s": 3.0,
            "perf/tokens_per_s_per_device": 0.75,
            "perf/gen_tokens_per_s": 6.0,
            "perf/update_actor_tokens_per_s": 24.0,
            "timing_per_token_ms/gen": 500 / 3,
            "timing_per_token_ms/update_actor": 250 / 6,
            "mfu/actor": 3 * training_flops(SHAPE, [4, 2]) / (0.25 * 1e6),
            # The prompt of each group (2 tokens and 1), then tokens 3 and 4 of the first row, 2 of the second.
            "mfu/gen": forward_flops(SHAPE, [4, 2]) / (0.5 * 2e6),
        }
    )


def test_utilization_of_an_unknown_shape_or_above_the_peak_is_unknown():
    times = {"timing_s/step": 2.0, "timing_s/gen": 0.5, "timing_s/update_actor": 0.25}
    assert "mfu/actor" not in Speedometer({"actor": LearnerWork(1, None, 1e6)}).read(times, LENGTHS)
    of_generation = forward_flops(SHAPE, [4, 2]) / 0.5
    speed = Speedometer({"actor": LearnerWork(3, SHAPE, of_generation)}, of_generation).read(times, LENGTHS)
    assert (speed["mfu/gen"], speed["mfu/actor"]) == (1.0, None)


ROLES = [Role.ActorRollout, Role.RefPolicy, Role.Critic, Role.Rollout, Role.Reward]


def pools(reward, sizes="learn=[4,4],generate=[2],score=[3]"):
    """Return the configuration of a run that generates, and scores, in other pools than it trains."""
    roles = ("placement.roles.rollout=generate", f"placement.roles.reward={reward}")
    return ["controller.backend=ray", f"placement.pools={{{sizes}}}", *roles]


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        (["controller.num_workers=2"], 2),  # all roles share the ranks
        (pools("score"), 8 + 2),  # a reward function needs no device
        ([*pools("score"), "reward.model_path=rm"], 8 + 2 + 3),
        (pools("generate", "learn=[4,4],generate=[2]"), 8 + 2),
        ([*pools("learn", "learn=[1],generate=[1]"), "controller.gpus_per_worker=0.5"], 1),  # they share a GPU
    ],
)
def test_a_device_counts_once_for_the_roles_that_share_it(changes, devices):
    assert num_devices(load_config(None, changes), ROLES) == devices


def test_pools_of_other_roles_are_not_counted():
    assert num_devices(load_config(None, pools("score")), [Role.ActorRollout, Role.Reward]) == 8


def test_the_shape_is_read_from_the_models_configuration(tmp_path):
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16, "vocab_size": 10, "head_dim": 6}
    config = {"model_type": "qwen3", **sizes, "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert decoder_shape(tmp_path) == SHAPE
    assert decoder_shape(tmp_path, has_lm_head=False) == replace(SHAPE, vocab_size=1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}))
    assert decoder_shape(tmp_path).num_matrix_weights == (4 + 8) * 8 * 8 + 8 * 50257  # MLP without a gate


class MeasuredRank(Worker):
    """A rank on a device with a known peak."""

    def __init__(self, peaks):
        self.peaks = peaks

    @register(Dispatch.ONE_TO_ALL)
    def measure_peak(self, dtype):
        return self.peaks[dtype][self.rank]


def ranks_with_peaks(*peaks):
    classes = ClassWithInitArgs(MeasuredRank, {"bfloat16": peaks, "float32": [1.0] * len(peaks)})
    return WorkerGroup(ResourcePool([len(peaks)]), classes)


@pytest.mark.parametrize("generating", [Role.Rollout, Role.ActorRollout])
def test_the_peak_of_a_role_is_the_sum_over_its_unequal_ranks(generating):
    actor = Role.Actor if generating is Role.Rollout else Role.ActorRollout
    groups = {actor: ranks_with_peaks(3e12, 1e12, 5e12), Role.Critic: ranks_with_peaks(2e12, 4e12)}
    if generating is Role.Rollout:
        groups[generating] = ranks_with_peaks(7e12, 2e12)
    learners = {"actor": LearnerWork(1, None), "critic": LearnerWork(2, None)}
    speedometer = measured_speedometer(Config(model={"dtype": "bfloat16"}), learners, groups)
    peaks = {name: learner.peak_flops for name, learner in speedometer.learners.items()}
    assert peaks == {"actor": 9e12, "critic": 6e12}
    assert speedometer.generation_peak_flops == 9e12


def test_a_prompt_is_computed_once_for_its_group():
    lengths = Lengths(prompt_lens=[3, 3, 3], response_lens=[2, 2, 2], group_ids=[0, 0, 0])
    times = {"timing_s/step": 1.0, "timing_s/gen": 1.0, "timing_s/update_actor": 1.0}
    speed = Speedometer({"actor": LearnerWork(1, SHAPE, 1e6)}, 1e6).read(times, lengths)
    flops = forward_flops(SHAPE, [5]) * 3 - forward_flops(SHAPE, [3]) * 2
    assert speed["mfu/gen"] == pytest.approx(flops / 1e6)
    assert speed["mfu/actor"] == pytest.approx(3 * flops / 1e6)


def test_sft_has_a_speed_without_generation():
    speed = Speedometer({"sft": LearnerWork(1, SHAPE, 1e6)}).read(
        {"timing_s/step": 2.0, "timing_s/update_sft": 1.0}, Lengths([2, 1], [2, 1])
    )
    assert speed["perf/update_sft_tokens_per_s"] == 6.0
    assert speed["mfu/sft"] == pytest.approx(training_flops(SHAPE, [4, 2]) / 1e6)
    assert "mfu/gen" not in speed
