"""The memory of one rank, computed from the sizes of a decoder: weights, optimizer, activations, logits, KV cache.

The formula describes the fused forward pass (Llama, Qwen2, Qwen3), and counts what autograd keeps for the backward
pass; of other families' code these bytes are seen in a pass without memory (`layer_pass`). Its parts are those of the
moment of the largest need: a backward pass of the head or of a layer, in an update whose gradients and moments exist
already. It leaves out what is not a tensor: the CUDA context, workspaces of libraries and fragments of the allocator.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from hybridflow.errors import ModelConfigError
from hybridflow.models.attention import SHORT
from hybridflow.models.attention_form import BLOCK
from hybridflow.models.forward import MAX_LOGITS, parts_of_logits
from hybridflow.models.layer_pass import LayerBytes
from hybridflow.models.model_sizes import ModelSizes

Kernels = Literal["compiled", "eager", "cpu"]
"""compiled: layers of torch.compile on a GPU; eager: PyTorch's operations on a GPU; cpu: the fused kernels of a CPU."""

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a decoder layer: those whose adapters the formula counts."""

NCCL_CONNECTION = 32 * 12 * 2**20
"""Bytes that NCCL allocates on a rank for the ranks before and after it in a ring: 32 channels, each with 10 MiB to
receive and 2 MiB to send. So `NCCL_DEBUG_SUBSYS=ALLOC` lists them on GPUs with NVLink (NVIDIA/nccl, issue 1685); slower
links have fewer channels."""

SLICE = 8192
"""Vocabulary entries of which log-probs are computed in float32 at a time (hybridflow.algorithms)."""


@dataclass(frozen=True)
class MemoryLayout:
    """How ranks hold and compute a model; names as in the configuration.

    `data`: data-parallel ranks, over which, with the sequence parallel ranks, parameters are sharded (FSDP2), each in
    one of `replicas` groups of ranks; `expert`: ranks that gather a part of the experts each. `longest`: tokens of the
    longest sequence, on which the attention of a CPU depends. `max_logits`: logits that are kept in memory, which
    depend on that of a GPU (`max_logits_on`). Raises ModelConfigError for adapters of other layers than
    `LINEAR_LAYERS`.
    """

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    data: int = 1
    tensor: int = 1
    sequence: int = 1
    replicas: int = 1
    expert: int = 1
    gradient_checkpointing: bool = False
    offload: Literal["none", "idle", "host"] = "none"
    lora_rank: int = 0
    lora_targets: Sequence[str] = LINEAR_LAYERS
    kernels: Kernels = "compiled"
    longest: int = SHORT
    max_logits: int = MAX_LOGITS

    def __post_init__(self) -> None:
        if self.lora_rank and (others := [name for name in self.lora_targets if name not in LINEAR_LAYERS]):
            raise ModelConfigError(
                f"lora.targets={list(self.lora_targets)} has no memory estimate because of {', '.join(others)}; "
                f"expected some of {', '.join(LINEAR_LAYERS)}."
            )

    @property
    def width(self) -> int:
        """Bytes of a number in the compute dtype."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def shards(self) -> int:
        """Ranks over which each parameter is sharded by FSDP2."""
        return self.data * self.sequence // self.replicas

    @property
    def is_alone(self) -> bool:
        """Whether one rank has the whole model, without FSDP2."""
        return self.data * self.sequence * self.tensor == 1


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at the moment of its largest need, by what they hold; `total` is their sum.

    `working`: weights gathered from other ranks, their gradients, and intermediate results of one layer.
    `communication`: buffers of NCCL, which all models of a process use, and which are never freed.
    """

    weights: int = 0
    masters: int = 0
    gradients: int = 0
    moments: int = 0
    activations: int = 0
    logits: int = 0
    keys_and_values: int = 0
    working: int = 0
    communication: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(asdict(self).values())

    @property
    def resident(self) -> int:
        """Bytes that stay between calls: weights, masters and the optimizer's moments."""
        return self.weights + self.masters + self.moments


def training_memory(sizes: ModelSizes, layout: MemoryLayout, tokens: int, response_tokens: int = 0) -> RankMemory:
    """Return the memory of an update with micro-batches of `tokens` per rank, `response_tokens` of which have logits.

    `tokens` is memory.max_tokens_per_micro_batch; `response_tokens` 0: all of them.
    """
    layout = _for_model(sizes, layout)
    b, shape, counted = layout.width, sizes.shape, response_tokens or tokens
    layers = _kept_by_layers(sizes, layout, tokens)
    kept = shape.num_layers * tokens * shape.hidden_size * b if layout.gradient_checkpointing else sum(layers)
    saved = kept + tokens * _rotary_bytes(sizes)
    recomputed = max(layers) if layout.gradient_checkpointing else 0
    gathered, in_layer = _gathered(sizes, layout), _in_backward(sizes, layout, tokens)
    outer = 2 * counted * shape.hidden_size * b
    head = _Head(sizes, layout, counted)
    kept_head_gradient = 0 if sizes.head else head.weight_gradient
    moments = [
        RankMemory(activations=saved + outer, logits=logits, working=gathered.forward + working)
        for logits, working in [head.forward(keeps=True), *head.backward()]
    ]
    moments += [
        RankMemory(activations=saved, working=gathered.head),
        RankMemory(activations=saved + recomputed, working=gathered.backward + in_layer + kept_head_gradient),
        RankMemory(working=gathered.embedding),
    ]
    return _largest(_held(sizes, layout, learns=True), moments)


def forward_memory(sizes: ModelSizes, layout: MemoryLayout, tokens: int, response_tokens: int = 0) -> RankMemory:
    """Return the memory of a pass without gradient, of a model without an optimizer: log-probs and their entropies."""
    layout = _for_model(sizes, layout)
    counted, gathered = response_tokens or tokens, _gathered(sizes, layout).forward
    hidden = sizes.shape.hidden_size * layout.width
    logits, slices = _Head(sizes, layout, counted).forward(keeps=False)
    rotary = tokens * _rotary_bytes(sizes)
    moments = [
        RankMemory(activations=rotary + counted * hidden, logits=logits, working=gathered + slices),
        RankMemory(activations=rotary + tokens * hidden, working=gathered + _pass_through_layer(sizes, layout, tokens)),
    ]
    return _largest(_held(sizes, layout, learns=False), moments)


def generation_memory(
    sizes: ModelSizes, layout: MemoryLayout, cached_tokens: int, sequences: int, *, prompt_tokens: int = 0
) -> RankMemory:
    """Return the memory of the embedded engine besides the trainer's weights, which it shares.

    `cached_tokens`: tokens of all sequences together, at their ends. `sequences`: those that run at the same time.
    `prompt_tokens`: those of one pass over prompts. On a CPU the fused pass has a copy of the weights, and layers with
    a window keep that many tokens of a sequence; on a GPU all layers share one table of pages.
    """
    layout = _for_model(sizes, layout)
    shape, b = sizes.shape, layout.width
    sampling = 2 * sequences * shape.vocab_size * 4
    windows = (0,) * shape.num_layers if shape.windows is None else shape.windows
    seen = [min(cached_tokens, window * sequences or cached_tokens) for window in windows]
    kept, of_token = seen if layout.kernels == "cpu" else [cached_tokens] * len(seen), 2 * sizes.kv_size * b
    return RankMemory(
        weights=sizes.parameters * b if layout.kernels == "cpu" and not sizes.layers else 0,
        keys_and_values=of_token * sum(kept) + sizes.state_bytes * sequences,
        logits=sequences * shape.vocab_size * b,
        working=max(sampling, _pass_through_layer(sizes, layout, prompt_tokens)),
    )


def _pass_through_layer(sizes: ModelSizes, layout: MemoryLayout, tokens: int) -> int:
    """Return the bytes of the intermediate results of one layer without gradient, besides its input."""
    shape = sizes.shape
    if sizes.layers:
        given = tokens * (shape.attention_size + 2 * sizes.kv_size) * layout.width
        with_scores = (given + (2 + layer.copies) * _scores(layer, layout, tokens) for layer in sizes.layers)
        return max(*with_scores, *(tokens * layer.forward for layer in sizes.layers))
    sharded = 2 * (shape.attention_size + sizes.kv_size) + 3 * shape.intermediate_size
    return tokens * layout.width * (2 * shape.hidden_size + sharded // layout.tensor)


def _in_backward(sizes: ModelSizes, layout: MemoryLayout, tokens: int) -> int:
    """Return the bytes of the intermediate results of one layer in its backward pass."""
    if sizes.layers:
        copies = [1 if layout.longest <= BLOCK else 2 + layer.copies for layer in sizes.layers]
        scores = (count * _scores(x, layout, tokens) for count, x in zip(copies, sizes.layers, strict=True))
        return max(*scores, *(tokens * layer.backward for layer in sizes.layers))
    return tokens * (sizes.shape.hidden_size + 2 * sizes.shape.intermediate_size // layout.tensor) * layout.width


def _for_model(sizes: ModelSizes, layout: MemoryLayout) -> MemoryLayout:
    """Return the layout for a model's code: it is eager, and keeps all logits."""
    if not sizes.layers:
        return layout
    kernels = "cpu" if layout.kernels == "cpu" else "eager"
    return replace(layout, kernels=kernels, max_logits=sys.maxsize)


def _largest(held: RankMemory, moments: Sequence[RankMemory]) -> RankMemory:
    """Return what is held all the time together with the largest of several moments."""
    largest = max(moments, key=lambda moment: moment.total)
    return replace(held, activations=largest.activations, logits=largest.logits, working=largest.working)


def _held(sizes: ModelSizes, layout: MemoryLayout, *, learns: bool) -> RankMemory:
    """Return weights, masters, gradients and moments of one rank; with offload="host" the host has all of them."""
    b, parameters = layout.width, -(-sizes.parameters // (layout.tensor * layout.shards))  # norms are small
    nothing = RankMemory(communication=_communication(layout))
    if layout.offload == "host":
        return nothing
    if layout.lora_rank:
        adapters = -(-_adapter_parameters(sizes, layout) // (layout.shards * layout.tensor))
        held = replace(nothing, weights=parameters * b + adapters * 4)
        return replace(held, gradients=4 * adapters, moments=8 * adapters) if learns else held
    if not learns:
        return replace(nothing, weights=parameters * b)
    has_masters = layout.dtype == "bfloat16" and layout.is_alone
    return replace(
        nothing,
        weights=parameters * (b if has_masters else 4),
        masters=4 * parameters if has_masters else 0,
        gradients=4 * parameters,
        moments=8 * parameters,
    )


def _communication(layout: MemoryLayout) -> int:
    """Return the bytes of a ring for each group of ranks, and of a connection to each sequence parallel rank."""
    rings = sum(ranks > 1 for ranks in (layout.shards, layout.replicas, layout.tensor))
    return 0 if layout.kernels == "cpu" else (rings + layout.sequence - 1) * NCCL_CONNECTION


def _adapter_parameters(sizes: ModelSizes, layout: MemoryLayout) -> int:
    widths = _target_widths(sizes)
    return sizes.shape.num_layers * layout.lora_rank * sum(sum(widths[name]) for name in layout.lora_targets)


def _target_widths(sizes: ModelSizes) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the linear layers of a decoder layer."""
    shape = sizes.shape
    hidden, heads, kv, mlp = shape.hidden_size, shape.attention_size, sizes.kv_size, shape.intermediate_size
    return {
        "q_proj": (hidden, heads),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (heads, hidden),
        "gate_proj": (hidden, mlp),
        "up_proj": (hidden, mlp),
        "down_proj": (mlp, hidden),
    }


def _rotary_bytes(sizes: ModelSizes) -> int:
    """Return the bytes of cos and sin of one token, in float32."""
    return 4 * sizes.shape.attention_size // sizes.shape.num_heads


def _kept_by_layers(sizes: ModelSizes, layout: MemoryLayout, tokens: int) -> list[int]:
    """Return the bytes that autograd keeps of each layer, which has a pass over `tokens`."""
    if not sizes.layers:
        return [tokens * _layer_bytes(sizes, layout)] * sizes.shape.num_layers
    inputs = _adapter_bytes(sizes, layout) if layout.lora_rank else 0

    def kept(layer: LayerBytes) -> int:
        scores = _scores(layer, layout, tokens)
        of_token = layer.kept + inputs + (_cast_bytes(sizes, layout) if layer.heads and not scores else 0)
        return tokens * of_token + ((1 + layer.copies) * scores if layout.longest <= BLOCK else 0)

    return [kept(layer) for layer in sizes.layers]


def _cast_bytes(sizes: ModelSizes, layout: MemoryLayout) -> int:
    """Return the bytes of a token that a CPU's attention of long sequences keeps in float32, and of its output cast."""
    if layout.kernels != "cpu" or layout.width == 4 or layout.longest <= SHORT:
        return 0
    return (3 * sizes.shape.attention_size + 2 * sizes.kv_size) * layout.width


def _scores(layer: LayerBytes, layout: MemoryLayout, tokens: int) -> int:
    """Return the bytes of the scores of a layer's attention; 0 if its kernel has none in memory.

    `attention_by_form` computes scores: with soft caps or sinks, and on a CPU with a window that sequences exceed. It
    keeps them for sequences of one block, and computes them again, block by block, for longer ones.
    """
    length, is_cut = layout.longest, 0 < layer.window < layout.longest
    if not (layer.copies or (is_cut and layout.kernels == "cpu")):
        return 0
    keys = min(length, layer.window + BLOCK if layer.window else length)
    return min(tokens, -(-tokens * BLOCK // length)) * layer.heads * keys * 4


def _layer_bytes(sizes: ModelSizes, layout: MemoryLayout) -> int:
    """Return the bytes that autograd keeps of one token in one layer of the fused pass.

    Two norms keep their input and their output, attention its queries, keys, values and output, the MLP gate, up and
    their product; each norm one float32 per token, attention one per head.
    """
    shape, b, tensor = sizes.shape, layout.width, layout.tensor
    hidden, heads, kv = shape.hidden_size, shape.attention_size // tensor, sizes.kv_size // tensor
    mlp, num_heads = shape.intermediate_size // tensor, shape.num_heads // tensor
    norms, attention, gated = 4 * hidden * b, (2 * heads + 2 * kv) * b, 3 * mlp * b
    if sizes.normalizes_heads:
        attention += (heads + kv) * b + 4 * (num_heads + shape.num_key_value_heads // tensor)
    if layout.sequence > 1:
        attention += heads * b  # the output before and after the exchange
    attention += _cast_bytes(sizes, layout) // tensor
    if layout.kernels == "eager":
        gated += mlp * b
        norms += 2 * hidden * (b if b == 4 else 4)
        if sizes.normalizes_heads:
            attention += (heads + kv) * 4
    if layout.lora_rank:
        norms, gated = norms - 2 * hidden * b, gated - mlp * b  # inputs of frozen weights are not kept
        norms += _adapter_bytes(sizes, layout)
    return norms + attention + gated + 4 * (num_heads + 2)


def _adapter_bytes(sizes: ModelSizes, layout: MemoryLayout) -> int:
    """Return the bytes that the adapters of one layer keep of one token: their inputs, and results of the rank's width.

    Adapters compute in float32, each with a copy of its input, unless FSDP2 casts them to the compute dtype.
    """
    widths, b = _target_widths(sizes), layout.width
    is_cast = b < 4 and layout.is_alone
    inputs = {name: widths[name][0] for name in layout.lora_targets}
    if not is_cast:  # shared between the projections, and by the attention that made it
        same = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
        inputs = {same.get(name, name): width for name, width in inputs.items() if name != "o_proj"}
    return (4 if is_cast else b) * (sum(inputs.values()) + layout.lora_rank * len(layout.lora_targets))


@dataclass(frozen=True)
class _Gathered:
    """Bytes of weights gathered by FSDP2 in a forward pass, and with their gradients in a backward pass.

    `head` and `embedding`: of their gradients while they are reduced, before and after those of the layers.
    """

    forward: int
    backward: int
    head: int = 0
    embedding: int = 0


def _gathered(sizes: ModelSizes, layout: MemoryLayout) -> _Gathered:
    """Return the weights of two layers and of the embedding or the head; in the backward pass gradients of a layer too.

    The next layer is gathered while one computes. Gradients are reduced in float32, from a buffer that FSDP2 frees when
    it reduces the next ones. An embedding that is the head too is gathered all the time.
    """
    b, elsewhere = layout.width, sizes.experts - sizes.experts // layout.expert
    layer = (sizes.layer - elsewhere) // layout.tensor
    largest = (sizes.largest or sizes.shape.hidden_size * sizes.shape.intermediate_size) // layout.tensor * b
    if layout.is_alone and layout.offload != "host":
        return _Gathered(0, largest)
    embedding, head = sizes.embedding // layout.tensor, sizes.head // layout.tensor
    learned = 0 if layout.lora_rank else 1
    kept = 4 * head * learned if head else embedding * b
    return _Gathered(
        forward=(max(embedding, head) + 2 * layer) * b,
        backward=kept + 2 * layer * b + layer * (b + 4),
        head=head * (b + 4) * learned,
        embedding=embedding * (b + 4) * learned,
    )


class _Head:
    """The bytes of the head, whose logits are computed in parts if there are many: pairs of logits and `working`."""

    def __init__(self, sizes: ModelSizes, layout: MemoryLayout, counted: int) -> None:
        entries = -(-sizes.shape.vocab_size // layout.tensor)
        self._counted, self._per_token, self._is_cast = counted, entries * layout.width, layout.width < 4
        self._size, self._first_kept = parts_of_logits(counted, entries, layout.max_logits)
        # Compiled log-probs of a whole vocabulary have their float32 values in registers only.
        is_fused = layout.kernels == "compiled" and layout.tensor == 1
        self._slice, self._in_slices = 0 if is_fused else min(entries, SLICE) * 4, entries > SLICE
        self.weight_gradient = 0 if layout.lora_rank else entries * sizes.shape.hidden_size * layout.width

    def forward(self, *, keeps: bool) -> tuple[int, int]:
        """Return what a part needs, with the logits of other parts if the pass `keeps` them."""
        tokens = min(self._size, self._counted)
        kept = self._counted - self._first_kept if keeps else 0
        return max(kept, tokens) * self._per_token, tokens * self._slice * (2 + self._is_cast)

    def backward(self) -> Iterator[tuple[int, int]]:
        """Yield what each part needs, the last one first: the gradient of its logits, then that of the weight."""
        slices = self._slice * (2 * self._in_slices + (1 if self._in_slices else 2) * self._is_cast)
        for index, start in enumerate(reversed(range(0, self._counted, self._size))):
            tokens, kept = min(self._size, self._counted - start), max(0, start - self._first_kept)
            accumulated = self.weight_gradient if index else 0
            yield (kept + 2 * tokens) * self._per_token, tokens * slices + accumulated
            yield (kept + tokens) * self._per_token, self.weight_gradient + accumulated
