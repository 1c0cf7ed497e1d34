import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from hybridflow.errors import ModelError
from hybridflow.models.attention import PackedPlan
from hybridflow.models.loading import load_causal_lm

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(("family", "config"), [("GPT2", SMALL), ("Mistral", SMALL | {"sliding_window": None})])
def test_other_families_with_full_attention_work(tmp_path, family, config):
    config = getattr(transformers, f"{family}Config")(**config)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        logits = model(
            torch.tensor([[3, 4, 5, 6, 7]]),
            position_ids=torch.tensor([[0, 1, 0, 1, 2]]),
            attention_plan=PackedPlan.from_lengths([2, 3]),
            logits_to_keep=torch.tensor([1, 4]),
        ).logits[0]
        expected = torch.cat([eager(torch.tensor([ids])).logits[0, -1:] for ids in ([3, 4], [5, 6, 7])])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("Mistral", SMALL, "sliding_window=4096"),
        ("Qwen2", SMALL | {"use_sliding_window": True, "max_window_layers": 1}, "type sliding_attention"),
        ("Gemma2", SMALL | {"head_dim": 8}, "type sliding_attention"),
        ("Gemma2", SMALL | {"head_dim": 8, "layer_types": ["full_attention"] * 2}, "Gemma2Attention uses softcap"),
        ("Llama", SMALL | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
        ("Mamba", {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2}, "type linear_attention"),
        (
            "Bloom",
            {"vocab_size": 40, "hidden_size": 16, "n_layer": 2, "n_head": 2},
            "bloom models are not supported: their code does not take position_ids",
        ),
        (
            "Falcon",
            {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
            "falcon models are not supported: their attention is not replaceable",
        ),
    ],
)
def test_models_without_full_causal_attention_are_rejected(tmp_path, family, config, message):
    config = getattr(transformers, f"{family}Config")(**config)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"{message}.*use a model with full causal attention such as Llama"):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
            "are masked language models, but a causal language model is required",
        ),
        (
            transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
            ),
            "T5Config.* for this kind of AutoModel",
        ),
    ],
)
def test_other_kinds_of_models_are_rejected(tmp_path, model, message):
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_causal_lm(tmp_path)
