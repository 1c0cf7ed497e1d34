"""`hybridflow sft` on conversations with a tool: the model then calls it, as an episode reads the call."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fixtures.chat_tokenizers import chat_tokenizer
from hybridflow.data import load_tokenizer, stop_token_ids
from hybridflow.environments import AssistantTurn, ChatRenderer, Tool, ToolCall
from hybridflow.runtime.observe import read_jsonl


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def conversation(a, b):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    return [
        {"role": "user", "content": f"{a} + {b}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": str(a + b)},
        {"role": "assistant", "content": f"It is {a + b}."},
    ]


@pytest.fixture
def model(tmp_path):
    """Return the directory of a tiny model with the chat template of Qwen2.5."""
    tokenizer = chat_tokenizer("qwen2_5")
    tokenizer.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.runs
@pytest.mark.own_run("sft: on conversations with a tool")
def test_a_model_learns_to_call_a_tool(model, tmp_path, hybridflow):
    greeting = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    tools = [Tool.of(add).schema()]
    rows = [{"messages": messages, "tools": tools} for messages in (conversation(2, 3), greeting)]
    (tmp_path / "episodes.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    outcome = hybridflow(
        "sft",
        *(f"model.path={model}", f"data.train_files=['{tmp_path}/episodes.jsonl']"),
        *(f"data.val_files=['{tmp_path}/episodes.jsonl']", f"trainer.run_dir={tmp_path}/run"),
        *("data.max_prompt_length=1000", "data.max_response_length=300", "offline.batch_size=2"),
        *("offline.optimizer.lr=3e-3", "trainer.epochs=120", "trainer.val_every=60", "controller.threads=1"),
    )
    assert outcome.status == 0, outcome.err
    losses = [row["sft/val_loss"] for row in read_jsonl(tmp_path / "run/metrics.jsonl") if "sft/val_loss" in row]
    assert losses[0] > 4
    assert losses[-1] < 0.1
    assert hybridflow("export", tmp_path / "run", tmp_path / "exported").status == 0
    tokenizer = load_tokenizer(tmp_path / "exported")
    stop_ids = stop_token_ids(tokenizer, tmp_path / "exported")
    renderer = ChatRenderer(tokenizer, [Tool.of(add)])
    learned = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    turns = []
    for question in ("2 + 3?", "Hello"):
        prompt = torch.tensor([renderer.start([{"role": "user", "content": question}]).ids])
        found = learned.generate(prompt, max_new_tokens=100, do_sample=False, eos_token_id=list(stop_ids))
        sampled = found[0, prompt.shape[1] :].tolist()
        assert sampled[-1] in stop_ids
        turns.append(renderer.parse(sampled, stop_ids))
    assert turns == [AssistantTurn("", calls=(ToolCall("add", {"a": 2, "b": 3}),)), AssistantTurn("Hi.")]


def test_rows_that_the_template_cannot_write_end_the_run_before_it_starts(model, tmp_path, hybridflow):
    tokenizer = chat_tokenizer("qwen2_5")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    tokenizer.save_pretrained(model)
    rows = [{"messages": conversation(1, 2)[:1] + conversation(1, 2)[3:]}, {"messages": conversation(1, 2)}]
    (tmp_path / "episodes.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = [f"model.path={model}", f"data.train_files=['{tmp_path}/episodes.jsonl']", "offline.batch_size=2"]
    outcome = hybridflow("sft", *settings, f"trainer.run_dir={tmp_path}/run")
    assert outcome.status == 2
    problem = "episodes.jsonl: line 2: the chat template writes calls of tools in a format that is not known"
    assert problem in outcome.err
    assert not (tmp_path / "run").exists()
