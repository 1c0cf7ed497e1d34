"""TRL: the arguments of GRPOConfig and of its script, as YAML or as `--flags`."""

from collections.abc import Mapping
from typing import Any

from hybridflow.migration.moves import Framework, Move, renamed, switch, to, trackers_of, without

AGGREGATIONS = {
    "dapo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "cispo": "token-mean",
    "sapo": "token-mean",
}
"""loss_type -> our aggregation; those of POLICY_LOSSES have another policy loss too."""
POLICY_LOSSES = ("cispo", "sapo")

GRPO_KEYS = (
    *("num_generations", "max_completion_length", "reward_funcs", "num_iterations", "epsilon", "epsilon_high"),
    *("scale_rewards", "use_vllm", "vllm_mode", "temperature", "generation_batch_size", "steps_per_generation"),
    *("importance_sampling_level", "use_bias_correction_kl", "mask_truncated_completions", "reward_weights"),
)
"""Keys of GRPOConfig that no other trainer's configuration has."""

MOVES: dict[str, Move] = {
    "model_name_or_path": to("model.path"),
    "bf16": switch("model.dtype", "bfloat16"),
    "gradient_checkpointing": to("model.gradient_checkpointing"),
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
    "loss_type": renamed("actor.loss_aggregation", AGGREGATIONS),
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
    *("dataset_name", "reward_funcs", "mask_truncated_completions", "use_peft", "lora_r", "lora_alpha", "dtype"),
    "importance_sampling_level",
)
IGNORED = ("logging_steps", "log_completions", "push_to_hub", "attn_implementation", "do_eval", "run_name")


def finish(values: dict[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Settle what depends on several keys; return notes."""
    notes = []
    _settle_loss(values, theirs, notes)
    if theirs.get("use_peft"):
        values |= {"lora.rank": theirs.get("lora_r", 16), "lora.alpha": theirs.get("lora_alpha", 32)}
    elif "lora_r" in theirs:
        notes.append(f"lora_r={theirs['lora_r']} without use_peft trains all weights, there and here; see lora.rank")
    if theirs.get("dtype") in ("bfloat16", "float32"):
        values["model.dtype"] = theirs["dtype"]
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
    if rows % theirs["num_generations"]:
        notes.append(f"{rows} completions are not divisible by num_generations={theirs['num_generations']}")
    if "scale_rewards" in theirs:
        values["algorithm.norm_by_std"] = theirs["scale_rewards"] not in (False, "none")
    if theirs.get("scale_rewards") == "batch":
        notes.append("scale_rewards=batch has no equal here: rewards are scaled by the deviation of their group")
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


def _settle_loss(values: dict[str, Any], theirs: Mapping[str, Any], notes: list[str]) -> None:
    """Set the policy loss of `loss_type` and of `importance_sampling_level`."""
    loss = theirs["loss_type"]
    if loss in POLICY_LOSSES:
        values["actor.policy_loss"] = loss
    elif loss not in AGGREGATIONS:
        notes.append(f"loss_type={loss}: THE RECIPE TRAINS WITH ANOTHER LOSS, that of PPO; see actor.policy_loss")
    if theirs.get("importance_sampling_level") == "sequence":
        values |= {"actor.policy_loss": "gspo", "actor.loss_aggregation": "seq-mean-token-mean"}


MARKS = ("num_generations", "model_name_or_path", "per_device_train_batch_size")
TRL = Framework("TRL", MARKS, MOVES, DEFAULTS, (*IGNORED, *SETTLED), finish, needs=GRPO_KEYS)
