"""TRL: the arguments of GRPOConfig and of its script, as YAML or as `--flags`."""

from collections.abc import Mapping
from typing import Any

from hybridflow.migration.moves import Framework, Move, renamed, switch, to, trackers_of, without

MOVES: dict[str, Move] = {
    "model_name_or_path": to("model.path"),
    "bf16": switch("model.dtype", "bfloat16"),
    "gradient_checkpointing": to("model.gradient_checkpointing"),
    "lora_r": to("lora.rank"),
    "lora_alpha": to("lora.alpha"),
    "max_prompt_length": without("data.max_prompt_length", where=(None,), instead=512),
    "max_completion_length": to("data.max_response_length"),
    "shuffle_dataset": renamed("data.order", {True: "shuffled", False: "sequential"}),
    "num_generations": to("rollout.group_size"),
    "temperature": to("rollout.temperature"),
    "top_p": to("rollout.top_p"),
    "top_k": without("rollout.top_k", where=(-1, None), instead=0),
    "use_vllm": switch("rollout.backend", "vllm"),
    "vllm_tensor_parallel_size": to("rollout.tensor"),
    "vllm_gpu_memory_utilization": to("rollout.gpu_memory_utilization"),
    "learning_rate": to("actor.optimizer.lr"),
    "lr_scheduler_type": to("actor.optimizer.schedule"),
    "warmup_steps": to("actor.optimizer.warmup_steps"),
    "weight_decay": to("actor.optimizer.weight_decay"),
    "max_grad_norm": to("actor.optimizer.clip_grad_norm"),
    "num_iterations": to("actor.epochs"),
    "epsilon": to("actor.clip_ratio_low", "actor.clip_ratio_high"),
    "epsilon_high": Move(("actor.clip_ratio_high",)),
    "delta": without("actor.clip_ratio_dual", where=(None,), instead=None),
    "loss_type": renamed(
        "actor.loss_aggregation",
        {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"},
    ),
    "beta": to("algorithm.kl_coef"),
    "use_bias_correction_kl": to("algorithm.kl_importance_weight"),
    "max_steps": without("trainer.total_steps", where=(-1,), instead=0),
    "save_steps": to("trainer.save_every"),
    "eval_steps": without("trainer.val_every", where=(None,), instead=0),
    "save_total_limit": without("trainer.keep_checkpoints", where=(None,), instead=1000),
    "output_dir": to("trainer.run_dir"),
    "seed": to("trainer.seed"),
}

DEFAULTS: dict[str, Any] = {
    "num_generations": 8,
    "max_completion_length": 512,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "loss_type": "dapo",
    "delta": None,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "beta": 0.0,
    "use_bias_correction_kl": True,
}
"""Defaults of GRPOConfig in TRL 1.16 that differ from ours."""

SETTLED = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "scale_rewards", "num_train_epochs", "report_to"),
    *("dataset_name", "reward_funcs", "mask_truncated_completions"),
)
IGNORED = ("logging_steps", "log_completions", "push_to_hub", "attn_implementation", "use_peft", "do_eval", "run_name")


def finish(values: dict[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Settle what depends on several keys; return notes."""
    notes = []
    if values.get("algorithm.kl_coef"):
        values["algorithm.kl_in_loss"] = True
    else:
        values.pop("algorithm.kl_coef", None)
        values.pop("algorithm.kl_importance_weight", None)
    rows = theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"]
    values["data.train_batch_size"] = max(1, rows // theirs["num_generations"])
    notes.append(
        f"per_device_train_batch_size: {rows} completions of a process are {values['data.train_batch_size']} prompts "
        "(data.train_batch_size); multiply it by the number of processes"
    )
    if "scale_rewards" in theirs:
        values["algorithm.norm_by_std"] = theirs["scale_rewards"] not in (False, "none")
    if "num_train_epochs" in theirs:
        values["trainer.epochs"] = max(1, int(theirs["num_train_epochs"]))
    if named := trackers_of(theirs.get("report_to")):
        values["trainer.trackers"] = named
    advice = {
        "dataset_name": "name its files in data.train_files, its columns in data.columns",
        "reward_funcs": "name one function in reward.function; it may return several numbers, for reward.weights",
    }
    notes += [f"{key}={theirs[key]}: {text}" for key, text in advice.items() if key in theirs]
    if theirs.get("mask_truncated_completions"):
        notes.append("mask_truncated_completions=true has no equal; see reward.overlong_buffer")
    return notes


MARKS = ("num_generations", "model_name_or_path", "per_device_train_batch_size")
TRL = Framework("TRL", MARKS, MOVES, DEFAULTS, (*IGNORED, *SETTLED), finish)
