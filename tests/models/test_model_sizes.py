from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fixtures.families import write_family
from fixtures.published_models import DENSE, MIXTURES
from hybridflow.models.layer_pass import SeeingPlan
from hybridflow.models.loading import load_causal_lm, parameters_on_meta
from hybridflow.models.model_sizes import (
    DecoderShape,
    decoder_shape,
    flops_per_token,
    forward_flops,
    mfu,
    model_sizes,
    shape_of_model,
    training_flops,
)

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


WINDOWED = replace(SMALL, windows=(3, 0), state_size=7)


def test_windows_bound_the_tokens_that_a_layer_attends_to():
    # a state takes 6 FLOPs a number; a layer with a window of 3 sees 3 of 5 tokens, the other all
    assert flops_per_token(WINDOWED, 5) == 2 * 1232 + 2 * 2 * 8 * (3 + 5) + 6 * 7
    assert forward_flops(WINDOWED, [7, 2]) == sum(flops_per_token(WINDOWED, i) for i in (*range(1, 8), 1, 2))
    assert flops_per_token(replace(SMALL, windows=(0,)), 5) == 2 * 1232 + 2 * 2 * 8 * 5


IN_EACH_RUN = ("gemma-3-1b", "Mistral-7B-v0.1")


@pytest.mark.parametrize(
    "name", [name if name in IN_EACH_RUN else pytest.param(name, marks=pytest.mark.exhaustive) for name in DENSE]
)
def test_a_dense_model_has_the_published_number_of_parameters(name, tmp_path):
    kind, sizes, published, layers = DENSE[name]
    CONFIG_MAPPING[kind](**sizes).save_pretrained(tmp_path)
    found = model_sizes(tmp_path)
    assert found.parameters == published
    assert Counter(found.shape.windows) == layers
    assert found.shape == decoder_shape(tmp_path)


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_5_text", "gpt2", "phi3", "glm4"])
def test_weights_in_products_are_those_that_torch_counts(kind, tmp_path):
    path = write_family(tmp_path, kind)
    shape, model, tokens = decoder_shape(path), load_causal_lm(path), 64
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids, position_ids=torch.arange(tokens)[None], attention_plan=SeeingPlan(), use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    in_convolutions = sum(p.numel() for name, p in model.named_parameters() if "conv" in name)
    assert products == 2 * tokens * (shape.num_matrix_weights - in_convolutions)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_has_the_published_numbers_of_all_and_active_parameters(name):
    kind, sizes, published, active = MIXTURES[name]
    config = CONFIG_MAPPING[kind](**sizes)
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(published, abs=0.051)
    dense = DecoderShape(config.num_hidden_layers, config.hidden_size, 1, 1, 1, config.vocab_size)
    found = shape_of_model(dense, model, None).num_matrix_weights  # some cards count the embedding, some do not
    assert found / 1e9 - 0.06 <= active <= (found + config.vocab_size * config.hidden_size) / 1e9 + 0.06


def test_a_mixture_is_counted_by_hand(tmp_path):
    sizes = {"num_hidden_layers": 3, "num_experts": 6, "first_k_dense_replace": 1, "n_shared_experts": 2}
    path = write_family(tmp_path, "deepseek_v2", topk_method="greedy", **sizes)
    shape = decoder_shape(path)
    # latent attention: q 32x16 and 16x(4x12), kv 32x(16+4) and 16x(4x16), o 32x32; expert: 3 products 32x16
    attention, expert = 512 + 768 + 640 + 1024 + 1024, 3 * 32 * 16
    layers = 3 * attention + 3 * 32 * 48 + 2 * (4 * expert + 6 * 32)  # 2 of 6 experts and 2 shared; the router
    assert shape.num_matrix_weights == layers + 32 * 40
    assert (shape.intermediate_size, shape.experts_per_token) == ((48 + 2 * 4 * 16) // 3, 2)
    assert shape.attention_size == 4 * (12 + 8) // 2  # scores of 12 numbers, values of 8
    found, model = model_sizes(path), load_causal_lm(path)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.layer == sum(parameter.numel() for parameter in model.model.layers[1].parameters())
