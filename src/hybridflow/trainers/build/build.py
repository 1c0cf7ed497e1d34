"""Builds the trainer of reinforcement learning (`hybridflow train`) from a configuration."""

from collections.abc import Mapping

from hybridflow.config import Config
from hybridflow.controller import ClassWithInitArgs, Role
from hybridflow.data import RLHFDataset
from hybridflow.errors import ConfigError
from hybridflow.models.model_sizes import decoder_shape
from hybridflow.trainers.build.build_generation import open_prompts
from hybridflow.trainers.build.build_run import TrainingKind, build_run
from hybridflow.trainers.build.preconditions import (
    require_columns,
    require_positions,
    require_reward_functions,
    require_rollout_engine,
    require_same_tokenizer,
    settle_auto,
    settle_routes,
    settle_rows,
    with_required_files,
)
from hybridflow.trainers.build.program import run_on_placeholders
from hybridflow.trainers.build.role_classes import role_classes
from hybridflow.trainers.build.start_report import report_start
from hybridflow.trainers.run.ppo_trainer import PPOTrainer
from hybridflow.trainers.run.run_trainer import RunParts
from hybridflow.trainers.run.speed import LearnerWork
from hybridflow.trainers.stages import updates_per_step
from hybridflow.trainers.validation import Validator


def build_trainer(config: Config) -> PPOTrainer:
    """Build the trainer of `hybridflow train`; see `build_run`."""
    config = with_required_files(config, "data.train_files")
    config = settle_routes(settle_rows(settle_auto(config)))
    require_rollout_engine(config)
    require_columns(config)
    require_same_tokenizer(config)

    def prompts(files: tuple[str, ...], max_samples: int, order_by: str) -> RLHFDataset:
        dataset = open_prompts(config, files, max_samples, order_by)
        longest, response = dataset.longest_prompt, config.data.max_response_length
        found = f"the longest prompt has {longest} tokens and data.max_response_length={response}"
        require_positions(config, longest + response, found)
        require_reward_functions(config, dataset.samples(), files)
        if config.environment.weights:
            dataset.weigh_sources(config.environment.weights)
        return dataset

    def trainer(parts: RunParts[RLHFDataset]) -> PPOTrainer:
        groups, validator = parts.groups, None
        if parts.validation:
            rollout = groups.get(Role.Rollout, groups[Role.ActorRollout])
            validator = Validator(parts.validation, rollout, groups[Role.Reward], config)
        return PPOTrainer(parts, validator)

    program = TrainingKind(
        kind="train",
        open_dataset=prompts,
        batch_key="data.train_batch_size",
        batch_size=config.data.train_batch_size,
        classes=lambda total_steps: _classes(config, total_steps),
        learners=_learners(config),
        trainer=trainer,
    )
    return build_run(config, program)


def _classes(config: Config, total_steps: int) -> Mapping[Role, ClassWithInitArgs]:
    """Return the worker class of each role, after one step of the program on placeholders."""
    warmup_steps = config.critic.warmup_steps
    if total_steps <= warmup_steps:
        raise ConfigError(
            f"critic.warmup_steps={warmup_steps} leaves the actor no step of the {total_steps} of "
            f"trainer.epochs={config.trainer.epochs}; use at most {total_steps - 1}, or train for longer."
        )
    actor_updates = (total_steps - warmup_steps) * updates_per_step(config, config.actor)
    classes = role_classes(config, actor_updates, total_steps * updates_per_step(config, config.critic))
    run_on_placeholders(config, classes)
    report_start(config, total_steps)
    return classes


def _learners(config: Config) -> dict[str, LearnerWork]:
    learners = {"actor": LearnerWork(config.actor.epochs, decoder_shape(config.model.path))}
    if config.uses_critic:
        critic_shape = decoder_shape(config.critic.model_path or config.model.path, has_lm_head=False)
        learners["critic"] = LearnerWork(config.critic.epochs, critic_shape)
    return learners
