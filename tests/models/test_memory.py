"""The memory formula against peaks measured on the CPU, and against hand counts."""

import gc
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch

from fixtures.families import small_config, write_family
from hybridflow.config import LoRAConfig, MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.models.memory import MemoryLayout, forward_memory, generation_memory, training_memory
from hybridflow.models.model_sizes import DecoderShape, ModelSizes, model_sizes

TOKENS, PROMPT_LEN = 1024, 8
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": True}
HAND = ModelSizes(DecoderShape(2, 8, 16, 4, 2, 100), layer=500, embedding=800, head=0)
BF16 = MemoryLayout(dtype="bfloat16")


LAYERS = {"gemma2": ["sliding_attention", "full_attention"], "lfm2": ["conv", "full_attention"]}
LAYERS |= {"gpt_oss": LAYERS["gemma2"], "qwen3_5_text": ["linear_attention", "full_attention"]}
OWN_CODE = {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 32}
OWN_CODE |= {"linear_value_head_dim": 32, "sliding_window": 128}


@pytest.fixture(scope="module")
def directory_of(tiny_model, tmp_path_factory):
    @cache
    def build(family="qwen2", vocab_size=512):
        if family in ("qwen2", "qwen3", "qwen2_moe"):
            return tiny_model(family, **SIZES, vocab_size=vocab_size)
        sizes = {name: size for name, size in OWN_CODE.items() if hasattr(small_config(family), name)}
        sizes |= {"layer_types": LAYERS[family] * 2} if family in LAYERS else {}
        return write_family(tmp_path_factory.mktemp(family), family, **SIZES | sizes, vocab_size=vocab_size)

    return build


def loss(outputs, part):
    return -outputs["log_probs"].mean(), {}


def measured(directory, length, *, learns=True, **model):
    """Return the bytes of an engine, and of its peak in an update or a forward pass on two micro-batches."""
    from fixtures.peak_memory import peak_bytes, resident_bytes
    from hybridflow.engines import TorchEngine
    from hybridflow.engines.token_budget import _rows

    lora = LoRAConfig(rank=model.pop("lora_rank", 0))
    engine = TorchEngine(
        str(directory),
        "policy",
        model=ModelConfig(path=str(directory), **model),
        memory=MemoryConfig(max_tokens_per_micro_batch=TOKENS),
        optimizer=OptimizerConfig() if learns else None,
        lora=lora,
    )
    rows = _rows(2 * TOKENS // length, PROMPT_LEN, length - PROMPT_LEN)

    def call():
        if learns:
            engine.update(rows, loss, with_entropy=True)
        else:
            engine.forward(rows, with_entropy=True)

    call()  # the moments exist from the second update on
    return resident_bytes(engine) + peak_bytes(call)


def responses(length):
    return TOKENS // length * (length - PROMPT_LEN)


def check(estimate, bytes_measured):
    assert estimate.total == sum(asdict(estimate).values())
    assert estimate.total == pytest.approx(bytes_measured, rel=0.15), asdict(estimate)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("family", "dtype", "vocab_size", "recomputes", "length"),
    [
        ("qwen3", "bfloat16", 512, True, 256),
        ("qwen2", "float32", 512, False, 256),
        ("qwen2_moe", "bfloat16", 512, False, 256),
        ("gemma2", "bfloat16", 512, False, 256),
        ("qwen3_5_text", "float32", 512, False, 256),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("qwen2_moe", "float32", 512, True, 256),
                ("gemma2", "float32", 512, False, 1024),
                ("gpt_oss", "bfloat16", 512, False, 256),
                ("qwen3_5_text", "bfloat16", 512, True, 1024),
                ("lfm2", "bfloat16", 512, False, 256),
                ("mistral", "float32", 512, False, 256),
                ("phi3", "bfloat16", 512, True, 1024),
                ("olmo2", "bfloat16", 20000, False, 256),
                ("gpt2", "float32", 512, False, 256),
                ("qwen2", "float32", 512, True, 256),
                ("qwen2", "float32", 20000, False, 1024),
                ("qwen2", "bfloat16", 512, False, 1024),
                ("qwen2", "bfloat16", 20000, True, 256),
                ("qwen3", "float32", 512, False, 1024),
                ("qwen3", "bfloat16", 20000, False, 256),
            )
        ),
    ],
)
def test_training_memory_is_within_15_percent(directory_of, family, dtype, length, vocab_size, recomputes):
    directory = directory_of(family, vocab_size)
    layout = MemoryLayout(dtype=dtype, gradient_checkpointing=recomputes, kernels="cpu", longest=length)
    peak = measured(directory, length, dtype=dtype, gradient_checkpointing=recomputes)
    sizes = model_sizes(directory, dtype=getattr(torch, dtype))
    check(training_memory(sizes, layout, TOKENS, responses(length)), peak)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "vocab_size"), [("qwen2", 512), ("qwen2", 20000), ("qwen3_5_text", 512), ("gpt_oss", 512)]
)
def test_forward_memory_is_within_15_percent(directory_of, dtype, family, vocab_size):
    directory = directory_of(family, vocab_size)
    peak = measured(directory, 256, learns=False, dtype=dtype)
    sizes = model_sizes(directory, dtype=getattr(torch, dtype))
    check(forward_memory(sizes, MemoryLayout(dtype=dtype, kernels="cpu", longest=256), TOKENS, responses(256)), peak)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kept", [256, 1024])
def test_memory_of_logits_in_parts_is_within_15_percent(directory_of, monkeypatch, kept):
    from hybridflow.models import forward, fused_forward

    monkeypatch.setattr(forward, "MAX_LOGITS", 20000 * 256)
    monkeypatch.setattr(forward, "PARTS_KEPT", 4)
    monkeypatch.setattr(fused_forward, "max_logits_on", lambda device: 20000 * kept)
    directory = directory_of(vocab_size=20000)
    peak = measured(directory, 256, dtype="bfloat16")
    layout = MemoryLayout(dtype="bfloat16", kernels="cpu", max_logits=20000 * kept)
    check(training_memory(model_sizes(directory), layout, TOKENS, responses(256)), peak)


@pytest.mark.parametrize(("max_logits", "tokens"), [(300, 3 + 3), (1000, 10 + 5)])
def test_kept_logits_are_counted_with_the_gradient_of_one_part(monkeypatch, max_logits, tokens):
    monkeypatch.setattr("hybridflow.models.forward.MAX_LOGITS", 300)
    rank = training_memory(HAND, MemoryLayout(max_logits=max_logits, lora_rank=1), 10)
    assert (rank.logits, rank.working) == (tokens * 100 * 2, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2"])
def test_memory_of_adapters_is_within_15_percent(directory_of, dtype, family):
    pytest.importorskip("peft")
    peak = measured(directory_of(family), 256, dtype=dtype, lora_rank=16)
    layout = MemoryLayout(dtype=dtype, kernels="cpu", lora_rank=16, longest=256)
    sizes = model_sizes(directory_of(family), dtype=getattr(torch, dtype), is_frozen=True)
    check(training_memory(sizes, layout, TOKENS, responses(256)), peak)


@pytest.fixture
def without_kernels():
    """Compute with PyTorch's operations, as on a GPU."""
    from hybridflow.models.kernels.library import use_kernels

    use_kernels(False)
    yield
    use_kernels(True)


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: torch.compile starts a process if its cache has no such kernel")
@pytest.mark.usefixtures("without_kernels")
@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_memory_of_the_operations_of_a_gpu_is_within_15_percent(directory_of, family, kernels):
    """Measure in float32: in bfloat16 a CPU computes attention in float32, and a GPU does not."""
    directory = directory_of(family)
    peak = measured(directory, 256, dtype="float32", compile=kernels == "compiled")
    layout = MemoryLayout(dtype="float32", kernels=kernels)
    check(training_memory(model_sizes(directory), layout, TOKENS, responses(256)), peak)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("without_kernels")
def test_eager_norms_in_bfloat16_keep_a_float32_copy_of_their_input(directory_of):
    peak = measured(directory_of(), 256, dtype="bfloat16")
    layout = MemoryLayout(dtype="bfloat16", kernels="eager")
    # A CPU computes attention in float32: queries, keys, values and output twice as wide, and the output cast.
    attention = SIZES["num_hidden_layers"] * TOKENS * ((2 * 256 + 2 * 64) * 2 + 256 * 2)
    estimate = training_memory(model_sizes(directory_of()), layout, TOKENS, responses(256))
    assert estimate.total + attention == pytest.approx(peak, rel=0.05)


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: two ranks")
@pytest.mark.parametrize(
    "layout",
    [
        {"dtype": "float32", "data": 2},
        {"dtype": "bfloat16", "data": 2},
        {"dtype": "bfloat16", "data": 2, "gradient_checkpointing": True},
        {"dtype": "float32", "sequence": 2},
        {"dtype": "float32", "tensor": 2},
        {"dtype": "float32", "data": 2, "replicas": 2},
        {"dtype": "bfloat16", "data": 2, "gradient_checkpointing": True, "large_vocabulary": True},
        {"dtype": "bfloat16", "data": 2, "family": "qwen2_moe"},
        {"dtype": "bfloat16", "data": 2, "expert": 2, "family": "qwen2_moe"},
    ],
    ids=lambda layout: "-".join(f"{name}_{value}" for name, value in layout.items()),
)
def test_memory_of_sharded_ranks_is_within_15_percent(tiny_model, run_world, tmp_path, layout):
    from fixtures.layout_program import run_jobs

    layout, prompt_len, vocab_size, is_tied = dict(layout), PROMPT_LEN, 4000, True
    if layout.pop("large_vocabulary", False):  # embedding and head need most
        prompt_len, vocab_size, is_tied = 252, 20000, False
    family = layout.pop("family", "qwen2")
    experts = {"num_experts": 16, "moe_intermediate_size": 256} if family == "qwen2_moe" else {}
    directory = tiny_model(family, **SIZES | experts | {"tie_word_embeddings": is_tied}, vocab_size=vocab_size)
    axes = {"dtype": layout["dtype"], "checkpointing": layout.get("gradient_checkpointing", False)}
    axes |= {axis: layout[axis] for axis in ("tensor", "sequence", "replicas", "expert") if axis in layout}
    job = {"name": "rank", "do": "measure", "model": directory, "max_tokens": TOKENS, **axes}
    job |= {"num_rows": 2 * TOKENS * layout.get("sequence", 1) // 256, "lengths": [prompt_len, 256 - prompt_len]}
    peak = run_jobs(run_world, tmp_path, [(2, job)])["rank"].peak
    responses = TOKENS // 256 * (256 - prompt_len)
    sizes = model_sizes(directory, dtype=getattr(torch, layout["dtype"]))
    check(training_memory(sizes, MemoryLayout(kernels="cpu", **layout), TOKENS, responses), peak)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_5_text", "lfm2", "qwen2_moe"])
def test_generation_memory_is_within_15_percent(directory_of, dtype, family):
    from fixtures.peak_memory import peak_bytes
    from hybridflow.models.loading import load_causal_lm
    from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate

    engine = EmbeddedRollout(load_causal_lm(directory_of(family), dtype))
    requests = [Request(i, [5] * 64, SamplingParams(192), 8, (0, i)) for i in range(16)]
    layout = MemoryLayout(dtype=str(dtype).removeprefix("torch."), kernels="cpu", longest=64)
    sizes = model_sizes(directory_of(family), dtype=dtype)
    estimate = generation_memory(sizes, layout, 128 * 256, 128, prompt_tokens=16 * 64)
    check(estimate, peak_bytes(lambda: generate(engine, requests)))


def test_a_measured_peak_does_not_depend_on_garbage_of_an_earlier_one():
    from fixtures.peak_memory import peak_bytes

    def make_garbage():
        cycle = [torch.zeros(1000)]
        cycle.append(cycle)

    def free_garbage():
        gc.collect()
        torch.zeros(1000)

    assert [peak_bytes(call) for call in (make_garbage, free_garbage)] == [4000, 4000]


def test_parts_of_a_rank_are_counted_by_hand():
    rank = training_memory(HAND, BF16, 10)
    parameters = 2 * 500 + 800 + 8
    assert (rank.weights, rank.masters, rank.gradients, rank.moments) == tuple(n * parameters for n in (2, 4, 4, 8))
    layer = 2 * (4 * 8 + 2 * 8 + 2 * 4 + 3 * 16) + 4 * (4 + 2)
    assert rank.activations == 10 * (2 * layer + 4 * 2) + 2 * 10 * 8 * 2  # and the final norm
    logits, logits_in_float32 = 10 * 100 * 2, 10 * 100 * 4
    assert (rank.logits, rank.working) == (2 * logits, 0)  # the logits and their gradient
    eager = training_memory(HAND, MemoryLayout(kernels="eager"), 10)
    assert (eager.logits, eager.working) == (logits, 3 * logits_in_float32)  # the forward pass needs most


def test_recomputed_layers_keep_their_inputs_and_one_layer():
    rank = training_memory(HAND, MemoryLayout(gradient_checkpointing=True), 10, response_tokens=1)
    layer = 2 * (4 * 8 + 2 * 8 + 2 * 4 + 3 * 16) + 4 * (4 + 2)
    assert (rank.activations, rank.logits) == (10 * (2 * 8 * 2 + layer + 4 * 2), 0)
    assert rank.working == 10 * (8 + 2 * 16) * 2 + 8 * 16 * 2 + 100 * 8 * 2  # gradients: values, a matrix, the head


def test_shards_divide_weights_and_optimizer_and_drop_masters():
    whole, rank = training_memory(HAND, BF16, 10), training_memory(HAND, MemoryLayout(data=4, sequence=2), 10)
    assert rank.masters == 0
    assert rank.weights == whole.masters / 8
    assert (rank.gradients, rank.moments) == (whole.gradients / 8, whole.moments / 8)
    group = training_memory(HAND, MemoryLayout(data=8, sequence=2, replicas=4), 10)
    assert group.moments == training_memory(HAND, MemoryLayout(data=2, sequence=2), 10).moments
    assert training_memory(HAND, MemoryLayout(data=2, replicas=2), 10).masters == 0  # FSDP2 with shards of one rank


@pytest.mark.parametrize(
    ("mesh", "connections"),
    [
        ({}, 0),
        ({"data": 8}, 1),
        ({"data": 8, "replicas": 8}, 1),
        ({"data": 8, "replicas": 2, "tensor": 2}, 3),
        ({"sequence": 4}, 4),
        ({"data": 8, "offload": "host"}, 1),
        ({"data": 8, "lora_rank": 2}, 1),
        ({"data": 8, "kernels": "cpu"}, 0),
    ],
)
def test_each_group_of_ranks_has_buffers_of_nccl(mesh, connections):
    for rank in (training_memory(HAND, MemoryLayout(**mesh), 10), forward_memory(HAND, MemoryLayout(**mesh), 10)):
        assert rank.communication == connections * 384 * 2**20
        assert rank.total - rank.communication < 2**20


def test_host_offload_leaves_activations_and_gathered_layers():
    rank, held = (training_memory(HAND, MemoryLayout(kernels="eager", offload=place), 10) for place in ("host", "none"))
    assert rank.resident == rank.gradients == rank.communication == 0
    assert (rank.activations, rank.working > held.working) == (held.activations, True)


def test_keys_and_values_of_a_token_are_counted_by_hand():
    rank = generation_memory(HAND, BF16, cached_tokens=1000, sequences=10)
    assert rank.keys_and_values == 1000 * 2 * 2 * 4 * 2
    assert (rank.weights, rank.logits, rank.working) == (0, 10 * 100 * 2, 10 * 100 * 8)


def test_sizes_equal_those_of_the_model(directory_of):
    from hybridflow.models.loading import load_causal_lm

    for family in ("qwen2", "qwen3"):
        sizes = model_sizes(directory_of(family))
        assert sizes.parameters == sum(p.numel() for p in load_causal_lm(directory_of(family)).parameters())
        assert sizes.normalizes_heads == (family == "qwen3")


def test_a_critic_has_a_head_of_one_output(directory_of):
    sizes = model_sizes(directory_of(), "value")
    assert (sizes.head, sizes.shape.vocab_size) == (SIZES["hidden_size"] + 1, 1)


def test_recurrent_layers_have_states_instead_of_keys_and_values(directory_of):
    sizes = model_sizes(directory_of("qwen3_5_text"))
    cached, more = (generation_memory(sizes, BF16, 1000, sequences).keys_and_values for sequences in (0, 1))
    assert cached == 1000 * 2 * 2 * 2 * 32 * 2  # 2 of 4 layers, 2 heads of 32 numbers
    convolutions = 2 * (8 + 2 * 4) * 32 * 4  # 2 layers: values, queries and keys of the last 4 tokens
    assert more - cached == 2 * convolutions + 4 * 2 * 8 * 32 * 32  # states are float32


def test_a_window_bounds_what_a_cpu_keeps_and_a_gpu_keeps_all():
    windowed = replace(HAND, shape=replace(HAND.shape, windows=(50, 0)))
    layouts = (MemoryLayout(kernels="cpu"), BF16)
    kept = [generation_memory(windowed, layout, cached_tokens=1000, sequences=10) for layout in layouts]
    assert [each.keys_and_values for each in kept] == [(500 + 1000) * 2 * 4 * 2, 2000 * 2 * 4 * 2]


def test_experts_of_other_ranks_are_not_gathered(directory_of):
    sizes = replace(model_sizes(directory_of("qwen2_moe")), experts=100_000)
    one, half = (training_memory(sizes, MemoryLayout(data=2, expert=ranks), 1) for ranks in (1, 2))
    assert (one.working - half.working, one.resident) == (50_000 * (2 * 2 + 2 + 4), half.resident)


def test_code_that_needs_the_values_of_tensors_has_no_sizes(tmp_path):
    assert model_sizes(write_family(tmp_path, "jetmoe")) is None


def test_logits_of_a_layout_are_those_that_its_device_holds_at_once():
    few, all_of_them = (
        forward_memory(HAND, MemoryLayout(max_logits=number, kernels="eager"), 10) for number in (300, 1000)
    )
    assert (few.logits, all_of_them.logits) == (3 * 100 * 2, 10 * 100 * 2)
