"""What is decided by the device when a model is sharded; `test_layouts.py` checks the numbers."""

import pytest
import torch
import torch.distributed as dist

from hybridflow.config import ParallelConfig
from hybridflow.engines.process_group import join_alone
from hybridflow.engines.ranks import Ranks
from hybridflow.engines.sharding import shard_model, units_of
from hybridflow.models.loading import build_without_weights


class AllocatesError(Exception):
    """The model is sharded, and its memory would be allocated on the device next."""


@pytest.fixture
def ranks():
    join_alone()
    yield Ranks(ParallelConfig(), torch.device("cpu"), needs_mesh=True)
    dist.destroy_process_group()


def test_a_head_that_is_the_embedding_is_not_a_unit(tiny_model):
    model = build_without_weights(str(tiny_model("qwen2", tie_word_embeddings=True)), "policy", torch.float32)
    assert units_of(model) == [*model.model.layers]
    critic = build_without_weights(str(tiny_model("qwen2", tie_word_embeddings=True)), "value", torch.float32)
    assert units_of(critic) == [critic.model.embed_tokens, *critic.model.layers]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_layers_are_gathered_ahead_on_a_gpu_only(tiny_model, ranks, monkeypatch, device):
    model = build_without_weights(str(tiny_model("qwen2", num_hidden_layers=3)), "policy", torch.float32)

    def to_empty(device):
        raise AllocatesError(device)

    monkeypatch.setattr(model, "to_empty", to_empty)
    with pytest.raises(AllocatesError, match=device):
        shard_model(model, ranks, torch.device(device), torch.float32)
    modules = [model, *units_of(model)]
    assert modules == [model, model.model.embed_tokens, *model.model.layers, model.lm_head]
    found = [module._get_fsdp_state()._states_to_forward_prefetch for module in modules]
    following = [[module._get_fsdp_state()] for module in modules[1:]]
    assert found == ([*following, []] if device == "cuda" else [[]] * 6)
