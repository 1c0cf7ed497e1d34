"""The composition root: a configuration becomes data, a run directory, pools, groups and a trainer."""

from typing import TYPE_CHECKING

from hybridflow.checkpoint import Checkpoint
from hybridflow.checkpoint.model_fingerprint import require_same_base
from hybridflow.checkpoint.weights import stored_weights
from hybridflow.config import ActorConfig, Config, CriticConfig, ParallelConfig
from hybridflow.controller import Backend, ClassWithInitArgs, Role, WorkerGroup
from hybridflow.data import BatchLoader, RLHFDataset, load_tokenizer
from hybridflow.engines.engine_state import require_same_adapters
from hybridflow.errors import CheckpointConfigError, ConfigError
from hybridflow.kernels import use_kernels
from hybridflow.models import DTYPES, decoder_shape
from hybridflow.runtime import (
    bound_shape_caches,
    keep_freed_memory,
    measure_peak_flops,
    seed_random_state,
    set_deterministic,
    set_num_threads,
)
from hybridflow.trainers.generation import TextGenerator
from hybridflow.trainers.groups import build_backend, build_groups, closing_on_error
from hybridflow.trainers.ppo_trainer import PPOTrainer
from hybridflow.trainers.preconditions import (
    require_files,
    require_one_rank,
    require_positions,
    require_rollout_engine,
    require_same_tokenizer,
)
from hybridflow.trainers.program import reference_of, reward_class, role_classes, run_on_placeholders
from hybridflow.trainers.run_directory import RunDirectory
from hybridflow.trainers.speed import Learner, Speedometer
from hybridflow.trainers.token_budgets import settle_token_budgets
from hybridflow.trainers.validation import Validator
from hybridflow.workers import ActorRolloutWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_trainer(config: Config) -> PPOTrainer:
    """Everything that `hybridflow train` runs. Seeds the process; writes nothing yet.

    Raises ConfigError, DataError, ModelError or CheckpointError, the cheap checks first.
    """
    require_files(config, "data.train_files")
    require_one_rank(config)
    require_rollout_engine(config)
    prepare_process(config)
    tokenizer = load_tokenizer(config.model.path)
    require_same_tokenizer(config, tokenizer)
    prompts = _prompts(config, config.data.train_files, tokenizer, order_by=config.data.order_by)
    require_positions(config, prompts)
    loader = BatchLoader(prompts, config.data.train_batch_size, seed=config.trainer.seed, order=config.data.order)
    validation = _validation_prompts(config, tokenizer) if config.data.val_files else None
    if validation:
        require_positions(config, validation)
    total_steps = config.trainer.total_steps or config.trainer.epochs * len(loader)
    if total_steps <= config.critic.warmup_steps:
        raise ConfigError(
            f"critic.warmup_steps={config.critic.warmup_steps} leaves the actor none of the {total_steps} steps that "
            f"trainer.epochs={config.trainer.epochs} makes; use at most {total_steps - 1}, or train for longer."
        )
    run = RunDirectory(config, "train")

    actor_updates = (total_steps - config.critic.warmup_steps) * _updates_per_step(config, config.actor)
    critic_updates = total_steps * _updates_per_step(config, config.critic)
    classes = role_classes(config, actor_updates, critic_updates)
    run_on_placeholders(config, classes)
    with closing_on_error(build_backend(config)) as backend:
        groups = build_groups(config, backend, classes)
        settle_token_budgets(config, groups, run)
        actor_rollout, rewards = groups[Role.ActorRollout], groups[Role.Reward]
        rollout = groups.get(Role.Rollout)
        return PPOTrainer(
            config,
            actor_rollout=actor_rollout,
            rewards=rewards,
            rollout=rollout,
            critic=groups.get(Role.Critic),
            reference=reference_of(config, groups),
            teacher=groups.get(Role.Teacher),
            loader=loader,
            total_steps=total_steps,
            run=run,
            validator=_validator(config, validation, rollout or actor_rollout, rewards) if validation else None,
            speedometer=speedometer_of(config, _learners(config)),
            backend=backend,
        )


def build_validator(config: Config, checkpoint: Checkpoint | None = None) -> Validator:
    """What `hybridflow evaluate` runs: the model of model.path, or that with the weights of a checkpoint."""
    require_files(config, "data.val_files")
    require_rollout_engine(config)
    config = _without_learning(config)
    _require_base(config, checkpoint)
    prepare_process(config)
    prompts = _validation_prompts(config, load_tokenizer(config.model.path))
    classes = {
        Role.ActorRollout: ClassWithInitArgs(ActorRolloutWorker, config=config),
        Role.Reward: ClassWithInitArgs(reward_class(config), config=config),
    }
    with closing_on_error(build_backend(config)) as backend:
        groups = build_groups(config, backend, classes)
        actor_rollout = _with_weights(groups[Role.ActorRollout], checkpoint)
        return _validator(config, prompts, actor_rollout, groups[Role.Reward], backend)


def build_generator(config: Config, checkpoint: Checkpoint | None = None) -> TextGenerator:
    """What `hybridflow generate` runs: the model of model.path, or that with the weights of a checkpoint."""
    require_files(config)
    require_rollout_engine(config)
    config = _without_learning(config)
    _require_base(config, checkpoint)
    prepare_process(config)
    tokenizer = load_tokenizer(config.model.path)
    classes = {Role.ActorRollout: ClassWithInitArgs(ActorRolloutWorker, config=config)}
    with closing_on_error(build_backend(config)) as backend:
        actor_rollout = build_groups(config, backend, classes)[Role.ActorRollout]
        return TextGenerator(config, tokenizer, _with_weights(actor_rollout, checkpoint), backend)


def _without_learning(config: Config) -> Config:
    """For a program that only generates: where generation has a pool of its own, the model is there too."""
    if not config.has_rollout_pool:
        return config
    roles = {**config.placement.roles, "actor_rollout": config.placement.roles["rollout"]}
    placement = config.placement.model_copy(update={"roles": roles})
    return config.model_copy(update={"placement": placement, "parallel": ParallelConfig()})


def _require_base(config: Config, checkpoint: Checkpoint | None) -> None:
    """Raise CheckpointError for a checkpoint without a policy, for other adapters than `lora` says, or trained beside
    another model than model.path's."""
    if checkpoint is None:
        return
    if checkpoint.info.get("kind") == "reward-model":
        raise CheckpointConfigError(
            f"'{checkpoint.directory}' is of a reward model, which writes no responses; `hybridflow export` makes a "
            "directory for reward.model_path of it."
        )
    with stored_weights(checkpoint) as (_, lora):
        require_same_adapters(config.lora if config.lora.rank else None, {"lora": lora})
    if config.lora.rank:
        require_same_base(checkpoint, config.model.path)


def _with_weights(actor_rollout: WorkerGroup, checkpoint: Checkpoint | None) -> WorkerGroup:
    if checkpoint is not None:
        actor_rollout.load(str(checkpoint.directory))
    return actor_rollout


def prepare_process(config: Config) -> None:
    """Memory, threads, kernels and global random state, before anything is computed: results depend on them."""
    keep_freed_memory(large_blocks=config.controller.backend == "ray")  # then this process has batches, but no model
    bound_shape_caches()
    set_num_threads(config.controller.threads)
    use_kernels(config.controller.compiled_kernels)
    set_deterministic(config.trainer.deterministic)
    seed_random_state(config.trainer.seed)


def _prompts(
    config: Config,
    files: tuple[str, ...],
    tokenizer: "PreTrainedTokenizerBase",
    max_samples: int = 0,
    order_by: str = "",
) -> RLHFDataset:
    data = config.data
    return RLHFDataset(
        files,
        tokenizer,
        data.max_prompt_length,
        overlong=data.overlong_prompts,
        chat_template=data.chat_template,
        max_samples=max_samples,
        order_by=order_by,
    )


def _validation_prompts(config: Config, tokenizer: "PreTrainedTokenizerBase") -> RLHFDataset:
    return _prompts(config, config.data.val_files, tokenizer, config.validation.max_samples)


def _validator(
    config: Config,
    prompts: RLHFDataset,
    actor_rollout: WorkerGroup,
    rewards: WorkerGroup,
    backend: Backend | None = None,
) -> Validator:
    return Validator(
        prompts,
        actor_rollout,
        rewards,
        batch_size=config.validation.batch_size,
        group_size=config.validation.group_size,
        seed=config.trainer.seed,
        backend=backend,
    )


def _updates_per_step(config: Config, section: ActorConfig | CriticConfig) -> int:
    """Optimizer steps in one training step."""
    prompts = config.data.train_batch_size
    return section.epochs * (prompts // (section.mini_batch_size or prompts))


def _learners(config: Config) -> dict[str, Learner]:
    learners = {"actor": Learner(config.actor.epochs, decoder_shape(config.model.path))}
    if config.uses_critic:
        critic_shape = decoder_shape(config.critic.model_path or config.model.path, has_lm_head=False)
        learners["critic"] = Learner(config.critic.epochs, critic_shape)
    return learners


def speedometer_of(config: Config, learners: dict[str, Learner]) -> Speedometer:
    """What measures the speed of these roles."""
    return Speedometer(learners, measure_peak_flops(DTYPES[config.model.dtype]))
