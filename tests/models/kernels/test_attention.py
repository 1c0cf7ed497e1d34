import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hybridflow.errors import ModelError
from hybridflow.models.kernels.attention import append_and_attend, causal_attention

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
HEADS = [(4, 4, 64), (8, 2, 32), (6, 3, 20), (1, 1, 128), (2, 1, 16)]

shapes = pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


def draw(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def exact_attention(query, key, value, lengths, scaling):
    """Compute attention in float64, one sequence at a time."""
    outs = []
    for q, k, v in zip(*(x.double().split(lengths) for x in (query, key, value)), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def require_close(ours, exact, dtype):
    assert ours.dtype == dtype
    assert float((ours.double() - exact.double()).norm() / exact.double().norm()) < TOLERANCE[dtype]


@dtypes
@shapes
@pytest.mark.parametrize(
    "families", [[[n] for n in (1, 17, 16, 3, 38, 1, 33)], [[17, 3, 1, 20], [1, 2, 2], [5], [16, 16]]]
)
def test_attention_and_gradients_equal_sequences_that_repeat_their_trunk(heads, kv_heads, dim, dtype, families):
    tokens = sum(map(sum, families))
    inputs = [draw(tokens, n, dim, dtype=dtype, seed=n + i) for i, n in enumerate((heads, kv_heads, kv_heads))]
    leaves = [x.requires_grad_() for x in inputs]
    weights = draw(tokens, heads, dim, dtype=dtype, seed=9)
    repeated, lengths, counted, start = [], [], [], 0
    for trunk, *branches in families:
        begin = start + trunk
        for i, branch in enumerate(branches or [0]):
            repeated += [*range(start, start + trunk), *range(begin, begin + branch)]
            lengths.append(trunk + branch)
            counted += [i == 0] * trunk + [True] * branch
            begin += branch
        start = begin
    ours = causal_attention(*leaves, families, 0.3)
    exact = exact_attention(*(x[repeated] for x in leaves), lengths, 0.3)[counted]
    order = [token for token, is_counted in zip(repeated, counted, strict=True) if is_counted]
    require_close(ours[order].detach(), exact.detach(), dtype)
    grads = torch.autograd.grad(ours, leaves, weights)
    for mine, theirs in zip(grads, torch.autograd.grad(exact, leaves, weights[order].double()), strict=True):
        require_close(mine, theirs, dtype)


@dtypes
@shapes
@pytest.mark.parametrize("is_strided", [False, True])
def test_new_token_is_cached_and_attends_to_its_row(heads, kv_heads, dim, dtype, is_strided):
    ends, capacity = [0, 5, 31, 40, 16], 41
    rows = len(ends)
    keys, values = (draw(rows, kv_heads, capacity, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    query, key, value = (draw(rows, n, dim, dtype=dtype, seed=n) for n in (heads, kv_heads, kv_heads))
    if is_strided:  # the dims of a head are not adjacent
        query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    before = keys.clone()
    out = append_and_attend(query, key, value, keys, values, torch.tensor(ends), max(ends), 0.3)
    for row, end in enumerate(ends):
        assert torch.equal(keys[row, :, end], key[row])
        assert torch.equal(values[row, :, end], value[row])
        assert torch.equal(keys[row, :, :end], before[row, :, :end])
        assert torch.equal(keys[row, :, end + 1 :], before[row, :, end + 1 :])
        past = (x[row, :, : end + 1].double()[None] for x in (keys, values))
        q = query[row].double()[None, :, None]
        require_close(out[row], scaled_dot_product_attention(q, *past, scale=0.3, enable_gqa=True)[0, :, 0], dtype)


def test_memory_beyond_a_row_is_not_read():
    keys, values = (torch.full((2, 1, 8, 16), torch.nan) for _ in range(2))
    keys[:, :, :3], values[:, :, :3] = 1.0, 2.0
    one = torch.ones(2, 1, 16)
    out = append_and_attend(one, one, 2 * one, keys, values, torch.tensor([3, 2]), 3, 1.0)
    torch.testing.assert_close(out, 2 * one)


def test_large_score_does_not_overflow():
    query, key = torch.full((2, 1, 16), 30.0), torch.full((2, 1, 16), 30.0)
    key[0] = 0
    value = torch.stack([torch.zeros(1, 16), torch.ones(1, 16)])
    torch.testing.assert_close(causal_attention(query, key, value, [[2]], 1.0), value)


def test_results_do_not_depend_on_threads_or_other_rows(with_threads):
    families = [[30], [7], [35, 4, 6]]
    query, key, value = (draw(82, 4, 32, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(3))
    single, double = with_threads(lambda: causal_attention(query, key, value, families, 0.2))
    assert torch.equal(single, double)
    alone = causal_attention(query[30:37], key[30:37], value[30:37], [[7]], 0.2)
    assert torch.equal(alone, single[30:37])


@pytest.mark.parametrize("families", [[[3]], [[3, 3]], [[5, 0]]])
def test_lengths_that_do_not_match_tokens_are_an_error(families):
    x = torch.ones(5, 2, 16)
    with pytest.raises(ModelError, match="the lengths of families are invalid: expected 5 tokens"):
        causal_attention(x, x, x, families, 1.0)
