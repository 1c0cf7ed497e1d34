"""The scores of the reward model equal those of the classifier in transformers on the same conversations."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForSequenceClassification

from hybridflow.config import Config, check
from hybridflow.errors import ConfigError, ModelError, RewardError
from hybridflow.protocol import DataProto
from hybridflow.workers import RewardModelWorker

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} <eos> {% endfor %}"


@pytest.fixture
def reward_model(tiny_model, tmp_path):
    """Return the directory of a sequence classifier with one label, made of the tiny llama and its tokenizer."""
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


WORDS = ("w3 w4", "w7", "w5 w6")
PROMPTS = [[{"role": "user", "content": words}] for words in WORDS]
RESPONSES = ["w8 w9 w10", "", "w11"]


def test_scores_equal_those_of_the_transformers_classifier(reward_model):
    result = RewardModelWorker(config_of(reward_model)).score(batch_of(PROMPTS, RESPONSES))
    texts = [f"{words}\n{response}" for words, response in zip(WORDS, RESPONSES, strict=True)]
    assert result.batch["scores"].tolist() == pytest.approx(stock_scores(reward_model, texts), rel=1e-4)
    assert not result.batch["reward_failed"].any()
    assert result.non_tensor_batch["reward_extras"].tolist() == [{}, {}, {}]


def test_text_is_rendered_by_its_chat_template_without_generation_prompt(reward_model):
    file = reward_model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    result = RewardModelWorker(config_of(reward_model)).score_validation(batch_of(PROMPTS, RESPONSES))
    texts = [f"user {words} <eos> assistant {reply} <eos>" for words, reply in zip(WORDS, RESPONSES, strict=True)]
    assert result.batch["scores"].tolist() == pytest.approx(stock_scores(reward_model, texts), rel=1e-4)


def test_a_conversation_that_is_too_long_is_an_error_with_both_lengths(reward_model):
    long = batch_of([PROMPTS[0]], [" ".join(["w3"] * 80)])
    with pytest.raises(RewardError, match=r"response 0 and its prompt have 82 tokens.* 64 positions"):
        RewardModelWorker(config_of(reward_model)).score(long)


def test_a_reward_model_requires_a_head_of_one_label_and_no_function(tiny_model, tmp_path):
    with pytest.raises(ModelError, match=r"has no weights of a head \(score\.weight\)"):
        RewardModelWorker(config_of(tiny_model("llama")))
    LlamaForSequenceClassification.from_pretrained(tiny_model("llama"), num_labels=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has a head of 2 labels; use a sequence classifier with one label"):
        RewardModelWorker(config_of(tmp_path))
    with pytest.raises(ConfigError, match=r"reward\.model_path=.* with reward\.function=.*: both give the score"):
        check(Config(reward={"model_path": str(tmp_path), "function": "a.py:b"}))
