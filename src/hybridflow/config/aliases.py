"""Names of our keys in other RL frameworks, for errors that show the key to write instead."""

from collections.abc import Sequence

from hybridflow.config.keys import leaf_keys

ALIASES: dict[str, tuple[str, ...]] = {
    "model_name_or_path": ("model.path",),
    "enable_gradient_checkpointing": ("model.gradient_checkpointing",),
    "batch_size": ("data.train_batch_size", "offline.batch_size"),
    "per_device_train_batch_size": ("data.train_batch_size",),
    "prompt_max_len": ("data.max_prompt_length",),
    "generate_max_len": ("data.max_response_length",),
    "max_completion_length": ("data.max_response_length",),
    "max_new_tokens": ("data.max_response_length",),
    "train_dataset": ("data.train_files",),
    "eval_dataset": ("data.val_files",),
    "shuffle": ("data.order",),
    "n": ("rollout.group_size",),
    "num_generations": ("rollout.group_size",),
    "n_samples_per_prompt": ("rollout.group_size",),
    "tensor_model_parallel_size": ("rollout.tensor", "parallel.tensor"),
    "ulysses_sequence_parallel_size": ("parallel.sequence",),
    "learning_rate": ("actor.optimizer.lr",),
    "lr_scheduler_type": ("actor.optimizer.schedule",),
    "lr_warmup_steps": ("actor.optimizer.warmup_steps",),
    "grad_clip": ("actor.optimizer.clip_grad_norm",),
    "max_grad_norm": ("actor.optimizer.clip_grad_norm",),
    "ppo_mini_batch_size": ("actor.mini_batch_size",),
    "ppo_epochs": ("actor.epochs",),
    "num_iterations": ("actor.epochs",),
    "clip_ratio": ("actor.clip_ratio_low", "actor.clip_ratio_high"),
    "eps_clip": ("actor.clip_ratio_low", "actor.clip_ratio_high"),
    "epsilon": ("actor.clip_ratio_low", "actor.clip_ratio_high", "actor.optimizer.epsilon"),
    "clip_ratio_c": ("actor.clip_ratio_dual",),
    "loss_agg_mode": ("actor.loss_aggregation",),
    "entropy_coeff": ("actor.entropy_coef",),
    "critic_warmup": ("critic.warmup_steps",),
    "adv_estimator": ("algorithm.advantage",),
    "advantage_estimator": ("algorithm.advantage",),
    "scale_rewards": ("algorithm.norm_by_std",),
    "beta": ("algorithm.kl_coef", "offline.beta"),
    "init_kl_coef": ("algorithm.kl_coef",),
    "kl_loss_coef": ("algorithm.kl_coef",),
    "kl_ctrl": ("algorithm.kl_controller", "algorithm.kl_coef"),
    "kl_penalty": ("algorithm.kl_estimator",),
    "kl_loss_type": ("algorithm.kl_estimator",),
    "use_bias_correction_kl": ("algorithm.kl_importance_weight",),
    "use_kl_loss": ("algorithm.kl_in_loss",),
    "use_kl_in_reward": ("algorithm.kl_in_reward",),
    "target_kl": ("algorithm.kl_target",),
    "reward_funcs": ("reward.function",),
    "total_epochs": ("trainer.epochs",),
    "num_train_epochs": ("trainer.epochs",),
    "max_steps": ("trainer.total_steps",),
    "total_training_steps": ("trainer.total_steps",),
    "test_freq": ("trainer.val_every",),
    "eval_steps": ("trainer.val_every",),
    "save_freq": ("trainer.save_every",),
    "save_steps": ("trainer.save_every",),
    "save_total_limit": ("trainer.keep_checkpoints",),
    "output_dir": ("trainer.run_dir",),
    "report_to": ("trainer.trackers",),
    "n_gpus_per_node": ("controller.num_workers",),
    "ppo_micro_batch_size_per_gpu": ("memory.max_tokens_per_micro_batch",),
}
"""Our keys by the last part of their name in another framework."""


def keys_of_alias(name: str) -> Sequence[str]:
    """Return our keys for a name of another framework; empty if it is unknown.

    Only the last part is looked up. If the first part is one of our sections, the key of this section is preferred:
    `critic.learning_rate` gives `critic.optimizer.lr`.
    """
    section, _, _ = name.partition(".")
    keys = ALIASES.get(name.rpartition(".")[2], ())
    keys = [key for key in keys if key.partition(".")[0] == section] or keys
    if len(keys) != 1:
        return keys
    suffix = keys[0].partition(".")[2]
    same = f"{section}.{suffix}"
    return (same,) if same in leaf_keys() else keys
