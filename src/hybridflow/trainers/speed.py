"""How fast a step was: tokens per second, time per token, and the share of the machine's peak that learning used."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.observability import DecoderShape, mfu, per_token_ms, training_flops


def decoder_shape(model_path: str | Path) -> DecoderShape:
    """What FLOPs depend on, from a model directory's config.json."""
    config = json.loads((Path(model_path) / "config.json").read_text())
    heads = config["num_attention_heads"]
    return DecoderShape(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        vocab_size=config["vocab_size"],
        head_dim=config.get("head_dim") or 0,
    )


def speed_metrics(
    metrics: dict[str, Any],
    *,
    shape: DecoderShape,
    peak_flops: float,
    sequence_lens: Sequence[int],
    num_response_tokens: int,
    updates: dict[str, int],
) -> dict[str, float]:
    """`perf/...`, `timing_per_token_ms/...` and `mfu/<role>` of a step whose `timing_s/...` are in `metrics`.

    `updates`: passes over the batch of each role that learned, e.g. {"actor": 1, "critic": 2}.
    """
    num_tokens = sum(sequence_lens)
    handled = dict.fromkeys(("old_log_probs", "ref_log_probs", "values", "update_actor", "update_critic"), num_tokens)
    speed = per_token_ms(metrics, {"gen": num_response_tokens, **handled})
    speed["perf/tokens_per_s"] = num_tokens / metrics["timing_s/step"]
    if "timing_s/gen" in metrics:
        speed["perf/gen_tokens_per_s"] = num_response_tokens / metrics["timing_s/gen"]
    for role, epochs in updates.items():
        seconds = metrics.get(f"timing_s/update_{role}")
        if seconds:
            speed[f"mfu/{role}"] = mfu(epochs * training_flops(shape, sequence_lens), seconds, peak_flops)
    return speed
