"""The estimated seconds of a training step on GPUs of the H100 class, from FLOPs and bytes under stated assumptions.

Not a measurement: the assumed rates are those of one GPU with smaller models (docs/benchmarks.md), or of data sheets.
"""

from dataclasses import dataclass
from typing import Literal

from hybridflow.models.model_sizes import ModelSizes, forward_flops

UPDATE_FLOPS = 450e12
"""FLOP/s of a GPU in forward and backward passes: 59% of a measured product, as an update of 1.5B on one H100."""

READ_BANDWIDTH = 2.9e12
"""Bytes per second of a copy, measured on one H100."""

READ_SHARES = {"embedded": 0.15, "vllm": 0.5}
"""Share of it that a decoding step reaches: measured with 0.5B, where it is smallest; assumed for vLLM."""

LINK_BANDWIDTH = 50e9
"""Bytes per second between two GPUs: 400 Gbit/s of InfiniBand, assumed also within a node."""

WIDTH = 2
"""Bytes of a bfloat16 number."""


@dataclass(frozen=True)
class StepSizes:
    """A step: `prompts` with `group_size` responses each, all of the longest length.

    `trainers`: ranks that train, each `micro_batch` tokens at a time. `engines` of `engine_ranks` ranks each run at
    most `running` sequences at a time. `forwards`: passes before the update, for log-probs.
    """

    prompts: int
    group_size: int
    prompt_len: int
    response_len: int
    trainers: int
    engines: int
    micro_batch: int
    backend: Literal["embedded", "vllm"] = "embedded"
    engine_ranks: int = 1
    running: int = 1024
    forwards: int = 0
    epochs: int = 1
    recomputes: bool = False

    @property
    def responses(self) -> int:
        """The number of responses of a step."""
        return self.prompts * self.group_size


@dataclass(frozen=True)
class StepSeconds:
    """The estimated seconds of the phases of a step."""

    generation: float
    log_probs: float
    update: float
    sync: float


def step_seconds(model: ModelSizes, step: StepSizes) -> StepSeconds:
    """Return the estimate: phases one after another; collectives overlap with computing, so that the longer counts."""
    length, weights = step.prompt_len + step.response_len, WIDTH * model.parameters
    of_engine = -(-step.responses // step.engines)
    cached = 2 * WIDTH * model.kv_size * model.shape.attended(step.prompt_len + step.response_len / 2)
    read = weights + min(of_engine, step.running) * (cached + model.state_bytes)
    rounds = -(-of_engine // step.running)
    rate = step.engine_ranks * READ_BANDWIDTH * READ_SHARES[step.backend]
    prompts = forward_flops(model.shape, [step.prompt_len]) * step.prompts / (step.engines * step.engine_ranks)
    generation = rounds * step.response_len * read / rate + prompts / UPDATE_FLOPS

    forward = forward_flops(model.shape, [length]) * step.responses / step.trainers / UPDATE_FLOPS
    micro_batches = -(-step.responses * length // (step.trainers * step.micro_batch))
    gathers = micro_batches * weights / LINK_BANDWIDTH if step.trainers > 1 else 0.0  # of the weights, or of gradients
    passes = 4 if step.recomputes else 3  # a backward pass is two forward passes
    is_copied = step.trainers > 1 or step.engines * step.engine_ranks > 1
    return StepSeconds(
        generation=generation,
        log_probs=step.forwards * max(forward, gathers),
        update=step.epochs * max(passes * forward, 3 * gathers),
        sync=weights / step.engine_ranks / LINK_BANDWIDTH if is_copied else 0.0,
    )
