"""Offline objectives against a plain autograd computation of the whole pair loss, in float64."""

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from fixtures.tiny_run import write_task
from hybridflow.checkpoint.weights import stored_weights
from hybridflow.config import load_config
from hybridflow.trainers import build_dpo_trainer, build_reward_model_trainer

OPTIMIZER = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1.0, "weight_decay": 0.0}
"""An epsilon of 1 makes a step about lr * gradient, so that rounding in small gradients stays small."""

BETA = 0.5


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def settings(task, tmp_path):
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()

    def build(*changes):
        optimizer = ["lr=0.1", "epsilon=1", "weight_decay=0", "clip_grad_norm=1e9"]
        defaults = [f"offline.optimizer.{change}" for change in optimizer]
        defaults += ["model.dtype=float64", "data.val_files=[]", f"offline.beta={BETA}", "trainer.total_steps=2"]
        return load_config(task / "pairs.toml", [*defaults, f"trainer.run_dir={tmp_path}/run", *changes])

    yield build
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def response_log_probs(model, batch):
    """Return (pairs, 2) sums over the responses, one row at a time."""
    sums = []
    for ids, is_real, mask in zip(
        *(batch.batch[n] for n in ("input_ids", "attention_mask", "response_mask")), strict=True
    ):
        ids = ids[is_real.bool()]
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        sums.append(log_probs[-int(mask.sum()) :].sum())
    return torch.stack(sums).view(-1, 2)


def conversation_scores(model, batch):
    """Return (pairs, 2) values at the last token of each conversation, the last but one of its row."""
    return torch.stack(
        [
            model(ids[is_real.bool()][None]).logits[0, -2, 0]
            for ids, is_real in zip(batch.batch["input_ids"], batch.batch["attention_mask"], strict=True)
        ]
    ).view(-1, 2)


def pair_losses(name, sums, reference):
    if name == "reward-model":
        return -logsigmoid(sums[:, 0] - sums[:, 1])
    margins = (sums - reference)[:, 0] - (sums - reference)[:, 1]
    return -logsigmoid(BETA * margins) if name == "dpo" else (margins - 1 / (2 * BETA)) ** 2


@pytest.mark.parametrize("memory", [[], ["memory.max_tokens_per_micro_batch=128"], ["memory.packing=false"]])
@pytest.mark.parametrize("name", ["dpo", "ipo", "reward-model"])
def test_two_steps_equal_two_steps_on_the_whole_loss(task, settings, name, memory):
    if name == "reward-model":
        config, build = settings(*memory), build_reward_model_trainer
        model = AutoModelForTokenClassification.from_pretrained(task / "model", num_labels=1, dtype=torch.float64)
        with torch.no_grad():
            model.score.weight.zero_(), model.score.bias.zero_()
        sums_of = conversation_scores
    else:
        config, build = settings(f"offline.preference_loss={name}", *memory), build_dpo_trainer
        model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float64)
        sums_of = response_log_probs
    fresh = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    is_policy, metric = name != "reward-model", "dpo/loss" if name != "reward-model" else "reward_model/loss"
    with build(config) as trainer:
        for _ in range(2):
            position = trainer.loader.state_dict()
            batch = trainer.loader.next_batch()
            reference = response_log_probs(fresh, batch).detach() if is_policy else None
            losses = pair_losses(name, sums_of(model, batch), reference)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            trainer.loader.load_state_dict(position)
            trainer.train_step()
            assert trainer.metrics[metric] == pytest.approx(
                float(losses.detach().mean()), rel=1e-7
            )  # rotary angles of transformers are float32
        trainer.save()
        checkpoint = trainer.run.store.latest()
    with stored_weights(checkpoint, "actor" if is_policy else "reward_model") as (learned, _):
        assert set(learned) == {parameter_name for parameter_name, _ in model.named_parameters()}
        for parameter_name, parameter in model.named_parameters():
            torch.testing.assert_close(learned[parameter_name], parameter.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("build", [build_dpo_trainer, build_reward_model_trainer])
def test_splitting_a_pair_over_micro_batches_changes_only_rounding(settings, tmp_path, build):
    losses = []
    for number, memory in enumerate(
        ("memory.max_tokens_per_micro_batch=128", "memory.max_tokens_per_micro_batch=4096")
    ):
        with build(settings(memory, f"trainer.run_dir={tmp_path}/{number}")) as trainer:
            trainer.train_step()
            trainer.train_step()  # of weights that the first one has changed
            losses.append(trainer.metrics[f"{'dpo' if build is build_dpo_trainer else 'reward_model'}/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
