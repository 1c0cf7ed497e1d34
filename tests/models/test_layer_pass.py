"""What layers keep and use, seen without memory, against passes that compute."""

import pytest
import torch

from fixtures.families import write_family
from hybridflow.models.layer_pass import TOKENS, SeeingPlan, bytes_of_layers, see_layers
from hybridflow.models.loading import build_without_weights, load_causal_lm

KINDS = ("gemma2", "gpt2", "gpt_oss", "phi3", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "lfm2")


@pytest.mark.parametrize("kind", KINDS)
def test_layers_keep_the_bytes_that_autograd_keeps(kind, tmp_path):
    model, kept = load_causal_lm(write_family(tmp_path, kind)), {}
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}

    def keep(x):
        if (storage := x.untyped_storage()).data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return x

    hidden = torch.randn(1, TOKENS, 32, requires_grad=True)
    places = torch.arange(TOKENS)[None] % 64
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.base_model(inputs_embeds=hidden, position_ids=places, attention_plan=SeeingPlan(), use_cache=False)
    found = bytes_of_layers(build_without_weights(tmp_path, "policy", torch.float32))
    outside = TOKENS * 4 * 32 * 2  # of the last norm
    counted = sum(layer.kept for layer in found) * TOKENS + outside
    assert counted == pytest.approx(sum(storage.nbytes() for storage in kept.values()), rel=0.1)


def test_a_plan_sees_windows_heads_and_states(tmp_path):
    seen = see_layers(build_without_weights(write_family(tmp_path, "gemma2"), "policy", torch.bfloat16))
    assert {layer: (size.heads, size.kv_heads, size.form.window) for layer, size in seen.attention.items()} == {
        0: (4, 2, 4),
        1: (4, 2, None),
    }
    recurrent = see_layers(
        build_without_weights(write_family(tmp_path / "r", "qwen3_5_text"), "policy", torch.bfloat16)
    )
    assert list(recurrent.attention) == [1]
    assert recurrent.state_size == 4 * 8 * 8
    assert recurrent.state_bytes == 4 * 4 * 8 * 8 + 2 * (2 * 2 + 4) * 8 * 4  # and a convolution's last 4 tokens


@pytest.mark.parametrize("kind", ["jetmoe", "stablelm"])
def test_code_that_needs_values_or_ignores_the_plan_is_not_seen(kind, tmp_path):
    assert see_layers(build_without_weights(write_family(tmp_path, kind), "policy", torch.float32)) is None
