"""DPO and reward-model runs: they learn, and later commands use their results."""

import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hybridflow.observability import read_jsonl


@pytest.fixture
def run(task, tmp_path, hybridflow):
    """Return a function that runs a command on the preference pairs and returns the run directory."""

    def run(command, *changes, name="run"):
        outcome = hybridflow(command, task / "pairs.toml", f"trainer.run_dir={tmp_path / name}", *changes)
        assert outcome.status == 0, outcome.err
        return tmp_path / name

    return run


@pytest.mark.parametrize("changes", [[], ["offline.preference_loss=ipo"], ["lora.rank=4", "offline.optimizer.lr=1e-2"]])
def test_dpo_learns_to_prefer_the_chosen_responses(run, changes):
    rows = read_jsonl(run("dpo", "trainer.epochs=8", "offline.optimizer.lr=1e-3", *changes) / "metrics.jsonl")
    assert rows[0]["dpo/val_accuracy"] == 0.5  # the policy equals its reference
    assert rows[1]["dpo/margin"] == 0.0
    assert rows[-1]["dpo/val_accuracy"] > 0.9
    assert rows[-1]["dpo/val_loss"] < 0.8 * rows[0]["dpo/val_loss"]
    assert rows[0]["dpo/val_loss"] == pytest.approx(25.0 if "ipo" in "".join(changes) else math.log(2))


def test_dpo_with_an_explicit_reference_equals_the_default(run, task):
    same = read_jsonl(run("dpo", name="same") / "metrics.jsonl")
    named = read_jsonl(run("dpo", f"reference.model_path={task}/model", name="named") / "metrics.jsonl")
    assert [row.get("dpo/loss") for row in named] == [row.get("dpo/loss") for row in same]


def test_reward_model_learns_exports_and_scores_the_responses_of_a_run(run, task, tmp_path, hybridflow):
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
    rejected = hybridflow("sft", task / "sft.toml", f"model.path={exported}", f"trainer.run_dir={tmp_path}/rejected")
    assert "LlamaForSequenceClassification (a classifier or reward model), which does not generate text" in rejected.err
    assert "is a checkpoint of a reward model, which cannot generate" in hybridflow("evaluate", "--run", learned).err
    changes = [f"reward.model_path={exported}", "reward.function=", "trainer.total_steps=1"]
    trained = tmp_path / "trained"
    assert hybridflow("train", task / "rl.toml", f"trainer.run_dir={trained}", *changes).status == 0
    for sample in read_jsonl(trained / "samples.jsonl"):
        ids = tokenizer(f"{sample['prompt']}\n{sample['response']}", add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            assert float(model(ids["input_ids"]).logits) == pytest.approx(sample["score"], abs=1e-5)


def test_invalid_preference_runs_are_rejected_before_writing_files(task, tmp_path, hybridflow):
    run_dir = f"trainer.run_dir={tmp_path}/run"
    outcome = hybridflow("reward-model", task / "pairs.toml", run_dir, "lora.rank=4")
    assert "lora.rank=4 is not supported by `hybridflow reward-model`" in outcome.err
    outcome = hybridflow("dpo", task / "sft.toml", run_dir)
    assert "column 'chosen' is missing; the file has prompt, response" in outcome.err
    outcome = hybridflow("dpo", task / "pairs.toml", run_dir, f"reference.model_path={tmp_path}/none")
    assert "is not a model directory" in outcome.err
    assert not (tmp_path / "run").exists()
