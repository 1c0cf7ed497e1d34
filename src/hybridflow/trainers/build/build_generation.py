"""Builds programs that generate without training: `hybridflow evaluate`, `generate` and `serve`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from hybridflow.checkpoint import Checkpoint
from hybridflow.checkpoint.model_fingerprint import require_same_base
from hybridflow.checkpoint.store import stored_weights
from hybridflow.config import Config, EnvironmentConfig, ParallelConfig, PlacementConfig
from hybridflow.controller import Backend, ClassWithInitArgs, Role, WorkerGroup
from hybridflow.data import RLHFDataset
from hybridflow.data.parquet_rows import Row
from hybridflow.data.row_forms import RowForm
from hybridflow.data.tokenizer import tokenizer_of
from hybridflow.engines.engine_state import require_same_adapters
from hybridflow.errors import CheckpointConfigError
from hybridflow.models.loading import model_config
from hybridflow.models.support import num_positions
from hybridflow.trainers.build.build_run import prepare_driver_process
from hybridflow.trainers.build.groups import build_backend, build_groups, closing_on_error
from hybridflow.trainers.build.preconditions import (
    require_reward_functions,
    require_rollout_engine,
    settle_auto,
    settle_rows,
    template_findings,
    with_required_files,
)
from hybridflow.trainers.build.role_classes import environment_closures, reward_worker
from hybridflow.trainers.run.text_generation import TextGenerator, checked_prompts
from hybridflow.trainers.validation import Validator
from hybridflow.workers import ActorRolloutWorker


def build_validator(config: Config, checkpoint: Checkpoint | None = None) -> Validator:
    """Build the validator of `hybridflow evaluate`, with the weights of model.path or of a checkpoint."""
    config = settle_rows(_prepare(config, checkpoint, "data.val_files"))
    prompts = open_prompts(config, config.data.val_files, config.validation.max_samples)
    require_reward_functions(config, prompts.samples(), config.data.val_files)
    rewards = {Role.Reward: reward_worker(config)}
    with _groups(config, checkpoint, rewards) as (backend, groups):
        return Validator(prompts, groups[Role.ActorRollout], groups[Role.Reward], config, backend)


def build_generator(
    config: Config,
    checkpoint: Checkpoint | None = None,
    prompts: Sequence[Row] = (),
    *,
    cap_response_length: bool = False,
) -> TextGenerator:
    """Build the generator of `hybridflow generate`, with the weights of model.path or of a checkpoint.

    `checked_prompts` checks the given `prompts` before a worker starts. Environments take no part in it.
    """
    config = _prepare(config.model_copy(update={"environment": EnvironmentConfig()}), checkpoint)
    config = checked_prompts(config, prompts, cap_response_length=cap_response_length)
    tokenizer = tokenizer_of(config)
    with _groups(config, checkpoint, {}) as (backend, groups):
        return TextGenerator(config, tokenizer, groups[Role.ActorRollout], backend)


@contextmanager
def built_server(
    config: Config, checkpoint: Checkpoint | None = None, *, host: str, port: int, key: str, record: str = ""
) -> Iterator[WorkerGroup]:
    """Yield a `ServingWorker` in this process, with the weights of model.path or of a checkpoint.

    The ranks and environments of the run take no part in it.
    """
    from hybridflow.workers.serving import ServingWorker  # with a web server

    alone = {"placement": PlacementConfig(), "parallel": ParallelConfig(), "environment": EnvironmentConfig()}
    config = config.model_copy(update=alone).with_values("controller", backend="local", num_workers=1)
    config = _prepare(config, checkpoint)
    template_findings(config)
    data, rollout, positions = config.data, config.rollout, num_positions(model_config(config.model.path))
    longest = positions or data.max_prompt_length + data.max_response_length
    config = config.with_values("rollout", tensor=1, max_model_len=rollout.max_model_len or longest)
    address = {"host": host, "port": port, "key": key, "record": record}
    worker = ClassWithInitArgs(ServingWorker, config=config, **address)
    with _groups(config, checkpoint, {Role.ActorRollout: worker}) as (backend, groups):
        try:
            yield groups[Role.ActorRollout]
        finally:
            backend.close()


def open_prompts(config: Config, files: tuple[str, ...], max_samples: int = 0, order_by: str = "") -> RLHFDataset:
    """Open prompt files with the settings of the section `data`; `max_samples` 0: all rows."""
    data = config.data
    return RLHFDataset(
        files,
        tokenizer_of(config),
        data.max_prompt_length,
        overlong=data.overlong_prompts,
        chat_template=data.chat_template,
        max_samples=max_samples,
        order_by=order_by,
        form=RowForm(data.columns, data.map),
    )


def _prepare(config: Config, checkpoint: Checkpoint | None, *file_keys: str) -> Config:
    """Check the configuration, prepare this process, and return the configuration without training."""
    config = with_required_files(config, *file_keys)
    config = settle_auto(_without_learning(config), resumes=False)
    require_rollout_engine(config)
    _require_base(config, checkpoint)
    prepare_driver_process(config)
    return config


@contextmanager
def _groups(
    config: Config, checkpoint: Checkpoint | None, others: Mapping[Role, ClassWithInitArgs]
) -> Iterator[tuple[Backend, Mapping[Role, WorkerGroup]]]:
    """Yield the backend and the groups: generation with the weights of the checkpoint, and `others`."""
    worker = ClassWithInitArgs(ActorRolloutWorker, config=config, **environment_closures(config))
    classes = {Role.ActorRollout: worker, **others}
    with closing_on_error(build_backend(config)) as backend:
        groups = build_groups(config, backend, classes)
        if checkpoint is not None:
            groups[Role.ActorRollout].load(str(checkpoint.directory))
        yield backend, groups


def _without_learning(config: Config) -> Config:
    """Return the configuration of a program that only generates; a rollout pool then holds the whole model."""
    if not config.has_rollout_pool:
        return config
    roles = {**config.placement.roles, "actor_rollout": config.placement.roles["rollout"]}
    return config.model_copy(update={"parallel": ParallelConfig()}).with_values("placement", roles=roles)


def _require_base(config: Config, checkpoint: Checkpoint | None) -> None:
    """Raise CheckpointConfigError if the checkpoint has no policy, or its adapters or their base model differ."""
    if checkpoint is None:
        return
    if checkpoint.info.get("kind") == "reward-model":
        raise CheckpointConfigError(
            f"'{checkpoint.directory}' is a checkpoint of a reward model, which cannot generate; `hybridflow export` "
            "writes it as a directory for reward.model_path."
        )
    with stored_weights(checkpoint) as (_, lora):
        require_same_adapters(config.lora if config.lora.rank else None, {"lora": lora})
    if config.lora.rank:
        require_same_base(checkpoint, config.model.path)
