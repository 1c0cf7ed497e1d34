"""The reward model's scores are those of the stock classifier on the same conversations."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForSequenceClassification

from hybridflow.config import Config
from hybridflow.errors import ConfigError, ModelError, RewardError
from hybridflow.protocol import DataProto
from hybridflow.workers import RewardModelWorker

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} <eos> {% endfor %}"


@pytest.fixture
def reward_model(tiny_model, tmp_path):
    """A sequence classifier with one label on the tiny llama, with the tokenizer of that directory."""
    source, path = tiny_model("llama"), tmp_path / "reward_model"
    torch.manual_seed(3)
    model = LlamaForSequenceClassification.from_pretrained(source, num_labels=1)
    model.config.pad_token_id = 0
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    for file in source.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


def config_of(path):
    return Config(model={"path": str(path)}, reward={"model_path": str(path)})


def batch_of(prompts, responses):
    columns = {"raw_prompts": np.empty(len(prompts), dtype=object), "solution_texts": np.array(responses, dtype=object)}
    columns["raw_prompts"][:] = prompts
    return DataProto.from_dict(non_tensors=columns)


def stock_scores(path, texts):
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = LlamaForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return [float(model(torch.tensor([tokenizer(text)["input_ids"]])).logits) for text in texts]


PROMPTS = [
    [{"role": "user", "content": "w3 w4"}],
    [{"role": "user", "content": "w7"}],
    [{"role": "user", "content": "w5 w6"}],
]
RESPONSES = ["w8 w9 w10", "", "w11"]


def test_scores_are_those_of_the_stock_classifier(reward_model):
    result = RewardModelWorker(config_of(reward_model)).score(batch_of(PROMPTS, RESPONSES))
    texts = [f"{prompt[0]['content']}\n{response}" for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    assert result.batch["scores"].tolist() == pytest.approx(stock_scores(reward_model, texts), rel=1e-4)
    assert not result.batch["reward_failed"].any()
    assert result.non_tensor_batch["reward_extras"].tolist() == [{}, {}, {}]


def test_its_own_chat_template_makes_the_text_without_a_generation_prompt(reward_model):
    file = reward_model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    result = RewardModelWorker(config_of(reward_model)).score_validation(batch_of(PROMPTS, RESPONSES))
    texts = [
        f"user {prompt[0]['content']} <eos> assistant {response} <eos>"
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    ]
    assert result.batch["scores"].tolist() == pytest.approx(stock_scores(reward_model, texts), rel=1e-4)


def test_a_conversation_that_is_too_long_is_an_error_with_both_numbers(reward_model):
    long = batch_of([PROMPTS[0]], [" ".join(["w3"] * 80)])
    with pytest.raises(RewardError, match=r"response 0 and its prompt have 82 tokens .* 64 positions"):
        RewardModelWorker(config_of(reward_model)).score(long)


def test_a_model_without_a_head_is_no_reward_model(tiny_model):
    with pytest.raises(ModelError, match=r"has no weights of a head \(score\.weight\)"):
        RewardModelWorker(config_of(tiny_model("llama")))


def test_a_classifier_with_two_labels_is_no_reward_model(tiny_model, tmp_path):
    LlamaForSequenceClassification.from_pretrained(tiny_model("llama"), num_labels=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has a head of 2 labels; give a sequence classifier with one label"):
        RewardModelWorker(config_of(tmp_path))


def test_a_function_and_a_model_together_are_refused(reward_model):
    from hybridflow.config import check

    with pytest.raises(ConfigError, match=r"reward\.model_path=.* and reward\.function=.* both give the score"):
        check(Config(reward={"model_path": str(reward_model), "function": "a.py:b"}))
