"""Speed of a step: tokens per second, time per token, and model FLOPs utilization (MFU)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.config import Config
from hybridflow.controller import Role, WorkerGroup
from hybridflow.models.model_sizes import DecoderShape, forward_flops, generation_flops, mfu
from hybridflow.runtime.observe import per_token_ms, tokens_per_s
from hybridflow.trainers.build.groups import processes_of, traits_of
from hybridflow.trainers.read_columns import Lengths

ACTORS = (Role.ActorRollout, Role.Actor)
"""Roles of the group that trains the policy, or the model of an offline run."""

WHOLE_SEQUENCE_STAGES = (
    *("old_log_probs", "ref_log_probs", "teacher", "values", "update_critic", "update_actor"),
    *("update_sft", "update_dpo", "compute_scores", "update_reward_model"),
)


@dataclass(frozen=True)
class LearnerWork:
    """A trained role: its epochs over each batch, the shape for its FLOPs (None: unknown), and the peak of its ranks.

    `peak_flops` is in FLOP/s; 0: unknown.
    """

    epochs: int
    shape: DecoderShape | None
    peak_flops: float = 0.0


@dataclass(frozen=True)
class Speedometer:
    """Speed of a step from its times and lengths. `generation_peak_flops`: peak of the generating ranks, in FLOP/s."""

    learners: Mapping[str, LearnerWork]
    generation_peak_flops: float = 0.0
    num_devices: float = 1.0

    def read(self, metrics: Mapping[str, Any], lengths: Lengths) -> dict[str, float | None]:
        """Return `perf/...`, `timing_per_token_ms/...` and `mfu/...` from the step's `timing_s/...` in `metrics`."""
        num_tokens, num_response_tokens = sum(lengths.sequence_lens), sum(lengths.response_lens)
        handled = {"gen": num_response_tokens, **dict.fromkeys(WHOLE_SEQUENCE_STAGES, num_tokens)}
        speed: dict[str, float | None] = {
            "perf/num_tokens": num_tokens,
            "perf/tokens_per_s": num_tokens / metrics["timing_s/step"],
            "perf/tokens_per_s_per_device": num_tokens / metrics["timing_s/step"] / self.num_devices,
            **tokens_per_s(metrics, handled),
            **per_token_ms(metrics, handled),
        }
        for role, learner in self.learners.items():
            seconds = metrics.get(f"timing_s/update_{role}")  # absent if the role was not trained, as in a warm-up
            if seconds and learner.shape:
                forward = _flops_of_sequences(learner.shape, lengths)
                flops = learner.epochs * 3.0 * forward  # a backward pass is two forward passes
                speed[f"mfu/{role}"] = _utilization(flops, seconds, learner.peak_flops)
        actor = self.learners.get("actor")
        if actor and actor.shape and "timing_s/gen" in metrics:
            flops = _flops_of_sequences(actor.shape, lengths)
            speed["mfu/gen"] = _utilization(flops, metrics["timing_s/gen"], self.generation_peak_flops)
        return speed


def measured_speedometer(
    config: Config, learners: Mapping[str, LearnerWork], groups: Mapping[Role, WorkerGroup]
) -> Speedometer:
    """Return a speedometer, after measuring the peak of the ranks that train each role or generate."""

    def peak_of(*roles: Role) -> float:
        group = next((groups[role] for role in roles if role in groups), None)
        return sum(group.measure_peak(config.model.dtype)) if group else 0.0

    measured = {
        name: replace(learner, peak_flops=peak_of(*((Role.Critic,) if name == "critic" else ACTORS)))
        for name, learner in learners.items()
    }
    return Speedometer(measured, peak_of(Role.Rollout, Role.ActorRollout), num_devices(config, groups))


def num_devices(config: Config, roles: Iterable[Role]) -> float:
    """Return the number of devices that the roles use: the ranks of the pools with a model, each counted once.

    On Ray a rank uses the share `controller.gpus_per_worker` of a device.
    """
    with_model = [role for role in roles if traits_of(role).model(config) != "none"]
    num_ranks = sum(dict(processes_of(config, with_model).values()).values())
    return num_ranks * (config.controller.gpus_per_worker if config.controller.backend == "ray" else 1.0)


def _utilization(flops: float, seconds: float, peak_flops: float) -> float | None:
    """Return the share of the peak, None above 1: the peak was then measured under load."""
    share = mfu(flops, seconds, peak_flops)
    return share if share <= 1 else None


def _flops_of_sequences(shape: DecoderShape, lengths: Lengths) -> float:
    """Return the FLOPs of one forward pass over the batch, with each prompt computed once for its group."""
    if lengths.group_ids is None:
        return forward_flops(shape, lengths.sequence_lens)
    of_groups = dict(zip(lengths.group_ids, lengths.prompt_lens, strict=True))
    return generation_flops(shape, of_groups.values(), lengths.sequence_lens, lengths.prompt_lens)
