"""The composition root of learning from given data: SFT, DPO and IPO, reward models."""

from collections.abc import Callable, Mapping

from hybridflow.config import Config
from hybridflow.controller import ClassWithInitArgs, Role, Worker, WorkerGroup
from hybridflow.data import BatchLoader, PreferenceDataset, SFTDataset, load_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.models import decoder_shape
from hybridflow.trainers.build import prepare_process, speedometer_of
from hybridflow.trainers.groups import build_backend, build_groups, closing_on_error
from hybridflow.trainers.objectives import DPO, SFT, Objective, RewardModeling
from hybridflow.trainers.offline import OfflineTrainer
from hybridflow.trainers.preconditions import require_files, require_one_rank, require_room
from hybridflow.trainers.run_directory import RunDirectory
from hybridflow.trainers.run_identity import Kind
from hybridflow.trainers.speed import Learner
from hybridflow.trainers.token_budgets import settle_token_budgets
from hybridflow.workers import PreferenceModelWorker, ReferenceWorker, SFTWorker

OpenDataset = Callable[[tuple[str, ...], int, str], SFTDataset | PreferenceDataset]
"""(files, how many of the first rows, the column of numbers to order by) -> the data set."""


def build_sft_trainer(config: Config) -> OfflineTrainer:
    """Everything that `hybridflow sft` runs; as `build_trainer` otherwise."""
    require_files(config, "data.train_files")

    def examples(files: tuple[str, ...], max_samples: int, order_by: str) -> SFTDataset:
        data = config.data
        return SFTDataset(
            files,
            load_tokenizer(config.model.path),
            data.max_prompt_length,
            data.max_response_length,
            chat_template=data.chat_template,
            max_samples=max_samples,
            order_by=order_by,
        )

    return _build(config, "sft", examples, SFTWorker, lambda groups: SFT(groups[Role.Actor]))


def build_dpo_trainer(config: Config) -> OfflineTrainer:
    """Everything that `hybridflow dpo` runs. The reference is reference.model_path, or the model it starts from."""
    require_files(config, "data.train_files", reference=True)
    reference = None
    if not config.actor_is_reference:
        reference = ClassWithInitArgs(ReferenceWorker, config=config, temperature=1.0)

    def objective(groups: Mapping[Role, WorkerGroup]) -> DPO:
        return DPO(config, groups[Role.Actor], groups[Role.Actor if reference is None else Role.RefPolicy])

    return _build(config, "dpo", _pairs(config, "policy"), SFTWorker, objective, reference)


def build_reward_model_trainer(config: Config) -> OfflineTrainer:
    """Everything that `hybridflow reward-model` runs: a scalar head on model.path, to be exported for
    reward.model_path."""
    require_files(config, "data.train_files")
    if config.lora.rank:
        raise ConfigError(
            f"lora.rank={config.lora.rank} does not fit a reward model, whose head is new and learns as a whole; use "
            "lora.rank = 0."
        )
    pairs = _pairs(config, "reward_model")
    return _build(
        config, "reward-model", pairs, PreferenceModelWorker, lambda groups: RewardModeling(groups[Role.Actor])
    )


def _pairs(config: Config, layout: str) -> OpenDataset:
    def pairs(files: tuple[str, ...], max_samples: int, order_by: str) -> PreferenceDataset:
        data = config.data
        return PreferenceDataset(
            files,
            load_tokenizer(config.model.path),
            data.max_prompt_length,
            data.max_response_length,
            layout="policy" if layout == "policy" else "reward_model",
            chat_template=data.chat_template or layout == "reward_model",  # as RewardModelWorker will have it
            max_samples=max_samples,
            order_by=order_by,
        )

    return pairs


def _build(
    config: Config,
    kind: Kind,
    open_dataset: OpenDataset,
    learner: type[Worker],
    objective: Callable[[Mapping[Role, WorkerGroup]], Objective],
    reference: ClassWithInitArgs | None = None,
) -> OfflineTrainer:
    require_one_rank(config)
    prepare_process(config)
    dataset = open_dataset(config.data.train_files, 0, config.data.order_by)
    require_room(config, dataset.longest)
    offline, trainer = config.offline, config.trainer
    if offline.batch_size > len(dataset):
        raise ConfigError(
            f"offline.batch_size={offline.batch_size} is larger than the data set of {len(dataset)} examples; use at "
            f"most {len(dataset)}, or more data."
        )
    loader = BatchLoader(dataset, offline.batch_size, seed=trainer.seed, order=config.data.order)
    validation = None
    if config.data.val_files:
        validation = open_dataset(config.data.val_files, config.validation.max_samples, "")
        require_room(config, validation.longest)
    total_steps = trainer.total_steps or trainer.epochs * len(loader)
    run = RunDirectory(config, kind)
    classes = {Role.Actor: ClassWithInitArgs(learner, config=config, total_updates=total_steps)}
    if reference is not None:
        classes[Role.RefPolicy] = reference
    shape = decoder_shape(config.model.path, has_lm_head=kind != "reward-model")
    with closing_on_error(build_backend(config)) as backend:
        groups = build_groups(config, backend, classes)
        settle_token_budgets(config, groups, run)
        return OfflineTrainer(
            config,
            objective=objective(groups),
            learner=groups[Role.Actor],
            loader=loader,
            total_steps=total_steps,
            run=run,
            validation=validation,
            speedometer=speedometer_of(config, {kind.replace("-", "_"): Learner(1, shape)}),
            backend=backend,
        )
