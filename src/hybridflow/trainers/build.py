"""The composition root: a configuration becomes pools, groups, data, a run directory and a trainer."""

from hybridflow.config import Config
from hybridflow.controller import ClassWithInitArgs, LocalBackend, ResourcePoolManager, Role, Worker, WorkerGroup
from hybridflow.data import BatchLoader, RLHFDataset, SFTDataset, load_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.models import DTYPES
from hybridflow.runtime import measure_peak_flops, set_deterministic, set_num_threads
from hybridflow.trainers.ppo import PPOTrainer
from hybridflow.trainers.run_directory import RunDirectory
from hybridflow.trainers.sft import SFTTrainer
from hybridflow.trainers.validation import Validator
from hybridflow.workers import ActorRolloutWorker, CriticWorker, ReferenceWorker, RewardWorker, SFTWorker


def build_trainer(config: Config) -> PPOTrainer:
    """Everything that `hybridflow train` runs. Raises ConfigError, DataError or ModelError before training starts."""
    _prepare(config, train_files=True)
    dataset = _prompts(config, config.data.train_files)
    loader = BatchLoader(dataset, config.data.train_batch_size, seed=config.trainer.seed, shuffle=config.data.shuffle)
    total_steps = config.trainer.total_steps or config.trainer.epochs * len(loader)
    actor_steps = max(total_steps - config.critic.warmup_steps, 1)
    run = RunDirectory(config)
    groups = _Groups(config)
    actor_rollout = groups.build(
        Role.ActorRollout, ActorRolloutWorker, total_updates=actor_steps * _updates_per_step(config, "actor")
    )
    rewards = groups.build(Role.Reward, RewardWorker)
    return PPOTrainer(
        config,
        actor_rollout=actor_rollout,
        rewards=rewards,
        loader=loader,
        total_steps=total_steps,
        run=run,
        critic=groups.build(Role.Critic, CriticWorker, total_updates=total_steps * _updates_per_step(config, "critic"))
        if config.uses_critic
        else None,
        reference=groups.build(Role.RefPolicy, ReferenceWorker) if config.uses_reference else None,
        validator=_validator(config, actor_rollout, rewards) if config.data.val_files else None,
        peak_flops=measure_peak_flops(DTYPES[config.model.dtype]),
    )


def build_sft_trainer(config: Config) -> SFTTrainer:
    """Everything that `hybridflow sft` runs."""
    _prepare(config, train_files=True)
    loader = BatchLoader(
        _examples(config, config.data.train_files),
        config.sft.batch_size,
        seed=config.trainer.seed,
        shuffle=config.data.shuffle,
    )
    total_steps = config.trainer.total_steps or config.trainer.epochs * len(loader)
    run = RunDirectory(config)
    return SFTTrainer(
        config,
        policy=_Groups(config).build(Role.Actor, SFTWorker, total_updates=total_steps),
        loader=loader,
        total_steps=total_steps,
        run=run,
        validation=_examples(config, config.data.val_files) if config.data.val_files else None,
    )


def build_validator(config: Config, checkpoint: str | None = None) -> Validator:
    """What `hybridflow evaluate` runs: the model of model.path, or with the weights of a checkpoint directory."""
    _prepare(config, train_files=False)
    if not config.data.val_files:
        raise ConfigError("data.val_files is empty; name the parquet file(s) to evaluate on.")
    groups = _Groups(config)
    actor_rollout = groups.build(Role.ActorRollout, ActorRolloutWorker)
    if checkpoint is not None:
        actor_rollout.load(checkpoint)
    return _validator(config, actor_rollout, groups.build(Role.Reward, RewardWorker))


class _Groups:
    """Builds worker groups on the configured backend and pools."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.backend = LocalBackend()
        self.pools = ResourcePoolManager({"global_pool": [config.controller.num_workers]})

    def build(self, role: Role, cls: type[Worker], **kwargs: int) -> WorkerGroup:
        return WorkerGroup(
            self.pools.get_resource_pool(role),
            ClassWithInitArgs(cls, config=self.config, **kwargs),
            backend=self.backend,
            name=role.value,
        )


def _prepare(config: Config, *, train_files: bool) -> None:
    missing = [key for key, value in (("model.path", config.model.path),) if not value]
    if train_files and not config.data.train_files:
        missing.append("data.train_files")
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be set; set it in the recipe or as KEY=VALUE on the command line."
        )
    set_num_threads(config.controller.threads)
    set_deterministic(config.trainer.deterministic)


def _prompts(config: Config, files: tuple[str, ...], max_samples: int = 0) -> RLHFDataset:
    data = config.data
    return RLHFDataset(
        files,
        load_tokenizer(config.model.path),
        data.max_prompt_length,
        overlong=data.overlong_prompts,
        chat_template=data.chat_template,
        max_samples=max_samples,
    )


def _examples(config: Config, files: tuple[str, ...]) -> SFTDataset:
    data = config.data
    tokenizer = load_tokenizer(config.model.path)
    return SFTDataset(
        files, tokenizer, data.max_prompt_length, data.max_response_length, chat_template=data.chat_template
    )


def _validator(config: Config, actor_rollout: WorkerGroup, rewards: WorkerGroup) -> Validator:
    return Validator(
        _prompts(config, config.data.val_files, config.validation.max_samples),
        actor_rollout,
        rewards,
        batch_size=config.validation.batch_size,
        group_size=config.validation.group_size,
        seed=config.trainer.seed,
    )


def _updates_per_step(config: Config, role: str) -> int:
    section = config.actor if role == "actor" else config.critic
    return section.epochs * (config.data.train_batch_size // (section.mini_batch_size or config.data.train_batch_size))
