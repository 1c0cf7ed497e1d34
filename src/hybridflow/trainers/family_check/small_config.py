"""Small configurations with the layers of a model: a few of each kind, and widths that keep the shape of its heads.

A kind of layer is what distinguishes layers of one model when it is built: modules, shapes and settings. So no family
is named here.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from hybridflow.models.config_values import EXPERTS
from hybridflow.models.loading import parameters_on_meta, quiet_transformers
from hybridflow.models.model_files import LOADING_ERRORS
from hybridflow.models.parameters import layers_of

VOCABULARY = 128
WINDOW = 8
"""Tokens that a sliding window or a chunk has; rows of the check are several times as long."""
SOFTCAP = 4.0
POSITIONS = 128
KV_HEADS = 2
"""Key-value heads, each with as many query heads as in the model."""
EXPERTS_OF_COPY = 8
WIDTH_OF_HEAD = 16
"""Hidden size for each query head, where a family lets heads be wider than that."""

CAPS = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    **dict.fromkeys(("topk_group", "num_nextn_predict_layers"), 1),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads", "mamba_num_heads", "n_groups", "index_n_heads"), 2),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "local_attention", "index_topk", "floor_scale"), WINDOW),
    **dict.fromkeys(("keep_window_size", "mamba_chunk_size", "chunk_size"), WINDOW),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "hidden_size_per_layer_input"), 16),
    "attn_logit_softcapping": SOFTCAP,
}
"""The largest value of a key in a small configuration."""
ENDS = {"intermediate_size": 64, "ffn_dim": 64, "ffn_hidden_size": 64, "intermediate_size_mlp": 64, "lora_rank": 16}
"""The largest value of keys with these endings."""
EVERY = {"vocab_size": VOCABULARY, "intermediate_size": 64}
"""Values that all small configurations have, also those of smaller models, so that they share a result."""
LEFT_OUT = (
    *("architectures", "_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "id2label"),
    *("label2id", "initializer_range", "chunk_size_feed_forward", "output_attentions", "output_hidden_states"),
)
"""Keys that do not change log-probs."""
NOT_BY_LAYER = re.compile("limit|section|token_id|range")
"""Names of lists that do not have an entry for each layer, also if they are as long."""
COUNTS = re.compile("idx|index|layer")
"""Names of numbers that tell the place of a layer, or the number of layers."""
MOST_KINDS = 8
MOST_BEFORE = 12
"""Layers of a copy that has all layers up to the last one of a new kind, if others cannot be left out."""


@dataclass(frozen=True)
class Kind:
    """A kind of layer: its name, the first layer of that kind, and by what it is recognized."""

    name: str
    first: int
    signature: str


class SmallConfig:
    """The configuration of a model with small widths, which can be given any of its layers."""

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        keeps_widths: bool = False,
        widens: bool = False,
        kv_heads: int = KV_HEADS,
        experts: int = EXPERTS_OF_COPY,
    ) -> None:
        """Reduce a configuration; `widens`: the hidden size is that of all heads, for families that require it."""
        self._class, self._changes = type(config), config.to_dict()
        text = config.get_text_config()
        of_text = next((key for key, value in vars(config).items() if value is text), None)
        self._text = self._changes if of_text is None else self._changes[of_text]
        for part in _parts(self._changes):
            for key in LEFT_OUT:
                part.pop(key, None)
            _bound(part, experts)
        self._layers_key = text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        self.num_layers: int = getattr(text, "num_hidden_layers", 0)
        if not keeps_widths:
            _narrow(self._text, text, kv_heads, widens=widens)

    def facts(self) -> dict[str, Any]:
        """Return the configuration with all its layers, as plain values."""
        return self._changes

    def with_layers(self, layers: Sequence[int]) -> PretrainedConfig:
        """Return the configuration of a model that has only these layers, as far as keys tell them apart."""
        text = {key: self._of_layers(value, layers, key) for key, value in self._text.items()}
        text[self._layers_key] = len(layers)
        changes = {key: text if value is self._text else value for key, value in self._changes.items()}
        with quiet_transformers():
            return self._class.from_dict(text if self._text is self._changes else changes)

    def _of_layers(self, value: Any, layers: Sequence[int], key: str) -> Any:
        """Return the value of a key for these layers: entries by layer, numbers of layers, or a count of first ones."""
        count = self.num_layers
        if isinstance(value, list) and len(value) == count and not NOT_BY_LAYER.search(key):
            return [value[layer] for layer in layers]
        if isinstance(value, list) and "layer" in key and all(type(x) is int and 0 <= x < count for x in value):
            return [place for place, layer in enumerate(layers) if layer in value]
        if type(value) is int and key in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
            return sum(layer < value for layer in layers)
        if type(value) is int and key in ("max_window_layers", "moe_layer_end_index"):
            return min(value, len(layers) - (key == "moe_layer_end_index"))
        return value


def kinds_of(small: SmallConfig) -> list[Kind]:
    """Return the kinds of layers of a model, in order of their first layers."""
    return _kinds(build_empty(small.with_layers(range(small.num_layers))))


def with_kinds(small: SmallConfig, kinds: Sequence[Kind]) -> PretrainedConfig | None:
    """Return a configuration with a layer of each kind, two if there is one kind; None if there is no such model."""
    first = [kind.first for kind in kinds]
    wanted = {kind.signature for kind in kinds}
    for layers in (first * 2 if len(first) == 1 else first, range(min(max(first) + 1, MOST_BEFORE))):
        try:
            config = small.with_layers(layers)
            found = {kind.signature for kind in _kinds(build_empty(config))}
        except LOADING_ERRORS:
            continue
        if found == wanted or (found > wanted and len(kinds) > 1):
            return config
    return None


def build_empty(config: PretrainedConfig) -> PreTrainedModel:
    """Build the model of a configuration without memory for its parameters."""
    model_of: Any = AutoModelForCausalLM
    with quiet_transformers(), no_init_weights(), parameters_on_meta():
        return model_of.from_config(config, attn_implementation="eager", trust_remote_code=False)


def _kinds(model: PreTrainedModel) -> list[Kind]:
    kinds: dict[str, Kind] = {}
    types = getattr(model.config.get_text_config(), "layer_types", None) or []
    for place, layer in enumerate(layers_of(model)):
        signature = repr(list(_signature(layer)))
        if signature not in kinds and len(kinds) < MOST_KINDS:
            kinds[signature] = Kind(_name(layer, types[place] if place < len(types) else ""), place, signature)
    return list(kinds.values())


def _signature(layer: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield what distinguishes a layer from others: its modules, their shapes and their settings, but not its place."""
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if value is None or type(value) in (bool, str) or (type(value) is int and not COUNTS.search(key))
        }
        yield name, type(module).__name__, sorted(settings.items()), [p.shape for p in module.parameters(recurse=False)]


def _name(layer: nn.Module, layer_type: str) -> str:
    parts = [type(child).__name__ for child in layer.children() if any(True for _ in child.children())]
    classes = ", ".join(dict.fromkeys(parts)) or type(layer).__name__
    return f"{layer_type} ({classes})" if layer_type else classes


def _parts(values: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield a configuration and those of its parts."""
    yield values
    for value in values.values():
        if isinstance(value, dict) and "model_type" in value:
            yield from _parts(value)


def _bound(values: dict[str, Any], experts: int) -> None:
    """Bound the sizes that do not belong to heads, in place."""
    caps = CAPS | dict.fromkeys((*EXPERTS, "moe_num_experts"), experts)
    for key, value in values.items():
        most = caps.get(key) or next((size for end, size in ENDS.items() if key.endswith(end)), None)
        if key in EVERY and value:
            values[key] = EVERY[key]
        elif key.endswith("_token_id"):
            values[key] = value if value is None else VOCABULARY - 1 if key == "pad_token_id" else 0
        elif key in ("max_position_embeddings", "n_positions", "n_ctx") and value:
            values[key] = max(value, POSITIONS)
        elif most is not None and isinstance(value, int | float) and not isinstance(value, bool):
            values[key] = min(value, most)
        elif most is not None and isinstance(value, list):
            values[key] = [min(each, most) for each in value]
    key_heads, value_heads = values.get("linear_num_key_heads"), values.get("linear_num_value_heads")
    if key_heads and value_heads:
        values["linear_num_value_heads"] = min(value_heads, 2 * key_heads)


def _narrow(values: dict[str, Any], text: PretrainedConfig, most_kv_heads: int, *, widens: bool) -> None:
    """Reduce heads and hidden size, in place; the dimension of heads and the queries of each key remain."""
    heads, hidden = (getattr(text, name, None) for name in ("num_attention_heads", "hidden_size"))
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(hidden, int) or not isinstance(kv_heads, int) or heads % kv_heads:
        return
    small_kv = min(kv_heads, most_kv_heads)
    small = small_kv * (heads // kv_heads)
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    width = small * head_dim if widens else max(WIDTH_OF_HEAD * small, 64)
    names = {"num_attention_heads": small, "num_key_value_heads": small_kv, "hidden_size": width}
    sizes = {text.attribute_map.get(name, name): size for name, size in names.items()}
    sizes |= {"word_embed_proj_dim": width, "lru_width": width}
    if type(values.get("mamba_expand")) is type(values.get("mamba_d_head")) is int:
        sizes["mamba_n_heads"] = max(1, values["mamba_expand"] * width // values["mamba_d_head"])
        sizes["mamba_d_ssm"] = sizes["mamba_n_heads"] * values["mamba_d_head"]
    values.update({key: size for key, size in sizes.items() if key in values})
    if not widens:
        values["head_dim"] = head_dim
