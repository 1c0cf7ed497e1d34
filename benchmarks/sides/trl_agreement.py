"""TRL's GRPOTrainer in its own training loop, two steps on given rows instead of generated ones.

A request with `inputs` and `record` (files) is answered after the steps; support/grpo_record.py describes the record.
"""

from typing import Any

import torch
import trl
from datasets import Dataset
from safetensors.torch import load_file, save_file
from support.serve import Channel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

NUM_STEPS = 2


class RecordingTrainer(GRPOTrainer):
    """A GRPOTrainer that trains on `rows` and keeps what it computes in `record`."""

    def __init__(self, rows: dict[str, Tensor], *args: Any, **kwargs: Any) -> None:
        self.rows, self.record = rows, {}
        super().__init__(*args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Tensor]:
        # The number of response tokens is what `_generate_and_score_completions` adds.
        return {**self.rows, "num_items_in_batch": self.rows["completion_mask"].sum()}

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.record.setdefault("log_probs", result[0].detach() * self.rows["completion_mask"])
        return result

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super()._compute_loss(*args, **kwargs)
        self._keep("loss", loss.detach())
        self._keep("clipped_share", torch.tensor(self._metrics["train"]["clip_ratio/region_mean"][-1]))
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        for name, parameter in model.named_parameters():
            self.record.setdefault(f"gradient.{name}", parameter.grad.detach().clone())
        norm = super()._clip_grad_norm(model)
        self._keep("grad_norm", torch.as_tensor(norm))
        return norm

    def _keep(self, name: str, value: Tensor) -> None:
        self.record[f"{name}.{self.state.global_step}"] = value


def compute_record(rows: dict[str, Tensor], path: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Train the model in `path` for NUM_STEPS steps and return the record."""
    trainer = RecordingTrainer(
        rows,
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir="trl_agreement",
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=len(rows["prompt_ids"]),
            gradient_accumulation_steps=1,
            gradient_checkpointing=False,
            num_generations=2,
            max_steps=NUM_STEPS,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
            **settings,
        ),
        train_dataset=Dataset.from_list([{"prompt": "1"}] * len(rows["prompt_ids"])),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    changes = {name: after.detach() - before[name] for name, after in trainer.model.named_parameters()}
    return trainer.record | {f"change.{name}": change for name, change in changes.items()}


def main() -> None:
    channel = Channel()
    torch.set_num_threads(channel.options["threads"])
    channel.ready(torch.get_num_threads(), trl=trl.__version__, torch=torch.__version__)
    for request in channel.requests():
        record = compute_record(load_file(request["inputs"]), channel.options["path"], channel.options["settings"])
        save_file({name: tensor.contiguous() for name, tensor in record.items()}, request["record"])
        channel.reply()


if __name__ == "__main__":
    main()
