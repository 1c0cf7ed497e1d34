"""DPO and reward-model runs: they learn, and later commands use their results."""

import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hybridflow.runtime.observe import read_jsonl


@pytest.fixture
def pairs(run, task):
    """Return a function that trains a command on the preference pairs; it returns the directory and its metrics."""

    def train(command, *changes, name="run"):
        changes = (f"data.val_files=['{task}/pairs.parquet']", "trainer.total_steps=0", *changes)
        directory = run(*changes, command=command, recipe="pairs.toml", name=name)
        return directory, read_jsonl(directory / "metrics.jsonl")

    return train


@pytest.mark.runs
@pytest.mark.own_run("dpo: other losses and references")
def test_dpo_of_other_kinds_learns_and_a_named_reference_is_the_default(pairs, task):
    for more in (["offline.preference_loss=ipo"], ["lora.rank=4", "offline.optimizer.lr=1e-2"]):
        _, rows = pairs("dpo", "trainer.epochs=4", "offline.optimizer.lr=1e-3", *more, name=more[0])
        assert rows[0]["dpo/val_loss"] == pytest.approx(25.0 if "ipo" in more[0] else math.log(2))
        assert rows[-1]["dpo/val_accuracy"] > 0.9
        assert rows[-1]["dpo/val_loss"] < 0.8 * rows[0]["dpo/val_loss"]
    _, same = pairs("dpo", "trainer.total_steps=2", name="same")
    _, named = pairs("dpo", "trainer.total_steps=2", f"reference.model_path={task}/model", name="named")
    assert [row.get("dpo/loss") for row in named] == [row.get("dpo/loss") for row in same]


@pytest.mark.runs
@pytest.mark.own_run("dpo: a reward model")
def test_reward_model_learns_exports_and_scores_the_responses_of_a_run(pairs, run, task, tmp_path, hybridflow):
    learned, rows = pairs("reward-model", "trainer.epochs=4", "offline.optimizer.lr=1e-3")
    assert rows[0]["reward_model/val_loss"] == pytest.approx(math.log(2))
    assert rows[-1]["reward_model/val_accuracy"] > 0.9
    exported = tmp_path / "exported"
    assert hybridflow("export", learned, exported).status == 0
    model = AutoModelForSequenceClassification.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert (model.config.num_labels, model.config.pad_token_id) == (1, tokenizer.pad_token_id)
    problem = "LlamaForSequenceClassification (a classifier or reward model), which does not generate text"
    run(f"model.path={exported}", command="sft", recipe="sft.toml", status=1, problem=problem, name="rejected")
    assert "is a checkpoint of a reward model, which cannot generate" in hybridflow("evaluate", "--run", learned).err
    validates = f"data.val_files=['{task}/test.parquet']"
    trained = run(f"reward.model_path={exported}", "reward.function=", validates, name="trained")
    for sample in read_jsonl(trained / "samples.jsonl"):
        ids = tokenizer(f"{sample['prompt']}\n{sample['response']}", add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            assert float(model(ids["input_ids"]).logits) == pytest.approx(sample["score"], abs=1e-5)


@pytest.mark.parametrize(
    ("command", "recipe", "changes", "problem"),
    [
        ("reward-model", "pairs", ["lora.rank=4"], "lora.rank=4 is not supported with `hybridflow reward-model`"),
        ("dpo", "pairs", ["reference.model_path=none"], "is not a model directory"),
    ],
)
def test_invalid_preference_runs_are_rejected_before_writing_files(
    hybridflow, task, tmp_path, command, recipe, changes, problem
):
    outcome = hybridflow(command, task / f"{recipe}.toml", f"trainer.run_dir={tmp_path}/run", *changes)
    assert problem in outcome.err
    assert not (tmp_path / "run").exists()
