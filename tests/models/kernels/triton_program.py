"""Checks the Triton kernels without a GPU: `interpret` computes with them on the CPU, `compile` builds them for H100.

Needs Triton on PYTHONPATH; Triton reads TRITON_INTERPRET when a kernel is defined, so each mode is a process.
"""

import sys
from functools import partial

import torch
from torch import Tensor

from fixtures.triton_interpreter import mend_interpreter
from hybridflow.models.kernels import triton_elementwise, triton_exact, triton_paged_attention, triton_sampling
from hybridflow.models.kernels.elementwise import WIDEST, rms_norm, rotary, silu_mul
from hybridflow.models.kernels.library import use_kernels
from hybridflow.models.kernels.paged_attention import _by_gathering, addresses_of
from hybridflow.models.kernels.sampling import block_sums
from hybridflow.rollout.sampling import RowRules, SamplingKinds, _block_size, _kept, sample_rows, uniform_after

PAGE_SIZE, NUM_PAGES, UNUSED = 32, 60, 7
MOST_SHARED = 227 * 2**10
"""Bytes of shared memory that a program may have on an H100."""
COUNTS = [1, 31, 32, 33, 256, 257, 600, 511]
HEADS = [(4, 2, 16), (14, 2, 64), (3, 3, 20), (8, 1, 128)]
GENERATOR = torch.Generator().manual_seed(0)
use_kernels(False)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64).to(dtype)


def tables_of(counts: list[int]) -> Tensor:
    """Return tables of random pages, the last of each row its own; unused entries name a page of NaN."""
    tables = torch.full((len(counts), 20), UNUSED, dtype=torch.int32)
    for row, count in enumerate(counts):
        pages = 8 + torch.randperm(32, generator=GENERATOR)[: -(-count // PAGE_SIZE)]
        tables[row, : len(pages)] = pages.int()
        tables[row, len(pages) - 1] = 40 + row
    return tables


def check_attention(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, tolerance: float) -> None:
    keys, values = (normal(NUM_PAGES, PAGE_SIZE, kv_heads, dim, dtype=dtype) for _ in range(2))
    keys[UNUSED], values[UNUSED] = torch.nan, torch.nan
    counts, tables = torch.tensor(COUNTS), tables_of(COUNTS)
    joined = normal(len(counts), heads + 2 * kv_heads, dim, dtype=dtype)  # heads that are not contiguous
    query, key, value = joined.split([heads, kv_heads, kv_heads], dim=1)
    last = counts - 1
    slots = tables.gather(1, last[:, None] // PAGE_SIZE).squeeze(1).long() * PAGE_SIZE + last % PAGE_SIZE
    for row, count in enumerate(COUNTS):  # places after the last token are not read
        page = int(tables[row, (count - 1) // PAGE_SIZE])
        keys[page, (count - 1) % PAGE_SIZE + 1 :] = torch.nan
        values[page, (count - 1) % PAGE_SIZE + 1 :] = torch.nan
    expected_keys, expected_values = keys.clone(), values.clone()
    addresses = addresses_of(keys, values)
    triton_paged_attention.append(key, value, addresses, slots)
    expected_keys.flatten(0, 1).index_copy_(0, slots, key)
    expected_values.flatten(0, 1).index_copy_(0, slots, value)
    torch.testing.assert_close((keys, values), (expected_keys, expected_values), rtol=0, atol=0, equal_nan=True)
    scaling = dim**-0.5

    def attend(rows: slice, tables: Tensor, merges: bool = False) -> Tensor:
        sizes = {"page_size": PAGE_SIZE, "kv_heads": kv_heads, "merges": merges}
        return triton_paged_attention.attend(query[rows], addresses, tables[rows], counts[rows], scaling, **sizes)

    out = attend(slice(None), tables)
    exact = _by_gathering(query.double(), keys.double(), values.double(), tables, counts, scaling)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    # A row's result depends neither on other rows nor on the width of its table.
    assert torch.equal(attend(slice(6, 7), tables)[0], out[6])
    assert torch.equal(attend(slice(None), torch.cat([tables, tables], 1)), out)
    for merges in (False, True):  # a single part
        assert torch.equal(attend(slice(5), tables[:, :8], merges=merges), out[:5])
    # The addresses are read when the kernels run.
    moved = keys.clone(), values + 1
    addresses.copy_(addresses_of(*moved))
    torch.testing.assert_close(attend(slice(None), tables), out + 1, rtol=tolerance, atol=4 * tolerance)


@torch.no_grad()
def check_elementwise(dtype: torch.dtype, tolerance: float) -> None:
    close = {"rtol": tolerance, "atol": tolerance}
    x, weight = normal(5, 3, 40, dtype=dtype), normal(40, dtype=dtype)
    torch.testing.assert_close(triton_elementwise.norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6), **close)
    angles = normal(5, 20, dtype=torch.float32)
    part = normal(5, 7, 40, dtype=dtype)[:, 2:5]
    for heads in (x, part):
        turned = triton_elementwise.rotate(heads, angles.cos(), angles.sin())
        torch.testing.assert_close(turned, rotary(heads, angles.cos(), angles.sin()), **close)
        assert turned.is_contiguous()
    gates, up = normal(3, 1500, dtype=dtype), normal(3, 1500, dtype=dtype)
    torch.testing.assert_close(triton_elementwise.multiply_gated(gates, up), silu_mul(gates, up), **close)


def check_sums(dtype: torch.dtype) -> None:
    logits, temperatures = normal(3, 150, dtype=dtype), torch.tensor([1.0, 0.7, 2.0], dtype=torch.float64)
    logits[1, 32:64] = -torch.inf
    found = triton_sampling.sums_of_blocks(logits, temperatures, 32)
    torch.testing.assert_close(found, block_sums(logits, temperatures, 32), rtol=1e-5, atol=1e-6)
    assert (float(found[0][1, 1]), float(found[1][1, 1])) == (-torch.inf, 0.0)
    for bad in (torch.nan, torch.inf):
        logits[2, 140] = bad
        _, sums = triton_sampling.sums_of_blocks(logits, temperatures, 32)
        assert sums.isfinite().sum(-1).tolist() == [5, 5, 4]


def check_draws(dtype: torch.dtype) -> None:
    """Compare tokens with those of the operations of PyTorch, in float64 too; equal logits are common."""
    samplings = [(1.0, 0, 1.0), (0.0, 0, 1.0), (0.7, 9, 1.0), (1.3, 0, 0.8), (1.0, 20, 0.53), (0.8, 1, 1.0)]
    samplings += [(1.0, 500, 0.999), (1.0, 0, 1e-9), (1.0, 3, 1.0 / 3), (1.0, 7, 0.25)]
    rows, (temperatures, top_k, top_p) = len(samplings), map(torch.tensor, zip(*samplings, strict=True))
    temperatures, top_p = temperatures.double(), top_p.double()
    rules, kinds = RowRules(temperatures, top_k, top_p), SamplingKinds(greedy=True, restricted=True)
    states, positions = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=GENERATOR), torch.arange(rows)
    logits = normal(rows, 100, dtype=torch.float64).mul(3)
    logits[::4] = logits[::4].round()  # ties, and both zeros
    logits[1::4] = 0.0
    logits[2::4, 1::3] = -torch.inf
    logits = logits.to(dtype)
    triton_sampling.WIDE = 64
    wide = logits.float() / temperatures.masked_fill(temperatures == 0, 1.0)[:, None].float()
    floors, lasts = (x[:, None] for x in triton_sampling.kept_tokens(logits, temperatures, top_k, top_p))
    kept = (logits > floors) | ((logits == floors) & (torch.arange(100) <= lasts))
    possible = wide > -torch.inf  # a token without probability may be kept or not
    assert torch.equal(kept & possible, _kept(wide, rules) & possible)
    found = triton_sampling.draw(logits, states, positions, temperatures, (top_k, top_p), 32)
    expected = sample_rows(logits, uniform_after(states, positions), rules, kinds)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=2e-6, atol=2e-6)
    for shift in range(3):
        plain = triton_sampling.draw(logits, states, positions + shift, temperatures, None, 32)
        uniforms = uniform_after(states, positions + shift)
        expected = sample_rows(logits, uniforms, rules, SamplingKinds(greedy=True))
        assert torch.equal(plain[0], expected[0])
        torch.testing.assert_close(plain[1], expected[1], rtol=2e-6, atol=2e-6)
    for bad in (torch.nan, torch.inf):
        logits[:, 7] = bad
        _, log_probs = triton_sampling.draw(logits, states, positions, temperatures, None, 32)
        assert not log_probs.isfinite().any()
    logits = logits[5:7]  # restricted rows with an infinite logit
    inputs = (x[5:7] for x in (states, positions, temperatures))
    assert not triton_sampling.draw(logits, *inputs, (top_k[5:7], top_p[5:7]), 32)[1].isfinite().any()


def interpret() -> None:
    mend_interpreter()
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 2e-3)):  # the interpreter cannot multiply bfloat16
        for heads, kv_heads, dim in HEADS:
            check_attention(dtype, heads, kv_heads, dim, tolerance)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        check_elementwise(dtype, tolerance)
        check_sums(dtype)
        check_draws(dtype)


def compile_for_h100() -> None:
    """Build the kernels with the signatures that Triton makes of the arguments of their callers, without a launch."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class H100:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

    def launch(kernel, *args, grid, **options) -> None:
        built = kernel.run(*args, grid=grid, warmup=True, **options)
        assert built.asm["cubin"]
        assert built.metadata.shared <= MOST_SHARED
        if kernel in (triton_paged_attention._attend_to_part, triton_exact._linear):
            is_matrix = any(name in built.asm["ptx"] for name in ("mma.sync", "wgmma"))  # by tensor cores
            assert is_matrix == (args[0].dtype != torch.float32)

    driver.set_active(H100())
    JITFunction.__getitem__ = lambda kernel, grid: partial(launch, kernel, grid=grid)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, vocabulary in ((1, 1), (16, 151936)):
            logits, zeros = torch.zeros(rows, vocabulary, dtype=dtype), torch.zeros(rows, dtype=torch.int64)
            for restrictions in (None, (zeros, zeros.double())):
                size = _block_size(vocabulary)
                triton_sampling.draw(logits, zeros, zeros, zeros.double(), restrictions, size)
        for rows, heads, kv_heads, dim in ((1, 3, 3, 20), (16, 14, 2, 64)):
            counts, tables = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, 16, dtype=torch.int32)
            joined, addresses = torch.zeros(rows, heads + 2 * kv_heads, dim, dtype=dtype), counts.new_zeros(2)
            query, key, value = joined.split([heads, kv_heads, kv_heads], 1)
            triton_paged_attention.append(key, value, addresses, counts)
            for pages in (8, 16):
                sizes = {"page_size": PAGE_SIZE, "kv_heads": kv_heads}
                triton_paged_attention.attend(query, addresses, tables[:, :pages], counts, dim**-0.5, **sizes)
            triton_elementwise.rotate(query, *torch.zeros(2, rows, dim // 2))
        for rows, width in ((1, 40), (16, 896), (16, WIDEST)):
            x = torch.zeros(rows, width, dtype=dtype)
            triton_elementwise.norm(x, x[0], 1e-6)
            triton_elementwise.multiply_gated(x, x)
    for dtype in (torch.bfloat16, torch.float32):
        for rows, inputs, outputs in ((1, 40, 7), (300, 896, 151936)):
            x, bias = torch.zeros(rows, inputs, dtype=dtype), torch.zeros(outputs, dtype=dtype)
            residual = torch.empty(rows, outputs, dtype=dtype) if rows == 1 else None
            logits = triton_exact.linear(x, torch.zeros(outputs, inputs, dtype=dtype), bias, residual)
            triton_exact.log_probs(logits, torch.zeros(rows, dtype=torch.int64), torch.ones(rows, 1), True)


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_for_h100}[sys.argv[1]]()
