"""OpenRLHF: the `--flags` of a script that starts `openrlhf.cli.train_ppo_ray`.

Keys are those of version 0.9; NAMES has those of 0.10 and later.
"""

from collections.abc import Mapping
from typing import Any

from hybridflow.migration.moves import Framework, Move, files, renamed, switch, to, without

ADVANTAGES = {
    "gae": "gae",
    "reinforce": "reinforce++",
    "reinforce_baseline": "reinforce++-baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
}

MOVES: dict[str, Move] = {
    "pretrain": to("model.path"),
    "reward_pretrain": to("reward.model_path"),
    "critic_pretrain": to("critic.model_path"),
    "bf16": switch("model.dtype", "bfloat16"),
    "param_dtype": renamed("model.dtype", {"bf16": "bfloat16", "fp32": "float32"}),
    "gradient_checkpointing": to("model.gradient_checkpointing"),
    "lora_rank": to("lora.rank"),
    "lora_alpha": to("lora.alpha"),
    "prompt_data": files("data.train_files"),
    "eval_dataset": files("data.val_files"),
    "rollout_batch_size": to("data.train_batch_size"),
    "prompt_max_len": to("data.max_prompt_length"),
    "generate_max_len": to("data.max_response_length"),
    "n_samples_per_prompt": to("rollout.group_size"),
    "temperature": to("rollout.temperature"),
    "top_p": to("rollout.top_p"),
    "vllm_tensor_parallel_size": to("rollout.tensor"),
    "vllm_gpu_memory_utilization": to("rollout.gpu_memory_utilization"),
    "enforce_eager": to("rollout.enforce_eager"),
    "eval_temperature": to("validation.temperature"),
    "eval_n_samples_per_prompt": to("validation.group_size"),
    "actor_learning_rate": to("actor.optimizer.lr"),
    "critic_learning_rate": to("critic.optimizer.lr"),
    "adam_betas": to("actor.optimizer.betas", "critic.optimizer.betas"),
    "l2": to("actor.optimizer.weight_decay", "critic.optimizer.weight_decay"),
    "max_norm": to("actor.optimizer.clip_grad_norm", "critic.optimizer.clip_grad_norm"),
    "max_epochs": to("actor.epochs", "critic.epochs"),
    "eps_clip": to("actor.clip_ratio_low", "actor.clip_ratio_high"),
    "dual_clip": without("actor.clip_ratio_dual", where=(None,), instead=None),
    "value_clip": to("critic.value_clip"),
    "loss_agg_mode": to("actor.loss_aggregation"),
    "kl_unbiased_gradient": to("algorithm.kl_importance_weight"),
    "entropy_loss_coef": without("actor.entropy_coef", where=(None,), instead=0.0),
    "advantage_estimator": renamed("algorithm.advantage", ADVANTAGES),
    "gamma": to("algorithm.gamma"),
    "lambd": to("algorithm.lam"),
    "init_kl_coef": to("algorithm.kl_coef"),
    "kl_estimator": to("algorithm.kl_estimator"),
    "kl_target": without("algorithm.kl_target", where=(None,), instead=0.1),
    "dynamic_filtering": to("algorithm.filter_groups"),
    "num_episodes": to("trainer.epochs"),
    "save_path": to("trainer.run_dir"),
    "save_steps": without("trainer.save_every", where=(-1,), instead=0),
    "eval_steps": without("trainer.val_every", where=(-1,), instead=0),
    "max_ckpt_num": to("trainer.keep_checkpoints"),
    "freezing_actor_steps": without("critic.warmup_steps", where=(-1,), instead=0),
    "seed": to("trainer.seed"),
}

DEFAULTS: dict[str, Any] = {
    "advantage_estimator": "gae",
    "rollout_batch_size": 1024,
    "train_batch_size": 128,
    "n_samples_per_prompt": 1,
    "prompt_max_len": 1024,
    "generate_max_len": 1024,
    "actor_learning_rate": 1e-6,
    "critic_learning_rate": 9e-6,
    "init_kl_coef": 0.01,
    "kl_estimator": "k1",
    "dual_clip": None,
}
"""Defaults of OpenRLHF that differ from ours."""

NAMES = {
    "actor.model_name_or_path": "pretrain",
    "reward.model_name_or_path": "reward_pretrain",
    "critic.model_name_or_path": "critic_pretrain",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "ds.param_dtype": "param_dtype",
    "ds.lora.rank": "lora_rank",
    "ds.lora.alpha": "lora_alpha",
    "data.prompt_dataset": "prompt_data",
    "eval.dataset": "eval_dataset",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.max_new_tokens": "generate_max_len",
    "data.max_len": "max_len",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "rollout.temperature": "temperature",
    "rollout.top_p": "top_p",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "vllm.enforce_eager": "enforce_eager",
    "vllm.num_engines": "vllm_num_engines",
    "vllm.sync_backend": "vllm_sync_backend",
    "vllm.enable_sleep": "vllm_enable_sleep",
    "ds.enable_sleep": "deepspeed_enable_sleep",
    "ds.zero_stage": "zero_stage",
    "ds.attn_implementation": "flash_attn",
    "ds.packing_samples": "packing_samples",
    "ds.adam_offload": "adam_offload",
    "eval.temperature": "eval_temperature",
    "eval.n_samples_per_prompt": "eval_n_samples_per_prompt",
    "eval.steps": "eval_steps",
    "actor.adam.lr": "actor_learning_rate",
    "critic.adam.lr": "critic_learning_rate",
    "actor.adam.betas": "adam_betas",
    "actor.adam.weight_decay": "l2",
    "actor.max_norm": "max_norm",
    "train.max_epochs": "max_epochs",
    "train.num_episodes": "num_episodes",
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "train.seed": "seed",
    "train.colocate_all": "colocate_all_models",
    "data.max_samples": "max_samples",
    "data.input_key": "input_key",
    "data.label_key": "label_key",
    "data.apply_chat_template": "apply_chat_template",
    "actor.eps_clip": "eps_clip",
    "actor.eps_clip_low_high": "eps_clip_low_high",
    "actor.dual_clip": "dual_clip",
    "critic.value_clip": "value_clip",
    "critic.freezing_steps": "freezing_actor_steps",
    "actor.entropy_coef": "entropy_loss_coef",
    "actor.loss_agg_mode": "loss_agg_mode",
    "algo.advantage.estimator": "advantage_estimator",
    "algo.advantage.gamma": "gamma",
    "algo.advantage.lambd": "lambd",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.estimator": "kl_estimator",
    "algo.kl.target": "kl_target",
    "algo.kl.use_loss": "use_kl_loss",
    "algo.kl.unbiased_gradient": "kl_unbiased_gradient",
    "algo.dynamic_filtering_enable": "dynamic_filtering",
    "ckpt.output_dir": "save_path",
    "ckpt.save_steps": "save_steps",
    "ckpt.max_num": "max_ckpt_num",
    "ckpt.path": "ckpt_path",
    "reward.remote_url": "remote_rm_url",
    "actor.num_nodes": "actor_num_nodes",
    "actor.num_gpus_per_node": "actor_num_gpus_per_node",
    "ref.num_nodes": "ref_num_nodes",
    "ref.num_gpus_per_node": "ref_num_gpus_per_node",
    "critic.num_nodes": "critic_num_nodes",
    "critic.num_gpus_per_node": "critic_num_gpus_per_node",
    "reward.num_nodes": "reward_num_nodes",
    "reward.num_gpus_per_node": "reward_num_gpus_per_node",
    "logger.logging_steps": "logging_steps",
    "logger.wandb.key": "use_wandb",
    "logger.wandb.run_name": "wandb_run_name",
    "logger.tensorboard_dir": "use_tensorboard",
}

SETTLED = (
    *(
        "train_batch_size",
        "use_kl_loss",
        "eps_clip_low_high",
        "input_key",
        "label_key",
        "apply_chat_template",
        "max_len",
    ),
    *("actor_num_nodes", "actor_num_gpus_per_node", "remote_rm_url", "use_wandb", "use_tensorboard"),
)
IGNORED = (
    *("colocate_all_models", "vllm_num_engines", "zero_stage", "flash_attn", "packing_samples", "adam_offload"),
    *("micro_train_batch_size", "micro_rollout_batch_size", "max_samples", "vllm_sync_backend", "vllm_enable_sleep"),
    *("deepspeed_enable_sleep", "ref_num_nodes", "ref_num_gpus_per_node", "critic_num_nodes", "logging_steps"),
    *("critic_num_gpus_per_node", "reward_num_nodes", "reward_num_gpus_per_node", "ckpt_path", "wandb_run_name"),
)


def finish(values: dict[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Settle what depends on several keys; return notes."""
    notes = []
    if values.get("algorithm.kl_coef"):
        values["algorithm.kl_in_loss" if theirs.get("use_kl_loss") else "algorithm.kl_in_reward"] = True
    else:
        values.pop("algorithm.kl_coef", None)
    if theirs.get("advantage_estimator") == "dr_grpo":
        values["algorithm.norm_by_std"] = False
    prompts = theirs["train_batch_size"] // theirs["n_samples_per_prompt"]
    values["actor.mini_batch_size"] = min(max(1, prompts), theirs["rollout_batch_size"])
    if (limit := theirs.get("max_len")) is not None:
        notes.append(
            f"max_len={limit} limits prompt and response together; data.max_prompt_length and "
            f"data.max_response_length limit each, here {theirs['prompt_max_len']} and {theirs['generate_max_len']}"
        )
    if (bounds := theirs.get("eps_clip_low_high")) is not None:
        values["actor.clip_ratio_low"], values["actor.clip_ratio_high"] = bounds
    columns = {"prompt": theirs.get("input_key"), "answer": theirs.get("label_key")}
    if named := {ours: column for ours, column in columns.items() if column}:
        values["data.columns"] = named
    devices = theirs.get("actor_num_nodes", 1) * theirs.get("actor_num_gpus_per_node", 1)
    if devices > 1:
        values |= {"controller.backend": "ray", "controller.num_workers": devices}
    if url := theirs.get("remote_rm_url"):
        function = "hybridflow.rewards:http_reward"
        notes.append(f"remote_rm_url={url}: write a function, or reward.function = '{function}' with reward.kwargs.url")
    trackers = [name for name in ("wandb", "tensorboard") if theirs.get(f"use_{name}")]
    if trackers:
        values["trainer.trackers"] = trackers
    return notes


MARKS = ("pretrain", "rollout_batch_size", "prompt_data", "rollout.n_samples_per_prompt", "data.prompt_dataset")
OPENRLHF = Framework("OpenRLHF", MARKS, MOVES, DEFAULTS, (*IGNORED, *SETTLED), finish, NAMES)
