import pytest

from hybridflow.models.model_sizes import DecoderShape, flops_per_token, forward_flops, mfu, training_flops

SMALL = DecoderShape(
    num_layers=2, hidden_size=8, intermediate_size=16, num_heads=4, num_key_value_heads=2, vocab_size=10
)


def test_matrix_weights_are_projections_mlp_and_head():
    # per layer: q 8x8, k 8x4, v 8x4, o 8x8 = 192; gate, up and down 8x16 = 384; head 8x10 = 80
    assert SMALL.num_matrix_weights == 2 * (192 + 384) + 80
    assert DecoderShape(1, 8, 16, 4, 4, 10, gated_mlp=False).num_matrix_weights == 4 * 64 + 2 * 128 + 80
    # with a head dimension of 4: q 8x16, k 8x8, v 8x8, o 16x8 = 384
    assert DecoderShape(1, 8, 16, 4, 2, 10, head_dim=4).num_matrix_weights == 384 + 384 + 80


def test_flops_per_token_count_weights_and_attention():
    # scores and weighted values: 2 layers x 2 products x 2 flops x 8 wide x 5 tokens
    assert flops_per_token(SMALL, 5) == 2 * 1232 + 2 * 2 * 2 * 8 * 5


def test_flops_of_causal_sequences_sum_over_tokens():
    one_by_one = sum(flops_per_token(SMALL, i) for i in (1, 2, 3)) + sum(flops_per_token(SMALL, i) for i in (1, 2))
    assert forward_flops(SMALL, [3, 2]) == one_by_one
    assert training_flops(SMALL, [3, 2]) == 3 * one_by_one


def test_mfu_is_the_share_of_peak_flops_or_zero():
    assert mfu(flops=3e12, seconds=2.0, peak_flops=1e13) == pytest.approx(0.15)
    assert mfu(0.0, 0.0, 1e12) == mfu(1e12, 1.0, 0.0) == 0.0
