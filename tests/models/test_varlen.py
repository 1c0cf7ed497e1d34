import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from fixtures.dense_attention import dense_results, errors, random_layer, results
from hybridflow.errors import ModelConfigError
from hybridflow.models.attention import PackedPlan, pytorch_attention
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.varlen import (
    KERNEL_VARIABLE,
    TAKES_GROUPS,
    PackedLayout,
    packed_kernel,
    padded_attention,
    padding_pays,
)

CPU = torch.device("cpu")
LENGTHS = [3, 5, 1, 5]


class Calls(TorchDispatchMode):
    """Records the operations, with the arguments that are not tensors, and copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.arguments: dict[str, tuple] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        self.arguments[str(function)] = args
        return function(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return self.names.count(name)


@pytest.fixture
def hopper(monkeypatch):
    """Make CUDA tensors be those of an H100; they are fake, as there is no GPU."""
    monkeypatch.setattr("hybridflow.models.attention_backend.capability_of", lambda device: (9, 0))
    with FakeTensorMode():
        yield torch.device("cuda", 0)


def fake_layer(device, dtype, heads=6, kv_heads=2, dim=64):
    return [torch.empty(1, sum(LENGTHS), n, dim, dtype=dtype, device=device).transpose(1, 2) for n in (heads, kv_heads)]


def test_layout_holds_starts_slots_and_the_longest_length():
    layout = PackedLayout.of(LENGTHS, CPU)
    assert layout.starts.tolist() == [0, 3, 8, 9, 14]
    assert layout.starts.dtype == torch.int32
    assert layout.slots.tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 10, 15, 16, 17, 18, 19]
    assert (layout.longest, layout.num_sequences) == (5, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_packed_rows_are_one_varlen_call_per_layer(hopper, dtype, kv_heads):
    query, key = fake_layer(hopper, dtype, kv_heads=kv_heads)
    plan = PackedPlan.from_lengths(LENGTHS)
    with Calls() as first:
        plan.attend(0, query, key, key, AttentionForm(0.125))
    with Calls() as second:
        out = plan.attend(1, query, key, key, AttentionForm(0.125))
    assert (out.shape, out.dtype, out.device) == ((1, 14, 6, 64), dtype, hopper)
    name = "torch_attn._varlen_attn.default"
    assert first.count(name) == second.count(name) == 1
    q, k, v, starts_q, starts_k, *numbers = second.arguments[name][:10]
    assert numbers == [5, 5, True, 0.125, [-1, 0]]
    assert [tuple(x.shape) for x in (q, k, v)] == [(14, 6, 64), (14, kv_heads, 64), (14, kv_heads, 64)]
    assert [x.stride(-1) for x in (q, k, v)] == [1, 1, 1]
    for starts in (starts_q, starts_k):
        assert (starts.dtype, tuple(starts.shape), starts.device) == (torch.int32, (5,), hopper)
    # The layout is uploaded in the first layer only, and no layer waits for the device.
    assert first.count("aten._to_copy.default") == 2
    assert second.count("aten._to_copy.default") == 0
    assert not {"aten._local_scalar_dense.default", "aten.nonzero.default"} & {*first.names, *second.names}
    views = {"aten.squeeze.dim", "aten.transpose.int", "aten.unsqueeze.default", "prim.device.default"}
    assert set(second.names) - views == {name}  # the tensors are not copied


def test_float32_rows_of_different_lengths_are_one_padded_call(hopper):
    query, key = fake_layer(hopper, torch.float32)
    plan = PackedPlan.from_lengths(LENGTHS)
    with Calls() as calls:
        out = plan.attend(0, query, key, key, AttentionForm(0.125))
    assert (out.shape, out.dtype, out.device) == ((1, 14, 6, 64), torch.float32, hopper)
    assert calls.count("aten.index_copy.default") == 3
    assert calls.count("aten._safe_softmax.default") == 1


@pytest.mark.parametrize(
    ("dtype", "is_masked", "kv_heads"),
    [(torch.bfloat16, False, 2), (torch.bfloat16, True, 6), (torch.float32, False, 6), (torch.float64, True, 6)],
)
def test_shared_key_heads_are_repeated_without_flash_attention(hopper, monkeypatch, dtype, is_masked, kv_heads):
    calls = []

    def recording(query, key, value, **options):
        calls.append((key.shape[1], value.shape[1], options["enable_gqa"]))
        return scaled_dot_product_attention(query, key, value, **options)

    monkeypatch.setattr("hybridflow.models.attention.scaled_dot_product_attention", recording)
    query, key = fake_layer(hopper, dtype)
    seen = torch.ones(14, 14, dtype=torch.bool, device=hopper) if is_masked else None
    pytorch_attention(query, key, key, 0.125, seen)
    assert calls == [(kv_heads, kv_heads, kv_heads == 2)]


def documented_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
    """Compute what PyTorch documents for varlen_attn in version 2.11, with heads as its kernel takes them."""
    assert (cu_seq_q is cu_seq_k, max_q == max_k, window_size) == (True, True, (-1, 0))
    lengths = cu_seq_q.diff().tolist()
    assert max(lengths) == max_q
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


@pytest.mark.parametrize("takes_groups", [False, True])
@pytest.mark.parametrize("lengths", [[3, 5, 1, 5], [7], [1, 1, 1]])
def test_what_varlen_documents_equals_dense_attention(monkeypatch, lengths, takes_groups):
    def varlen(*arguments, **options):
        assert options.pop("enable_gqa", False) == takes_groups  # only newer versions have it
        return documented_varlen(*arguments, **options)

    monkeypatch.setattr("hybridflow.models.attention.attention_for", lambda case, shares_prompts: "varlen")
    monkeypatch.setattr("hybridflow.models.varlen.varlen_attn", varlen)
    monkeypatch.setattr("hybridflow.models.varlen.TAKES_GROUPS", takes_groups)
    layer = random_layer(sum(lengths) + 2, 6, 2, 8, torch.float64)
    plan = PackedPlan.from_lengths(lengths).with_filling(2)
    ours = results(lambda *tensors: plan.attend(0, *tensors, AttentionForm(0.3)), layer, CPU)
    assert max(errors(ours, dense_results([[n] for n in [*lengths, 2]], layer, 0.3))) < 1e-13


def test_flag_for_shared_key_heads_is_passed_if_varlen_has_it():
    assert ("enable_gqa" in inspect.signature(varlen_attn).parameters) == TAKES_GROUPS
    required = {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size"}
    assert required <= set(inspect.signature(varlen_attn).parameters)


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("lengths", [[3, 5, 1, 5], [1, 2], [7], [1, 1, 1]])
def test_padded_attention_equals_dense_attention(lengths, kv_heads):
    layer = random_layer(sum(lengths), 6, kv_heads, 8, torch.float64, value_dim=4)
    layout = PackedLayout.of(lengths, CPU)

    def attend(*tensors):
        query, key, value = (x[0].transpose(0, 1) for x in tensors)
        out = padded_attention(query, key, value, layout, lambda q, k, v: pytorch_attention(q, k, v, 0.3))
        return out.unsqueeze(0)

    ours = results(attend, layer, CPU)
    assert max(errors(ours, dense_results([[n] for n in lengths], layer, 0.3))) < 1e-13


def test_padding_pays_if_at_most_half_is_padding():
    assert padding_pays([4, 5, 6])
    assert padding_pays([1, 3, 2])  # 9 tokens for 6
    assert not padding_pays([1, 1, 9])  # 27 for 11
    assert not padding_pays([5, 5])  # one run of equal lengths


@pytest.fixture
def kernel(monkeypatch):
    """`kernel("cudnn")` names the kernel of packed rows, as a process that starts with it does."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)  # which another test may leave

    def choose(name):
        monkeypatch.setenv(KERNEL_VARIABLE, name)
        packed_kernel.cache_clear()
        return packed_kernel()

    yield choose
    choose("")
    packed_kernel.cache_clear()


def test_a_kernel_that_is_unknown_or_absent_is_an_error_of_one_line(monkeypatch, kernel):
    with pytest.raises(ModelConfigError, match="HYBRIDFLOW_PACKED_ATTENTION='FA2' is invalid: expected cudnn, FA3, FA"):
        kernel("FA2")
    with pytest.raises(ModelConfigError, match=r"=FA3 cannot be used: .* install flash_attn_interface, or unset it"):
        kernel("FA3")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(ModelConfigError, match=r"=cudnn is not supported with trainer\.deterministic"):
        kernel("cudnn")


@pytest.fixture
def cudnn():
    """Give the operation of cuDNN's attention a CPU kernel with the meaning of its arguments."""

    def attend(query, key, value, starts, longest, scale):
        options = {"scale": scale, "window_size": (-1, 0)}
        return documented_varlen(query, key, value, starts, starts, longest, longest, **options)

    def forward(query, key, value, bias, starts, starts_k, longest, longest_k, *flags, scale):
        assert (bias, flags) == (None, (True, 0.0, True))  # log-normalizers for the backward pass, no dropout, causal
        assert (starts.data_ptr(), longest) == (starts_k.data_ptr(), longest_k)
        out, zero = attend(query, key, value, starts, longest, scale), torch.zeros(1)
        return out, zero, starts, starts, longest, longest, zero, zero, zero

    def backward(grad, query, key, value, *rest, scale):
        starts, longest = rest[5], rest[7]
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        with ThreadPoolExecutor(1) as other:  # this thread is below autograd
            return other.submit(
                lambda: torch.autograd.grad(attend(*inputs, starts, longest, scale), inputs, grad)
            ).result()

    library = torch.library.Library("aten", "IMPL")
    library.impl("_cudnn_attention_forward", forward, "CPU")
    library.impl("_cudnn_attention_backward", backward, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("cudnn")
def test_what_the_operation_of_cudnn_means_equals_dense_attention(monkeypatch, kernel):
    """Run the forward and backward pass of PyTorch's own operation; the kernel itself needs a GPU."""
    monkeypatch.setattr("hybridflow.models.attention.attention_for", lambda case, shares_prompts: "varlen")
    assert kernel("cudnn") == "cudnn"
    layer = random_layer(16, 6, 2, 8, torch.float64)
    plan = PackedPlan.from_lengths([3, 5, 1, 5]).with_filling(2)
    ours = results(lambda *tensors: plan.attend(0, *tensors, AttentionForm(0.3)), layer, CPU)
    assert max(errors(ours, dense_results([[n] for n in (3, 5, 1, 5, 2)], layer, 0.3))) < 1e-13
