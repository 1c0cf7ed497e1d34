"""Runs on preferences: they learn, and what they learned is of use to the next command."""

import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hybridflow.observability import read_jsonl


@pytest.fixture
def run(task, tmp_path, hybridflow):
    """Runs a command on the pairs with changes; returns the run's directory."""

    def run(command, *changes, name="run"):
        outcome = hybridflow(command, task / "pairs.toml", f"trainer.run_dir={tmp_path / name}", *changes)
        assert outcome.status == 0, outcome.err
        return tmp_path / name

    return run


@pytest.mark.parametrize("changes", [[], ["offline.preference_loss=ipo"], ["lora.rank=4", "offline.optimizer.lr=1e-2"]])
def test_dpo_comes_to_prefer_what_it_was_shown(run, changes):
    rows = read_jsonl(run("dpo", "trainer.epochs=8", "offline.optimizer.lr=1e-3", *changes) / "metrics.jsonl")
    assert rows[0]["dpo/val_accuracy"] == 0.5  # the policy is its reference
    assert rows[1]["dpo/margin"] == 0.0
    assert rows[-1]["dpo/val_accuracy"] > 0.9
    assert rows[-1]["dpo/val_loss"] < 0.8 * rows[0]["dpo/val_loss"]
    assert rows[0]["dpo/val_loss"] == pytest.approx(25.0 if "ipo" in "".join(changes) else math.log(2))


def test_another_reference_can_be_named(run, task):
    same = read_jsonl(run("dpo", name="same") / "metrics.jsonl")
    named = read_jsonl(run("dpo", f"reference.model_path={task}/model", name="named") / "metrics.jsonl")
    assert [row.get("dpo/loss") for row in named] == [row.get("dpo/loss") for row in same]


def test_a_reward_model_learns_is_exported_and_scores_the_responses_of_a_run(run, task, tmp_path, hybridflow):
    learned = run("reward-model", "trainer.epochs=8", "offline.optimizer.lr=1e-3")
    rows = read_jsonl(learned / "metrics.jsonl")
    assert rows[0]["reward_model/val_loss"] == pytest.approx(math.log(2))
    assert rows[-1]["reward_model/val_accuracy"] > 0.9
    exported = tmp_path / "exported"
    assert hybridflow("export", learned, exported).status == 0
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(exported),
        AutoTokenizer.from_pretrained(exported),
    )
    assert (model.config.num_labels, model.config.pad_token_id) == (1, tokenizer.pad_token_id)
    refused = hybridflow("sft", task / "sft.toml", f"model.path={exported}", f"trainer.run_dir={tmp_path}/refused")
    assert "is a LlamaForSequenceClassification (a classifier or reward model), which does not generate text" in refused.err
    assert "is of a reward model, which writes no responses" in hybridflow("evaluate", "--run", learned).err
    changes = [f"reward.model_path={exported}", "reward.function=", "trainer.total_steps=1"]
    trained = tmp_path / "trained"
    assert hybridflow("train", task / "rl.toml", f"trainer.run_dir={trained}", *changes).status == 0
    for sample in read_jsonl(trained / "samples.jsonl"):
        ids = tokenizer(f"{sample['prompt']}\n{sample['response']}", add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            assert float(model(ids["input_ids"]).logits) == pytest.approx(sample["score"], abs=1e-5)


def test_what_does_not_fit_is_told_before_anything_starts(task, tmp_path, hybridflow):
    run_dir = f"trainer.run_dir={tmp_path}/run"
    outcome = hybridflow("reward-model", task / "pairs.toml", run_dir, "lora.rank=4")
    assert "lora.rank=4 does not fit a reward model" in outcome.err
    outcome = hybridflow("dpo", task / "sft.toml", run_dir)
    assert "column 'chosen' is missing; the file has prompt, response" in outcome.err
    outcome = hybridflow("dpo", task / "pairs.toml", run_dir, f"reference.model_path={tmp_path}/none")
    assert "is not a model directory" in outcome.err
    assert not (tmp_path / "run").exists()
