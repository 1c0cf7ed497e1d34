"""How fast a step was: tokens per second, time per token, and the share of the machine's peak that learning used."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.models import DecoderShape, forward_flops, generation_flops, mfu
from hybridflow.observability import per_token_ms, tokens_per_s

WHOLE_SEQUENCE_STAGES = (
    *("old_log_probs", "ref_log_probs", "teacher", "values", "update_critic", "update_actor"),
    *("update_sft", "update_dpo", "compute_scores", "update_reward_model"),
)


@dataclass(frozen=True)
class Learner:
    """A role that learns: its passes over each batch, and what its FLOPs depend on (None: not known)."""

    epochs: int
    shape: DecoderShape | None


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompt and the response of each row, and its group where rows share a prompt."""

    prompt_lens: list[int]
    response_lens: list[int]
    group_ids: list[int] | None = None

    @property
    def sequence_lens(self) -> list[int]:
        """Tokens of each row."""
        return [prompt + response for prompt, response in zip(self.prompt_lens, self.response_lens, strict=True)]


class Speedometer:
    """Reads the speed of a step from its times and its lengths. `peak_flops`: of the device, per second; 0: unknown."""

    def __init__(self, learners: Mapping[str, Learner], peak_flops: float) -> None:
        self.learners, self.peak_flops = learners, peak_flops

    def read(self, metrics: Mapping[str, Any], lengths: Lengths) -> dict[str, float | None]:
        """Return `perf/...`, `timing_per_token_ms/...` and `mfu/...` from the step's `timing_s/...` in `metrics`."""
        num_tokens, num_response_tokens = sum(lengths.sequence_lens), sum(lengths.response_lens)
        handled = {"gen": num_response_tokens, **dict.fromkeys(WHOLE_SEQUENCE_STAGES, num_tokens)}
        speed: dict[str, float | None] = {
            "perf/num_tokens": num_tokens,
            "perf/tokens_per_s": num_tokens / metrics["timing_s/step"],
            **tokens_per_s(metrics, handled),
            **per_token_ms(metrics, handled),
        }
        for role, learner in self.learners.items():
            seconds = metrics.get(f"timing_s/update_{role}")  # absent where the role did not learn, as in a warm-up
            if seconds and learner.shape:
                forward = _flops_of_sequences(learner.shape, lengths)
                flops = learner.epochs * 3.0 * forward  # a backward pass is two forward passes
                speed[f"mfu/{role}"] = self._utilization(flops, seconds)
        actor = self.learners.get("actor")
        if actor and actor.shape and "timing_s/gen" in metrics:
            flops = _flops_of_sequences(actor.shape, lengths)
            speed["mfu/gen"] = self._utilization(flops, metrics["timing_s/gen"])
        return speed

    def _utilization(self, flops: float, seconds: float) -> float | None:
        """Return the share of the peak, None above 1: the peak was then measured under load or on another device."""
        share = mfu(flops, seconds, self.peak_flops)
        return share if share <= 1 else None


def _flops_of_sequences(shape: DecoderShape, lengths: Lengths) -> float:
    """Of one pass over the batch, where a prompt need be computed only once for its group."""
    if lengths.group_ids is None:
        return forward_flops(shape, lengths.sequence_lens)
    of_groups = dict(zip(lengths.group_ids, lengths.prompt_lens, strict=True))
    return generation_flops(shape, of_groups.values(), lengths.sequence_lens, lengths.prompt_lens)
