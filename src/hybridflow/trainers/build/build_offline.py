"""Builds the trainers of offline training (SFT, DPO and IPO, reward models) from a configuration."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from hybridflow.config import Config
from hybridflow.config.checks.models import REWARD_MODEL_ADAPTERS
from hybridflow.controller import ClassWithInitArgs, Role, Worker, WorkerGroup
from hybridflow.data import PreferenceDataset, SFTDataset, stop_token_ids
from hybridflow.data.row_forms import RowForm
from hybridflow.data.tokenizer import tokenizer_of
from hybridflow.environments import EpisodeEncoder
from hybridflow.models.model_sizes import decoder_shape
from hybridflow.trainers.build.build_run import OpenDataset, TrainingKind, build_run
from hybridflow.trainers.build.preconditions import require_positions, settle_auto, with_required_files
from hybridflow.trainers.offline.objectives import DPO, SFT, Objective, RewardModeling
from hybridflow.trainers.offline.offline_trainer import OfflineTrainer
from hybridflow.trainers.run.run_identity import Kind
from hybridflow.trainers.run.speed import LearnerWork
from hybridflow.workers import OfflinePolicyWorker, PreferenceModelWorker, ReferenceWorker

Examples = SFTDataset | PreferenceDataset


def build_sft_trainer(config: Config) -> OfflineTrainer:
    """Build the trainer of `hybridflow sft`; see `build_run`."""
    config = settle_auto(with_required_files(config, "data.train_files", generates=False))
    tokenizer = tokenizer_of(config)
    episodes = EpisodeEncoder(tokenizer, stop_token_ids(tokenizer, config.model.path))
    examples = _dataset(config, SFTDataset, chat_template=config.data.chat_template, encode_episode=episodes)
    return _build(config, "sft", examples, OfflinePolicyWorker, lambda groups: SFT(groups[Role.Actor]))


def build_dpo_trainer(config: Config) -> OfflineTrainer:
    """Build the trainer of `hybridflow dpo`; the reference is reference.model_path, or the initial model."""
    config = settle_auto(with_required_files(config, "data.train_files", reference=True, generates=False))
    reference = None
    if not config.actor_is_reference:
        reference = ClassWithInitArgs(ReferenceWorker, config=config, temperature=1.0)

    def objective(groups: Mapping[Role, WorkerGroup]) -> DPO:
        return DPO(config, groups[Role.Actor], groups[Role.Actor if reference is None else Role.RefPolicy])

    return _build(config, "dpo", _pairs(config, "policy"), OfflinePolicyWorker, objective, reference)


def build_reward_model_trainer(config: Config) -> OfflineTrainer:
    """Build the trainer of `hybridflow reward-model`, which puts a scalar head on model.path."""
    config = settle_auto(with_required_files(config, "data.train_files", generates=False))
    REWARD_MODEL_ADAPTERS.require(config)
    pairs = _pairs(config, "reward_model")
    return _build(
        config, "reward-model", pairs, PreferenceModelWorker, lambda groups: RewardModeling(groups[Role.Actor])
    )


def _pairs(config: Config, layout: Literal["policy", "reward_model"]) -> OpenDataset[Examples]:
    has_template = config.data.chat_template or layout == "reward_model"  # as in RewardModelWorker
    stop_ids = stop_token_ids(tokenizer_of(config), config.model.path)
    return _dataset(config, PreferenceDataset, layout=layout, chat_template=has_template, stop_ids=stop_ids)


def _dataset(config: Config, kind: type[Examples], **settings: Any) -> OpenDataset[Examples]:
    """Return the function that opens files as examples of a kind, with the settings of the section `data`."""
    data, tokenizer = config.data, tokenizer_of(config)
    limits = (data.max_prompt_length, data.max_response_length)

    def open_files(files: tuple[str, ...], max_samples: int, order_by: str) -> Examples:
        form = RowForm(data.columns, data.map)
        return kind(files, tokenizer, *limits, max_samples=max_samples, order_by=order_by, form=form, **settings)

    return open_files


def _build(
    config: Config,
    kind: Kind,
    open_examples: OpenDataset[Examples],
    learner: type[Worker],
    objective: Callable[[Mapping[Role, WorkerGroup]], Objective],
    reference: ClassWithInitArgs | None = None,
) -> OfflineTrainer:
    def examples(files: tuple[str, ...], max_samples: int, order_by: str) -> Examples:
        dataset = open_examples(files, max_samples, order_by)
        require_positions(config, dataset.longest, f"the longest example has {dataset.longest} tokens")
        return dataset

    def classes(total_steps: int) -> dict[Role, ClassWithInitArgs]:
        of_roles = {Role.Actor: ClassWithInitArgs(learner, config=config, total_updates=total_steps)}
        return of_roles if reference is None else {**of_roles, Role.RefPolicy: reference}

    shape = decoder_shape(config.model.path, has_lm_head=kind != "reward-model")
    learners = {kind.replace("-", "_"): LearnerWork(1, shape)}
    program = TrainingKind(
        kind=kind,
        open_dataset=examples,
        batch_key="offline.batch_size",
        batch_size=config.offline.batch_size,
        classes=classes,
        learners=learners,
        trainer=lambda parts: OfflineTrainer(parts, objective(parts.groups)),
    )
    return build_run(config, program)
