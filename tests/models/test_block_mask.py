import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from fixtures.dense_attention import seen_keys
from fixtures.peak_memory import peak_bytes
from hybridflow.models.block_mask import block_mask_of

CPU = torch.device("cpu")
FIXED = [
    ((1,),),
    ((128,),),
    ((129,),),
    ((300, 20, 10), (50,)),
    ((1, 1, 1, 1), (1,)),
    ((128, 128, 128), (256, 1)),
    ((5, 700), (5, 3, 700)),
]


LENGTHS = st.sampled_from([1, 3, 40, 127, 128, 129]) | st.integers(1, 300)
FAMILIES = st.lists(st.lists(LENGTHS, min_size=1, max_size=5).map(tuple), min_size=1, max_size=4).map(tuple)


def every_example(test):
    """Run a test on random families and on fixed ones."""
    for families in FIXED:
        test = example(families)(test)
    return settings(deadline=None, derandomize=True, max_examples=40)(given(FAMILIES)(test))


def blocks(counts: torch.Tensor, indices: torch.Tensor) -> list[list[int]]:
    assert counts.dtype == indices.dtype == torch.int32
    return [row[:count] for count, row in zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)]


@every_example
def test_blocks_equal_those_that_pytorch_finds_from_all_pairs(families):
    mask = block_mask_of(families, CPU)
    tokens = sum(map(sum, families))
    expected = create_block_mask(mask.mask_mod, None, None, tokens, tokens, device="cpu")
    assert mask.seq_lengths == expected.seq_lengths == (tokens, tokens)
    assert mask.BLOCK_SIZE == expected.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        ours, theirs = (
            blocks(getattr(x, f"{name}_num_blocks"), getattr(x, f"{name}_indices")) for x in (mask, expected)
        )
        assert ours == theirs, name


@every_example
def test_token_attends_to_its_trunk_and_its_sequence_up_to_itself(families):
    mask = block_mask_of(families, CPU)
    index = torch.arange(sum(map(sum, families)))
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask.mask_mod(zero, zero, index[:, None], index[None]), seen_keys(families))


def test_tensors_of_the_mask_are_aligned():
    mask = block_mask_of(((300, 21),), CPU)
    bounds = [cell.cell_contents for cell in mask.mask_mod.__closure__ or ()]
    assert [x.dtype for x in bounds] == [torch.int32] * 3
    tables = [getattr(mask, f"{name}_{what}") for name in ("kv", "full_q") for what in ("num_blocks", "indices")]
    assert {x.data_ptr() % 16 for x in [*bounds, *tables]} == {0}


def test_mask_of_64_thousand_tokens_holds_no_tensor_of_all_pairs():
    families = ((2000, *[1000] * 6),) * 8
    assert block_mask_of(families, CPU).seq_lengths == (64_000, 64_000)
    assert 64_000 < peak_bytes(lambda: block_mask_of(families, CPU)) < 8 * 64_000 * 64_000 / 1000  # bytes
