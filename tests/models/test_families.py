"""Each family trains, adapts, generates, resumes and leaves as transformers computes it."""

import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from fixtures.families import FAMILIES, write_family
from hybridflow.checkpoint import CheckpointStore, export_model, load_state, save_state
from hybridflow.config import LoRAConfig, MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine
from hybridflow.engines.packing import pack, pad
from hybridflow.errors import ModelError
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.shared_prompts import SharedPromptPlan
from hybridflow.protocol import DataProto
from hybridflow.rollout.base import Request, SamplingParams
from hybridflow.rollout.embedded import EmbeddedRollout

IN_EACH_RUN = (
    *("llama", "mistral", "qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2", "apertus"),
    *("gemma", "phi3", "olmo2", "gpt2", "gpt_neox", "granitemoe", "ernie4_5_moe"),
    *("gemma2", "gpt_oss", "qwen3_5_text", "phi3 longrope", "llama dynamic"),
)
FEW = ("gemma2", "gpt_oss", "qwen2_moe", "qwen3_5_text")


def families(in_each_run):
    """Return the decorator of a test of all families, of which those in each run are in the fast lane."""
    marks = {kind: () if kind in in_each_run else pytest.mark.exhaustive for kind in FAMILIES}
    return pytest.mark.parametrize("kind", [pytest.param(kind, marks=mark) for kind, mark in marks.items()])


PROMPTS = [[5, 9, 33, 36], [5, 9, 33, 36], [8, 2]]
RESPONSES = [[7, 30, 4], [8, 2, 2, 30, 21, 22], [22, 3, 11, 17, 6]]
LAYOUTS = {
    "shared": lambda rows: pack(rows, attention="flex"),
    "packed": lambda rows: pack(rows, share_prompts=False),
    "padded": pad,
}
EXACT = {"rtol": 1e-5, "atol": 1e-5}


def read(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def log_probs_of(model):
    """Return the log-probs of all response tokens, by transformers alone, one sequence at a time."""

    def one(prompt, response):
        logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)

    return torch.cat([one(*row) for row in zip(PROMPTS, RESPONSES, strict=True)])


@pytest.fixture
def rows():
    """Return the sequences as rows, two of which share a prompt."""
    width, longest = max(map(len, PROMPTS)), max(map(len, RESPONSES))
    ids, real = torch.zeros(2, len(PROMPTS), width + longest, dtype=torch.int64)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        places = slice(width - len(prompt), width + len(response))
        ids[row, places], real[row, places] = torch.tensor(prompt + response), 1
    return DataProto.from_dict({"input_ids": ids, "attention_mask": real, "response_mask": real[:, width:].bool()})


@pytest.fixture
def build(tmp_path):
    """Return a function that writes a model of a family, and one that builds engines of it."""

    def build(kind, lr=0.01):
        path = write_family(tmp_path / "came", kind)
        model, memory, optimizer = ModelConfig(path=str(path)), MemoryConfig(), OptimizerConfig(lr=lr)
        options = {"model": model, "memory": memory, "optimizer": optimizer}
        return path, lambda **more: TorchEngine(str(path), "policy", **options, **more)

    return build


def loss(outputs, part):
    return outputs["log_probs"].sum(), {}


def require_greedy_text(engine, model):
    """Compare two responses to each of two prompts with those of transformers."""
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=8, pad_token_id=0)
    for number, prompt in enumerate(PROMPTS[1:]):
        engine.submit(Request(number, prompt, SamplingParams(8, temperature=0.0), group_size=2))
    done = []
    while engine.has_unfinished():
        engine.step()
        done += engine.finished()
    assert len(done) == 4
    for each in done:
        prompt = torch.tensor([PROMPTS[1:][each.request_id]])
        assert each.token_ids == model.generate(prompt)[0, prompt.shape[1] :].tolist()


def require_same_next_update(engine, resumed, rows, directory):
    """Compare the next update of an engine with that of one that gets its saved state, bit for bit."""
    with CheckpointStore(directory).begin(1, info={}) as checkpoint:
        save_state(engine.state_dict(), checkpoint / "actor")
    resumed.load_state_dict(load_state(directory / "step_000001" / "actor"))
    for each in (engine, resumed):
        each.update(rows, loss)
    assert all(torch.equal(weight, resumed.parameters[name]) for name, weight in engine.parameters.items())


@families(IN_EACH_RUN)
def test_family_trains_as_it_is_and_leaves_as_it_came(build, tmp_path, kind, rows):
    came, engine_of = build(kind, lr=0.0)
    reference, engine = read(came), engine_of()
    engine.update(rows, loss)
    assert isinstance(LAYOUTS["shared"](rows).plan, SharedPromptPlan)
    wanted = log_probs_of(reference)
    wanted.sum().backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    largest = max(float(gradient.norm()) for gradient in gradients.values() if gradient is not None)
    for layout, arrange in LAYOUTS.items():
        found = engine.row_forward.compute(arrange(rows))["log_probs"][rows.batch["response_mask"]]
        torch.testing.assert_close(found, wanted, **EXACT, msg=lambda text, layout=layout: f"{layout}: {text}")
        engine.model.zero_grad()
        found.sum().backward()
        for name, parameter in engine.model.named_parameters():
            here, there = (torch.zeros(()) if x is None else x for x in (parameter.grad, gradients[name]))
            assert float((here - there).norm()) <= 1e-5 * float(there.norm()) + 1e-7 * largest, (layout, name)
    export_model({name: weight.detach() for name, weight in engine.parameters.items()}, came, tmp_path / "left")
    before, after = (load_file(directory / "model.safetensors") for directory in (came, tmp_path / "left"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    with torch.no_grad():
        assert torch.equal(log_probs_of(read(tmp_path / "left")), wanted)


@families(FEW)
def test_family_generates_and_resumes_as_it_is(build, tmp_path, kind, rows):
    came, engine_of = build(kind)
    for paged in (False, True):
        require_greedy_text(EmbeddedRollout(load_causal_lm(came), paged=paged), read(came))
    engine = engine_of()
    engine.update(rows, loss)
    require_same_next_update(engine, engine_of(), rows, tmp_path / "checkpoints")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@families(FEW)
def test_adapters_learn_alone_generate_resume_and_leave_merged(build, tmp_path, kind, rows):
    from peft import PeftModel

    came, engine_of = build(kind)
    model = load_causal_lm(came)
    tied = model.get_input_embeddings().weight
    linear = [name for name, m in model.named_modules() if type(m) is nn.Linear and m.weight is not tied]
    targets = {leaf for leaf in (name.rpartition(".")[2] for name in linear) if not leaf.isdigit()}  # ctrl has 0 and 2
    if not targets:  # of GPT-2, whose layers are convolutions
        with pytest.raises(ModelError, match="the model has no linear layer named c_attn; valid names: lm_head"):
            engine_of(lora=LoRAConfig(rank=2, targets=("c_attn",)))
        return
    try:
        lora = LoRAConfig(rank=2, alpha=4.0, targets=tuple(sorted(targets)))
        engine = engine_of(lora=lora)
    except ModelError as error:
        experts = re.match(r"lora\.targets: (.*) are the experts of .* models, on which adapters are not", str(error))
        lora = LoRAConfig(rank=2, alpha=4.0, targets=tuple(sorted(targets - set(experts[1].split(", ")))))
        engine = engine_of(lora=lora)
    base = {name: weight.detach().clone() for name, weight in engine.model.named_parameters()}
    for _ in range(2):
        engine.update(rows, loss)
    changed = {name for name, weight in engine.model.named_parameters() if not torch.equal(weight, base[name])}
    assert changed == set(engine.parameters)
    assert len(changed) == 2 * sum(name.rpartition(".")[2] in lora.targets for name in linear)
    require_same_next_update(engine, engine_of(lora=lora), rows, tmp_path / "checkpoints")
    with CheckpointStore(tmp_path / "checkpoints").begin(2, info={}) as checkpoint:
        save_state(engine.state_dict(), checkpoint / "actor")
    export_model(tmp_path / "checkpoints" / "step_000002", came, tmp_path / "merged")
    export_model(tmp_path / "checkpoints" / "step_000002", came, tmp_path / "adapter", adapter=True)
    merged, found = read(tmp_path / "merged"), engine.forward(rows)["log_probs"][rows.batch["response_mask"]]
    with torch.no_grad():
        torch.testing.assert_close(log_probs_of(merged), found, **EXACT)
        torch.testing.assert_close(
            log_probs_of(PeftModel.from_pretrained(read(came), tmp_path / "adapter")), found, **EXACT
        )
    rollout = EmbeddedRollout(engine.rollout_model(), shares_model=False)
    rollout.start_loading(engine.weight_shapes())
    rollout.load(engine.weights())
    rollout.finish_loading(1)
    require_greedy_text(rollout, merged)
