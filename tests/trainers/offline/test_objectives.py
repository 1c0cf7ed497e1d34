"""Offline objectives against a plain autograd computation of the whole pair loss, in float64."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from hybridflow.checkpoint.store import stored_weights
from hybridflow.config import Config, load_config
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers import build_dpo_trainer, build_reward_model_trainer
from hybridflow.trainers.offline.objectives import DPO

OPTIMIZER = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1.0, "weight_decay": 0.0}
"""An epsilon of 1 makes a step about lr * gradient, so that rounding in small gradients stays small."""

BETA = 0.5


@pytest.fixture
def settings(task, tmp_path, restores_the_process):
    def build(*changes):
        optimizer = ["lr=0.1", "epsilon=1", "weight_decay=0", "clip_grad_norm=1e9"]
        defaults = [f"offline.optimizer.{change}" for change in optimizer]
        defaults += ["model.dtype=float64", "data.val_files=[]", f"offline.beta={BETA}", "trainer.total_steps=2"]
        return load_config(task / "pairs.toml", [*defaults, f"trainer.run_dir={tmp_path}/run", *changes])

    return build


def response_log_probs(model, batch, averages=False):
    """Return (pairs, 2) sums, or means, over the responses, one row at a time."""
    numbers = []
    for ids, is_real, mask in zip(
        *(batch.batch[n] for n in ("input_ids", "attention_mask", "response_mask")), strict=True
    ):
        ids = ids[is_real.bool()]
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        of_response = log_probs[-int(mask.sum()) :]
        numbers.append(of_response.sum() / len(of_response) if averages else of_response.sum())
    return torch.stack(numbers).view(-1, 2)


def conversation_scores(model, batch):
    """Return (pairs, 2) values at the last token of each conversation, the last but one of its row."""
    return torch.stack(
        [
            model(ids[is_real.bool()][None]).logits[0, -2, 0]
            for ids, is_real in zip(batch.batch["input_ids"], batch.batch["attention_mask"], strict=True)
        ]
    ).view(-1, 2)


def pair_losses(name, numbers, reference):
    if name == "reward-model":
        return -logsigmoid(numbers[:, 0] - numbers[:, 1])
    margins = (numbers - reference)[:, 0] - (numbers - reference)[:, 1]
    return -logsigmoid(BETA * margins) if name == "dpo" else (margins - 1 / (2 * BETA)) ** 2


@pytest.mark.parametrize(
    ("name", "averages", "memory"),
    [
        ("dpo", False, ["memory.max_tokens_per_micro_batch=128"]),
        ("ipo", True, ["memory.packing=false"]),
        ("reward-model", False, []),
    ],
)
def test_two_steps_equal_two_steps_on_the_whole_loss(task, settings, name, averages, memory):
    if name == "reward-model":
        config, build = settings(*memory), build_reward_model_trainer
        model = AutoModelForTokenClassification.from_pretrained(task / "model", num_labels=1, dtype=torch.float64)
        with torch.no_grad():
            model.score.weight.zero_(), model.score.bias.zero_()
        numbers_of = conversation_scores
    else:
        changes = f"offline.preference_loss={name}", f"offline.average_log_probs={str(averages).lower()}"
        config, build = settings(*changes, *memory), build_dpo_trainer
        model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float64)
        numbers_of = partial(response_log_probs, averages=averages)
    fresh = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    is_policy, metric = name != "reward-model", "dpo/loss" if name != "reward-model" else "reward_model/loss"
    with build(config) as trainer:
        for _ in range(2):
            position = trainer.loader.state_dict()
            batch = trainer.loader.next_batch()
            reference = numbers_of(fresh, batch).detach() if is_policy else None
            losses = pair_losses(name, numbers_of(model, batch), reference)
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


@pytest.mark.parametrize(
    ("build", "changes"),
    [
        (build_dpo_trainer, ("offline.preference_loss=ipo", "offline.average_log_probs=true")),
        pytest.param(build_dpo_trainer, (), marks=pytest.mark.exhaustive),
        pytest.param(build_reward_model_trainer, (), marks=pytest.mark.exhaustive),
    ],
)
def test_splitting_a_pair_over_micro_batches_changes_only_rounding(settings, tmp_path, build, changes):
    losses = []
    for tokens in (128, 4096):
        memory = f"memory.max_tokens_per_micro_batch={tokens}"
        with build(settings(memory, *changes, f"trainer.run_dir={tmp_path}/{tokens}")) as trainer:
            trainer.train_step()
            trainer.train_step()  # of weights that the first one has changed
            losses.append(trainer.metrics[f"{'dpo' if build is build_dpo_trainer else 'reward_model'}/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


class Role:
    """A policy and a reference with given log-probs, which keeps the slopes of the update."""

    def __init__(self, log_probs, ref_log_probs):
        columns = {"old_log_probs": log_probs, "ref_log_probs": ref_log_probs}
        for name, method in (("old_log_probs", "compute_log_probs"), ("ref_log_probs", "compute_ref_log_probs")):
            column = DataProto.from_dict({name: torch.tensor(columns[name], dtype=torch.float64)})
            setattr(self, method, SimpleNamespace(remote=lambda batch, column=column: column))
        self.update_dpo = SimpleNamespace(remote=self.update)

    def update(self, batch):
        self.slopes = batch.batch["loss_slopes"].tolist()
        return DataProtoFuture.of(DataProto(meta_info={"metrics": {}}))


@pytest.mark.parametrize(
    ("name", "averages", "loss", "slope"),
    [
        ("ipo", False, (0.0 - 1) ** 2, 2 * (0.0 - 1)),
        ("ipo", True, (0.25 - 1) ** 2, 2 * (0.25 - 1)),
        ("dpo", False, math.log(2), -0.5 / 2),
        ("dpo", True, math.log(1 + math.exp(-0.125)), -0.5 / (1 + math.exp(0.125))),
    ],
)
def test_log_ratios_are_summed_or_averaged_over_a_response_by_hand(name, averages, loss, slope):
    # Log-ratios of the chosen response: 0.5 twice; of the rejected one: 0.25 four times. Margin of the sums: 1 - 1.
    mask = torch.tensor([[True, True, False, False], [True] * 4])
    role = Role(
        [[-1.0, -2.0, math.nan, 9.0], [-1.0, -1.0, -2.0, -3.0]],
        [[-1.5, -2.5, 7.0, math.nan], [-1.25, -1.25, -2.25, -3.25]],
    )
    offline = {"preference_loss": name, "beta": 0.5, "average_log_probs": averages}
    objective = DPO(Config(offline=offline), role, role)
    examples = DataProto.from_dict({"response_mask": mask})
    _, metrics = objective.step(examples)
    assert metrics["dpo/loss"] == pytest.approx(loss, rel=1e-12)
    rewards = [0.5 * 0.5, 0.5 * 0.25] if averages else [0.5 * 1, 0.5 * 1]
    assert [metrics["dpo/chosen_reward"], metrics["dpo/rejected_reward"]] == pytest.approx(rewards, rel=1e-12)
    lengths = (2, 4) if averages else (1, 1)
    assert role.slopes == pytest.approx([slope / lengths[0], -slope / lengths[1]], rel=1e-12)
    sums, num_pairs = objective.measure(examples)
    assert (sums["dpo/val_loss"], num_pairs) == (pytest.approx(loss, rel=1e-12), 1)
