"""The placement of each weight, and the checks of models and sizes; `tests/engines` checks the numbers."""

from types import SimpleNamespace

import pytest
from torch.distributed.tensor import Replicate, Shard

from hybridflow.errors import ModelError
from hybridflow.models.tensor_parallel import placement_of, require_tensor_parallel

CONFIG = {"model_type": "qwen2", "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}
CONFIG["vocab_size"] = 40


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("model.embed_tokens.weight", Shard(0)),
        ("model.layers.0.self_attn.q_proj.weight", Shard(0)),
        ("model.layers.0.self_attn.k_proj.bias", Shard(0)),
        ("model.layers.0.self_attn.o_proj.weight", Shard(1)),
        ("model.layers.0.self_attn.o_proj.bias", Replicate()),
        ("model.layers.0.self_attn.q_norm.weight", Replicate()),
        ("model.layers.1.mlp.gate_proj.weight", Shard(0)),
        ("model.layers.1.mlp.down_proj.weight", Shard(1)),
        ("model.norm.weight", Replicate()),
        ("lm_head.weight", Shard(0)),
        ("score.weight", Replicate()),
    ],
)
def test_outputs_are_sharded_by_rows_and_inputs_by_columns(name, placement):
    assert placement_of(name) == placement


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (8, {}, "parallel.tensor=8 does not divide num_attention_heads=12 and num_key_value_heads=4"),
        (4, {"intermediate_size": 98}, "parallel.tensor=4 does not divide intermediate_size=98"),
        (4, {"vocab_size": 5}, "parallel.tensor=4 is too large for vocab_size=5"),
        (
            2,
            {"model_type": "gpt2"},
            "is not supported for gpt2 models, only for llama, qwen2, qwen3; use parallel.tensor = 1",
        ),
    ],
)
def test_unsupported_sizes_and_families_are_rejected(size, changes, message):
    with pytest.raises(ModelError, match=message):
        require_tensor_parallel(SimpleNamespace(**CONFIG | changes), size)


def test_one_rank_supports_any_family():
    require_tensor_parallel(SimpleNamespace(model_type="gpt2"), 1)
    require_tensor_parallel(SimpleNamespace(**CONFIG), 4)
