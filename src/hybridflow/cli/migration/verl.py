"""verl: what becomes of the keys of `ppo_trainer.yaml`, and of a script that starts `verl.trainer.main_ppo`."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from math import prod
from typing import Any


class NoEqualError(ValueError):
    """A value that has no equal here; its text says what to do instead."""


@dataclass(frozen=True)
class Move:
    """A key moves to `keys`; `value` changes its value, and raises NoEqualError if there is no equal."""

    keys: tuple[str, ...]
    value: Callable[[Any], Any] = lambda value: value


TRACKERS = ("wandb", "mlflow", "tensorboard")


def trackers_of(value: Any) -> list[str]:
    """Return the named trackers that exist here, without the console, which is always active."""
    return [name for name in (value if isinstance(value, list) else [value]) if name in TRACKERS]


def to(*keys: str) -> Move:
    """Return the move of a value as it is."""
    return Move(keys)


def renamed(key: str, names: Mapping[Any, Any]) -> Move:
    """Return the move of one of some names, each with another name here."""

    def value(theirs: Any) -> Any:
        if theirs not in [*names]:  # a list cannot be looked up
            raise NoEqualError(f"expected one of {', '.join(map(str, names))}")
        return names[theirs]

    return Move((key,), value)


def without(key: str, *, where: tuple[Any, ...], instead: Any) -> Move:
    """Return the move of a value, of which some (such as -1 for "never") are written in another way here."""
    return Move((key,), lambda value: instead if value in where else value)


def files(key: str) -> Move:
    """Return the move of one file, or of a list of them."""
    return Move((key,), lambda value: list(value) if isinstance(value, list | tuple) else [value])


def switch(key: str, when: Any) -> Move:
    """Return the move of a boolean: true sets the key to `when`."""

    def value(theirs: Any) -> Any:
        if not theirs:
            raise NoEqualError("")  # false is the default, which needs no key
        return when

    return Move((key,), value)


KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs"}
ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "rloo": "rloo",
    "remax": "remax",
    "opo": "opo",
    "gpg": "gpg",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
}
MARK = "actor_rollout_ref."
"""Prefix of verl's keys that every configuration of verl has."""
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_STEPS = {"where": (-1, None), "instead": 0}

MOVES: dict[str, Move] = {
    "data.train_files": files("data.train_files"),
    "data.val_files": files("data.val_files"),
    **{key: to(key) for key in ("data.train_batch_size", "data.max_prompt_length", "data.max_response_length")},
    "data.shuffle": renamed("data.order", {True: "shuffled", False: "sequential"}),
    "data.filter_overlong_prompts": switch("data.overlong_prompts", "drop"),
    "data.truncation": renamed(
        "data.overlong_prompts",
        {"error": "error", "left": "truncate-left", "right": "truncate-right", "middle": "truncate-middle"},
    ),
    "actor_rollout_ref.model.path": to("model.path"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": to("model.gradient_checkpointing"),
    "actor_rollout_ref.model.lora_rank": to("lora.rank"),
    "actor_rollout_ref.model.lora_alpha": to("lora.alpha"),
    f"{_ACTOR}.optim.lr": to("actor.optimizer.lr"),
    f"{_ACTOR}.optim.weight_decay": to("actor.optimizer.weight_decay"),
    f"{_ACTOR}.optim.betas": to("actor.optimizer.betas"),
    f"{_ACTOR}.optim.lr_warmup_steps": without("actor.optimizer.warmup_steps", **_STEPS),
    f"{_ACTOR}.optim.warmup_style": to("actor.optimizer.schedule"),
    f"{_ACTOR}.optim.lr_scheduler_type": to("actor.optimizer.schedule"),
    f"{_ACTOR}.optim.min_lr_ratio": without("actor.optimizer.min_lr_ratio", where=(None,), instead=0.0),
    f"{_ACTOR}.grad_clip": to("actor.optimizer.clip_grad_norm"),
    f"{_ACTOR}.ppo_mini_batch_size": to("actor.mini_batch_size"),
    f"{_ACTOR}.ppo_epochs": to("actor.epochs"),
    f"{_ACTOR}.clip_ratio": to("actor.clip_ratio_low", "actor.clip_ratio_high"),
    f"{_ACTOR}.clip_ratio_low": to("actor.clip_ratio_low"),
    f"{_ACTOR}.clip_ratio_high": to("actor.clip_ratio_high"),
    f"{_ACTOR}.clip_ratio_c": to("actor.clip_ratio_dual"),
    f"{_ACTOR}.loss_agg_mode": to("actor.loss_aggregation"),
    f"{_ACTOR}.entropy_coeff": to("actor.entropy_coef"),
    f"{_ACTOR}.use_kl_loss": to("algorithm.kl_in_loss"),
    f"{_ACTOR}.kl_loss_type": renamed("algorithm.kl_estimator", KL_ESTIMATORS),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": to("memory.max_tokens_per_micro_batch"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": to("parallel.sequence"),
    f"{_ACTOR}.fsdp_config.param_offload": switch("memory.offload", {"actor_rollout": "idle"}),
    f"{_ROLLOUT}.name": renamed("rollout.backend", {"vllm": "vllm", "hf": "embedded"}),
    f"{_ROLLOUT}.n": to("rollout.group_size"),
    f"{_ROLLOUT}.temperature": to("rollout.temperature"),
    f"{_ROLLOUT}.top_p": to("rollout.top_p"),
    f"{_ROLLOUT}.top_k": without("rollout.top_k", where=(-1,), instead=0),
    f"{_ROLLOUT}.tensor_model_parallel_size": to("rollout.tensor"),
    f"{_ROLLOUT}.gpu_memory_utilization": to("rollout.gpu_memory_utilization"),
    f"{_ROLLOUT}.enforce_eager": to("rollout.enforce_eager"),
    f"{_ROLLOUT}.max_num_seqs": to("rollout.max_running_sequences"),
    f"{_ROLLOUT}.max_model_len": without("rollout.max_model_len", where=(None,), instead=0),
    f"{_ROLLOUT}.val_kwargs.temperature": to("validation.temperature"),
    f"{_ROLLOUT}.val_kwargs.n": to("validation.group_size"),
    "critic.model.path": to("critic.model_path"),
    "critic.optim.lr": to("critic.optimizer.lr"),
    "critic.optim.weight_decay": to("critic.optimizer.weight_decay"),
    "critic.grad_clip": to("critic.optimizer.clip_grad_norm"),
    "critic.ppo_mini_batch_size": to("critic.mini_batch_size"),
    "critic.ppo_epochs": to("critic.epochs"),
    "critic.cliprange_value": to("critic.value_clip"),
    "algorithm.adv_estimator": renamed("algorithm.advantage", ADVANTAGES),
    **{key: to(key) for key in ("algorithm.gamma", "algorithm.lam", "trainer.val_before_train")},
    "algorithm.norm_adv_by_std_in_grpo": to("algorithm.norm_by_std"),
    "algorithm.use_kl_in_reward": to("algorithm.kl_in_reward"),
    "algorithm.kl_ctrl.type": to("algorithm.kl_controller"),
    "algorithm.kl_ctrl.target_kl": to("algorithm.kl_target"),
    "algorithm.kl_ctrl.horizon": to("algorithm.kl_horizon"),
    "algorithm.filter_groups.enable": to("algorithm.filter_groups"),
    "reward_model.model.path": to("reward.model_path"),
    "trainer.total_epochs": to("trainer.epochs"),
    "trainer.total_training_steps": without("trainer.total_steps", where=(None,), instead=0),
    "trainer.test_freq": without("trainer.val_every", **_STEPS),
    "trainer.save_freq": without("trainer.save_every", **_STEPS),
    "trainer.default_local_dir": to("trainer.run_dir"),
    "trainer.critic_warmup": to("critic.warmup_steps"),
    "trainer.resume_mode": renamed("trainer.resume", {"auto": "auto", "disable": "never"}),
}

DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.optim.weight_decay": 0.01,
    f"{_ROLLOUT}.n": 1,
    f"{_ROLLOUT}.name": "vllm",
    "algorithm.adv_estimator": "gae",
    "trainer.total_epochs": 30,
    f"{_ACTOR}.kl_loss_coef": 0.001,
    "algorithm.kl_ctrl.kl_coef": 0.001,
}
"""Defaults of verl that differ from ours, by its documentation."""

IGNORED = (
    *(f"{role}.strategy" for role in (_ACTOR, "critic")),
    *("trainer.project_name", "trainer.experiment_name", "trainer.device", "trainer.balance_batch"),
    *(f"{_ACTOR}.use_dynamic_bsz", "actor_rollout_ref.model.use_remove_padding", "actor_rollout_ref.hybrid_engine"),
    *(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    *("critic.ppo_micro_batch_size_per_gpu", f"{_ROLLOUT}.dtype", f"{_ROLLOUT}.load_format"),
    *(f"{_ROLLOUT}.free_cache_engine", f"{_ROLLOUT}.enable_chunked_prefill", f"{_ROLLOUT}.max_num_batched_tokens"),
    f"{_ACTOR}.fsdp_config.optimizer_offload",
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    "data.filter_overlong_prompts_workers",
)
"""Keys without a counterpart: hybridflow decides, or has one key for all roles."""

_KL = (f"{_ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")
_NODES = ("trainer.n_gpus_per_node", "trainer.nnodes")
_REWARD = ("custom_reward_function.path", "custom_reward_function.name")
_OVERLONG = tuple(f"reward_model.overlong_buffer.{name}" for name in ("enable", "len", "penalty_factor"))
SETTLED: dict[str, tuple[str, ...]] = {
    f"{_ACTOR}.kl_loss_coef": ("algorithm.kl_coef",),
    "algorithm.kl_ctrl.kl_coef": ("algorithm.kl_coef",),
    "algorithm.kl_penalty": ("algorithm.kl_estimator",),
    "trainer.logger": ("trainer.trackers",),
    "data.prompt_key": ("data.columns",),
    **dict.fromkeys(_NODES, ("controller.backend", "controller.num_workers")),
    **dict.fromkeys(_REWARD, ("reward.function",)),
    **dict.fromkeys(_OVERLONG, ("reward.overlong_buffer", "reward.overlong_penalty")),
}
"""Keys that `finish` reads, with ours that follow from them."""


def finish(values: dict[str, Any], theirs: Mapping[str, Any], unread: Set[str]) -> list[str]:
    """Settle what depends on several keys; return notes. Nothing is set that depends on a key whose value is unread."""
    notes = []
    in_loss, in_reward = (values.get(f"algorithm.{key}", False) for key in ("kl_in_loss", "kl_in_reward"))
    of_loss, of_reward = theirs.get(f"{_ACTOR}.kl_loss_coef"), theirs.get("algorithm.kl_ctrl.kl_coef")
    if not in_loss and unread & set(_KL):
        notes.append(f"algorithm.kl_coef is {of_loss} with {_KL[0]}, {of_reward} with {_KL[1]}; set algorithm.kl_coef")
    elif (coef := of_loss if in_loss else of_reward if in_reward else None) is not None:
        values["algorithm.kl_coef"] = coef
    if in_loss and in_reward and of_loss != of_reward:
        notes.append(f"algorithm.kl_ctrl.kl_coef={of_reward}: one algorithm.kl_coef holds for loss and reward")
    if in_reward and not in_loss and _KL[0] not in unread and theirs.get("algorithm.kl_penalty") in KL_ESTIMATORS:
        values["algorithm.kl_estimator"] = KL_ESTIMATORS[theirs["algorithm.kl_penalty"]]
    if (path := theirs.get(_REWARD[0])) is not None and unread.isdisjoint(_REWARD):
        values["reward.function"] = f"{path}:{theirs.get(_REWARD[1], 'compute_score')}"
    enable, length, penalty = _OVERLONG
    if theirs.get(enable) and unread.isdisjoint(_OVERLONG):
        values["reward.overlong_buffer"] = theirs.get(length, 0)
        values["reward.overlong_penalty"] = theirs.get(penalty, 1.0)
    if theirs.get("data.filter_overlong_prompts"):
        values["data.overlong_prompts"] = "drop"
    devices = prod(theirs.get(key, 1) for key in _NODES)
    if isinstance(devices, int) and devices > 1 and unread.isdisjoint(_NODES):
        values |= {"controller.backend": "ray", "controller.num_workers": devices}
    if known := trackers_of(theirs.get("trainer.logger")):
        values["trainer.trackers"] = known
    if (prompt := theirs.get("data.prompt_key", "prompt")) != "prompt":
        values["data.columns"] = {"prompt": prompt}
    return notes
