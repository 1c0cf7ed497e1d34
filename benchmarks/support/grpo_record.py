"""What hybridflow computes in two optimizer steps on given rows, in the form in which TRL's side records it.

A record has the log-probs of the first step (rows, response_len), 0 where masked; for each step the scalars `loss`,
`grad_norm` (before clipping) and `clipped_share` (of tokens), as in `loss.0`; and for each parameter
`gradient.NAME` of the first step, before clipping, and `change.NAME` by both steps.
"""

import torch
from torch import Tensor

from hybridflow.config import Config
from hybridflow.engines import TorchEngine
from hybridflow.protocol import DataProto
from hybridflow.workers import ActorWorker
from support.ragged_rows import draw_ragged_rows, with_distant_policies

NUM_STEPS = 2
Record = dict[str, Tensor]


def draw_inputs(config: Config) -> dict[str, Tensor]:
    """Draw the rows that both sides compute on; ratios and KL are relative to the model in `config.model.path`."""
    engine = TorchEngine(config.model.path, "policy", model=config.model, memory=config.memory)
    rows = draw_ragged_rows(engine.vocabulary_size)
    outputs = engine.forward(_batch_of(rows), temperature=config.rollout.temperature)
    return with_distant_policies(rows, outputs["log_probs"])


def record_hybridflow(config: Config, inputs: dict[str, Tensor]) -> Record:
    """Make NUM_STEPS updates of the actor of `config` on the rows of `inputs` and return their record."""
    actor, batch = ActorWorker(config), _batch_of(inputs)
    log_probs = actor.compute_log_probs(batch).batch["old_log_probs"]
    record: Record = {"log_probs": log_probs * inputs["completion_mask"]}
    gradients: dict[str, Tensor] = {}
    assert isinstance(actor.engine, TorchEngine), "the actor's own engine"
    parameters = actor.engine.parameters
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    hooks = [
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=name: gradients.update({name: parameter.grad.clone()})
        )
        for name, parameter in parameters.items()
    ]
    batch.meta_info |= {"mini_batches": [batch.batch["row_ids"].tolist()], "kl_coef": config.algorithm.kl_coef}
    for step in range(NUM_STEPS):
        metrics = actor.update_actor(batch).meta_info["metrics"]
        record[f"loss.{step}"] = torch.tensor(metrics["actor/loss"])
        record[f"grad_norm.{step}"] = torch.tensor(metrics["actor/grad_norm"])
        record[f"clipped_share.{step}"] = torch.tensor(metrics["actor/clipfrac"])
        if step == 0:
            record |= {f"gradient.{name}": gradient for name, gradient in gradients.items()}
            for hook in hooks:
                hook.remove()
    return record | {f"change.{name}": parameter.detach() - before[name] for name, parameter in parameters.items()}


def _batch_of(inputs: dict[str, Tensor]) -> DataProto:
    """Convert rows from TRL's columns to those of an actor's update."""
    columns = {
        "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        "response_mask": inputs["completion_mask"].bool(),
        "row_ids": torch.arange(len(inputs["prompt_ids"])),
        "advantages": inputs["advantages"][:, None],
    }
    if "old_per_token_logps" in inputs:
        columns |= {
            "old_log_probs": inputs["old_per_token_logps"],
            "rollout_log_probs": inputs["old_per_token_logps"],
            "ref_log_probs": inputs["ref_per_token_logps"],
        }
    return DataProto.from_dict(columns)
