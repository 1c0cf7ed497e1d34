import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from fixtures.families import small_config, write_family
from hybridflow.config import Config, DataConfig, MemoryConfig, ModelConfig
from hybridflow.engines import TorchEngine
from hybridflow.errors import BatchError, DataConfigError, ModelError, RolloutError
from hybridflow.models.attention import PackedPlan
from hybridflow.models.loading import build_without_weights, load_causal_lm, load_value_model
from hybridflow.models.support import has_angles_of_length, num_positions
from hybridflow.rollout.base import Request, SamplingParams
from hybridflow.rollout.embedded import EmbeddedRollout
from hybridflow.trainers.build.preconditions import require_positions

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


def test_models_without_planned_attention_are_rejected(tmp_path):
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    AutoModelForCausalLM.from_config(transformers.FalconConfig(**sizes)).save_pretrained(tmp_path)
    message = "falcon models are not supported: their attention is not replaceable; use a model with causal attention"
    with pytest.raises(ModelError, match=message):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize("kind", ["phi3 longrope", "llama dynamic"])
def test_tokens_beyond_which_angles_depend_on_other_rows_are_an_error(tmp_path, rollout_rows, kind):
    path = str(write_family(tmp_path, kind))
    why = r"64 positions \(beyond them, its rotary angles depend on the longest sequence of a batch\)"
    engine = TorchEngine(path, "policy", model=ModelConfig(path=path), memory=MemoryConfig())
    assert engine.num_positions == 64
    engine.forward(rollout_rows([5, 2], [59, 3]))
    with pytest.raises(BatchError, match=f"a row has 65 tokens, but '.*' has {why}; lower data.max_prompt_length"):
        engine.forward(rollout_rows([5, 2], [60, 3]))
    with pytest.raises(RolloutError, match="5 prompt tokens and 60 new ones exceed the model's 64 positions"):
        EmbeddedRollout(engine.rollout_model()).submit(Request(0, [3] * 5, SamplingParams(60)))
    config = Config(model=ModelConfig(path=path), data=DataConfig(max_response_length=60))
    message = f"a row has 65 tokens, but the model has {why}; lower data.max_prompt_length=.* or .*_response_length=60"
    with pytest.raises(DataConfigError, match=message):
        require_positions(config, 65, "a row has 65 tokens")


def test_each_kind_of_layer_may_limit_the_positions():
    longrope = small_config("phi3 longrope").rope_parameters
    config = small_config("gemma3_text", rope_parameters={"full_attention": longrope, "sliding_attention": {}})
    config.max_position_embeddings = 256
    assert num_positions(config) == 64
    assert has_angles_of_length(config)
    assert num_positions(small_config("gpt2")) == 64  # n_positions


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
            "transformers has no CausalLM model of t5; use a model with causal attention such as Llama",
        ),
    ],
)
def test_other_kinds_of_models_are_rejected(tmp_path, model, message):
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bart", "are masked language models.*; use a model with causal"),
        ("roberta", "are masked language models.*; use a model with causal"),
        ("gemma4_text", "with layers of different sizes.*; use one with equal layers"),
        ("t5", "of t5; use a model with causal"),
    ],
)
def test_other_families_are_refused_in_a_sentence_that_names_them(tmp_path, kind, reason):
    if kind == "t5":
        transformers.T5ForConditionalGeneration(small_config(kind)).save_pretrained(tmp_path)
    else:
        AutoModelForCausalLM.from_config(small_config(kind)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"{'CausalLM' if kind == 't5' else kind} model.*{reason}"):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("cohere", "transformers has no TokenClassification class of them"), ("gpt2", "their head is not named score")],
)
def test_families_without_a_scalar_head_are_no_critics(tmp_path, kind, reason):
    write_family(tmp_path, kind)
    for load in (load_value_model, lambda path: build_without_weights(path, "value", torch.float32)):
        with pytest.raises(
            ModelError, match=f"{kind} models cannot be a critic or a reward model: {reason}; use a family whose"
        ):
            load(tmp_path)


def test_chunks_that_only_a_mask_tells_are_an_error_of_the_pass(tmp_path):
    AutoModelForCausalLM.from_config(
        small_config("llama4_text", layer_types=["chunked_attention"] * 2)
    ).save_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(
        ModelError, match="Llama4TextAttention is a layer of chunked_attention, which it tells by a mask"
    ):
        load_causal_lm(tmp_path)(ids, position_ids=torch.arange(3)[None], attention_plan=PackedPlan.from_lengths([3]))
