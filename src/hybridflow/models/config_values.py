"""What the values of config.json must be: checked before any library builds a model of them."""

import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers.configuration_utils import ALLOWED_LAYER_TYPES, remap_legacy_layer_types
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts of a layer."""

INTEGERS: tuple[tuple[str, int, int], ...] = (
    ("num_hidden_layers", 1, 10_000),
    ("vocab_size", 1, 10_000_000),
    ("max_position_embeddings|sliding_window", 1, 1_000_000_000),
    ("hidden_size|intermediate_size|num_attention_heads|num_key_value_heads", 1, 1_000_000),
    ("|".join(EXPERTS), 0, 10_000),
    ("qk_.*_head_dim", 0, 4_096),
    (".*head_dim", 1, 4_096),
    (".*_kernel_dim|.*_L_cache|full_attention_interval|decoder_sparse_step|mamba_chunk_size", 1, 1_000),
    ("linear_.*|mamba_(n|d)_.*", 1, 1_000_000),
    (".*_(rank|layers|experts)|first_k_dense_replace|moe_intermediate_size", 0, 1_000_000),
)
"""Patterns of keys, with the least and the largest integer; the first that fits counts."""
POSITIVE = (
    *("rope_theta", "factor", "partial_rotary_factor", "query_pre_attn_scalar", "logits_scaling", "logit_scale"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
NOT_NEGATIVE = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps")
MULTIPLES = (
    ("num_attention_heads", "num_key_value_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
    ("n_routed_experts", "n_group"),
)
"""Keys of which the first is a multiple of the second."""


def problems(config: Any) -> Iterator[str]:
    """Yield what is wrong with a config.json: the value, and what is valid. `config`: its contents."""
    if not isinstance(config, dict):
        yield f"expected a table, got {type(config).__name__}"
        return
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        yield f"architectures={names!r} is not a list of names"
    kind = config.get("model_type")
    if kind is not None and (not isinstance(kind, str) or kind not in CONFIG_MAPPING):
        yield f"model_type={kind!r} is unknown to the installed transformers, which has no code for this model"
    for part, prefix in ((config, ""), (config.get("text_config"), "text_config.")):
        if isinstance(part, dict):
            yield from (f"{prefix}{problem}" for problem in _problems_of_text(part))
    for key in ("dtype", "torch_dtype"):
        dtype = config.get(key)
        if dtype is not None and not _is_float_type(dtype):
            yield f"{key}={dtype!r:.100} is not a floating-point type, such as 'bfloat16'"


def _problems_of_text(config: dict[str, Any]) -> Iterator[str]:
    """Yield the problems of a language model, whose keys may have other names in its family."""
    kind = config.get("model_type")
    family = CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None
    names = {own: name for name, own in getattr(family, "attribute_map", {}).items()}
    integers, shown = dict[str, int](), dict[str, str]()
    for key, value in config.items():
        if type(value) is not int:
            continue
        name = names.get(key, key)
        integers[name], shown[name] = value, f"{key}={value}"
        ranges = ((least, most) for pattern, least, most in INTEGERS if re.fullmatch(pattern, name))
        least, most = next(ranges, (-sys.maxsize, sys.maxsize))
        is_unused = key == "sliding_window" and config.get("use_sliding_window") is False
        if not least <= value <= most and not is_unused:
            other = ", or null for a model without windows" if key == "sliding_window" else ""
            yield f"{key}={value} is out of range: expected {least} to {most:,}{other}"
    for name, value in _numbers(config, ""):
        leaf = name.rpartition(".")[2]
        if not abs(value) <= sys.float_info.max and not leaf.endswith("_limit"):
            yield f"{name}={str(value)[:40]} is not a finite number"
        elif leaf in POSITIVE and value <= 0:
            yield f"{name}={value} is out of range: expected a number above 0"
        elif leaf == "partial_rotary_factor" and value > 1:
            yield f"{name}={value} is out of range: expected a share of a head, above 0 and at most 1"
        elif leaf in NOT_NEGATIVE and value < 0:
            yield f"{name}={value} is out of range: expected 0 or more"
    for whole, part in MULTIPLES:
        if integers.get(whole, 0) > 0 < integers.get(part, 0) and integers[whole] % integers[part]:
            yield f"{shown[part]} is invalid: expected a divisor of {shown[whole]}"
    most = max((integers[key] for key in EXPERTS if key in integers), default=0)
    for key, limit, what in (
        ("num_experts_per_tok", most, f"the {most} experts of a layer"),
        ("topk_group", integers.get("n_group", 0), "n_group"),
    ):
        if limit > 0 and not 0 < integers.get(key, 1) <= limit:
            yield f"{shown[key]} is out of range: expected 1 to {what}"
    yield from _problems_of_layers(config.get("layer_types"), integers.get("num_hidden_layers"), config)
    pad, entries = config.get("pad_token_id"), integers.get("vocab_size")
    if isinstance(pad, int) and entries is not None and not -entries <= pad < entries:
        yield f"pad_token_id={pad} is not in the vocabulary of {entries}"


def _problems_of_layers(types: Any, count: int | None, config: dict[str, Any]) -> Iterator[str]:
    if not isinstance(types, list) or not all(isinstance(each, str) for each in types):
        return  # the library reports it
    if count is not None and len(types) != count:
        yield f"layer_types has {len(types)} names: expected one for each of num_hidden_layers={count}"
    if unknown := set(remap_legacy_layer_types(types) or ()) - set(ALLOWED_LAYER_TYPES):
        yield f"layer_types has {min(unknown)[:40]!r}: expected some of {', '.join(ALLOWED_LAYER_TYPES)}"
    if "sliding_attention" in types and config.get("sliding_window", 1) is None:
        yield "sliding_window=null is invalid: expected the window of its layers of sliding_attention"


def _is_float_type(name: Any) -> bool:
    found = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    return isinstance(found, torch.dtype) and found.is_floating_point


def _numbers(value: Any, name: str) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers of a table with their names, without those of other configurations in it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            if not str(key).endswith("_config"):
                yield from _numbers(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, name)
