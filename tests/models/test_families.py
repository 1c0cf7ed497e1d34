"""Each family that the loader lets in trains as transformers computes it, and leaves as it came."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fixtures.families import write_family
from hybridflow.checkpoint import export_model
from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine

IN_EACH_RUN = (
    *("llama", "mistral", "qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2", "apertus"),
    *("gemma", "phi3", "olmo2", "gpt2", "gpt_neox", "granitemoe", "ernie4_5_moe"),
    *("gemma2", "gpt_oss", "qwen3_5_text"),
)
MORE = (
    *(
        "afmoe",
        "arcee",
        "aria_text",
        "biogpt",
        "bitnet",
        "codegen",
        "cohere",
        "ctrl",
        "deepseek_v2",
        "dots1",
        "ernie4_5",
    ),
    *("exaone", "exaone4", "exaone_moe", "flex_olmo", "glm", "glm4", "glm4_moe_lite", "gpt_bigcode", "gptj", "granite"),
    *("granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "jetmoe"),
    *("lfm2", "llama4_text", "minicpm3", "ministral3", "nanochat", "olmo", "olmoe", "opt", "persimmon", "phi"),
    *("cohere2", "gemma3_text", "olmo3", "olmo_hybrid", "qwen3_5_moe_text"),
    *("phimoe", "qwen2", "qwen3", "qwen3_next", "seed_oss", "smollm3", "solar_open", "starcoder2"),
    "youtu",
)
SEQUENCES = [[5, 9, 33, 36, 7], [8, 2, 2, 30, 21, 22, 3, 11]]


def log_probs_of(model):
    def one(sequence):
        ids = torch.tensor(sequence)
        logits = model(ids[None]).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)

    with torch.no_grad():
        return torch.cat([one(sequence) for sequence in SEQUENCES])


@pytest.mark.parametrize("kind", [*IN_EACH_RUN, *(pytest.param(k, marks=pytest.mark.exhaustive) for k in MORE)])
def test_family_trains_as_it_is_and_leaves_as_it_came(tmp_path, kind, rows_of):
    came = write_family(tmp_path / "came", kind)
    reader = {"dtype": torch.float32, "attn_implementation": "eager"}
    wanted = log_probs_of(AutoModelForCausalLM.from_pretrained(came, **reader).eval())
    engine = TorchEngine(
        str(came), "policy", model=ModelConfig(path=str(came)), memory=MemoryConfig(), optimizer=OptimizerConfig(lr=0.0)
    )
    rows = rows_of(SEQUENCES)
    engine.update(rows, lambda outputs, part: (outputs["log_probs"].sum(), {}))
    found = engine.forward(rows)["log_probs"][rows.batch["response_mask"]]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    export_model({name: weight.detach() for name, weight in engine.parameters.items()}, came, tmp_path / "left")
    before, after = (load_file(directory / "model.safetensors") for directory in (came, tmp_path / "left"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert torch.equal(log_probs_of(AutoModelForCausalLM.from_pretrained(tmp_path / "left", **reader).eval()), wanted)


@pytest.fixture
def rows_of():
    """Return a function from sequences to rows in which all tokens but the first are responses."""
    from hybridflow.protocol import DataProto

    def build(sequences):
        longest = max(map(len, sequences))
        ids = torch.tensor([[0] * (longest - len(s)) + s for s in sequences])
        mask = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in sequences])
        columns = {"input_ids": ids, "attention_mask": mask, "response_mask": (mask[:, :-1] > 0)}
        return DataProto.from_dict(columns)

    return build
