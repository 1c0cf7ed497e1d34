"""Checks of files, models and settings that fail before any slow step of building a run."""

import math
import os
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, cast, get_args

from hybridflow.checkpoint import CheckpointStore
from hybridflow.config import Config, DTypeName, check
from hybridflow.data import load_tokenizer
from hybridflow.data.chat_templates import chat_template_of
from hybridflow.data.tokenizer import CLOCK, reads_clock, require_tokenizer, stop_token_ids, tokenizer_of
from hybridflow.environments import Finding, check_template
from hybridflow.environments.agents.agent import Agent, names_agent
from hybridflow.environments.processes.arguments import check_names, check_signature, require_single
from hybridflow.environments.processes.closure import ENVIRONMENT, closure_of
from hybridflow.environments.rewards.table import require_known
from hybridflow.errors import (
    ConfigError,
    DataConfigError,
    EnvironmentConfigError,
    ModelConfigError,
    ModelError,
    RolloutConfigError,
)
from hybridflow.models.expert_parallel import require_expert_parallel
from hybridflow.models.hub import with_local_files
from hybridflow.models.loading import model_config, vocabulary_size
from hybridflow.models.quantized_weights import quantized_form
from hybridflow.models.routes import why_not_replayable
from hybridflow.models.support import describe_positions, num_positions
from hybridflow.rollout.vllm import require_vllm
from hybridflow.runtime.declared_function import declared_function
from hybridflow.runtime.device import cpu_has_bfloat16, gpu_has_bfloat16
from hybridflow.runtime.observe import get_logger
from hybridflow.runtime.observe.run_files import read_starts
from hybridflow.runtime.plain_files import require_model_files
from hybridflow.trainers.build.groups import as_ray, build_backend
from hybridflow.trainers.family_check.required import require_families
from hybridflow.workers.algorithm_functions import reads_column


def settle_auto(config: Config, *, resumes: bool = True) -> Config:
    """Return the configuration with the dtype and the date that model.dtype and data.date = "auto" stand for.

    And with the text of the chat template that model.chat_template names.

    A run that continues from a checkpoint keeps what is recorded (unless not `resumes`), also on other devices and on
    another day. Else the dtype is bfloat16 if the workers have GPUs that compute in it, otherwise float32; the date is
    today's if a chat template reads it. Raises CheckpointError if `run.json` is damaged, ConfigError if the configured
    Ray cluster does not answer.
    """
    recorded = _recorded(config) if resumes else {}
    template = config.model.chat_template
    if template:
        template = chat_template_of(template)
        config = config.with_values("model", chat_template=template)
    paths = filter(None, ("" if template else config.model.path, config.reward.model_path))
    if config.data.date == "auto" and (CLOCK in template or any(map(reads_clock, paths))):
        day = recorded.get("data.date", "auto")
        config = config.with_values("data", date=str(date.today()) if day == "auto" else day)
    if config.model.dtype != "auto":
        return config
    if (dtype := recorded.get("model.dtype")) in get_args(DTypeName):
        return config.with_dtype(cast(DTypeName, dtype))
    has_bfloat16 = _gpus_have_bfloat16(config)
    if has_bfloat16 is None and cpu_has_bfloat16():
        logger.info(
            "model.dtype='auto' is float32 on a CPU; this one has bfloat16, which is faster from some million "
            "parameters on: model.dtype='bfloat16'"
        )
    if has_bfloat16 is False:
        logger.warning(
            "model.dtype='auto' is float32 here: the GPUs do not compute in bfloat16 (compute capability 8.0 or later "
            "does); float32 is slower and takes twice the memory."
        )
    return config.with_dtype("bfloat16" if has_bfloat16 else "float32")


def _recorded(config: Config) -> dict[str, Any]:
    """Return the keys of the last start of the run in trainer.run_dir; empty if there is no checkpoint to continue."""
    directory = Path(config.trainer.run_dir)
    if not directory.is_dir() or not CheckpointStore(directory / "checkpoints").list():
        return {}
    starts = read_starts(directory)
    last = starts[-1] if starts and isinstance(starts[-1], dict) else {}
    return dict(last.get("config") or {})


def _gpus_have_bfloat16(config: Config) -> bool | None:
    """Return whether the GPUs of the workers compute in bfloat16; None if the workers have none."""
    if config.controller.backend == "local":
        return gpu_has_bfloat16()
    with as_ray(build_backend(config)) as backend:
        return backend.connection.gpus_have_bfloat16()


logger = get_logger(__name__)


def settle_routes(config: Config) -> Config:
    """Return the configuration with true or false in place of actor.router_replay = "auto".

    Raises ModelConfigError for true if model.path cannot.
    """
    wanted = config.actor.router_replay
    reason = None if wanted is False else why_not_replayable(config.model.path)
    if reason is None and wanted == "auto" and config.rollout.backend == "vllm":
        reason = "is sampled by rollout.backend='vllm', whose routes are replayed only if it is true"
    if reason and wanted is True:
        raise ModelConfigError(
            f"actor.router_replay=true is invalid: model.path='{config.model.path}' {reason}; use 'auto' or false."
        )
    if reason and not reason.startswith("is not"):
        logger.info("actor.router_replay='auto' is false: model.path='%s' %s", config.model.path, reason)
    return config.with_values("actor", router_replay=bool(wanted) and reason is None)


def settle_rows(config: Config) -> Config:
    """Return the configuration with the number of rows that environment.max_rows = 0 stands for.

    Raises EnvironmentConfigError for a chat template that cannot serve episodes, ConfigError for keys that do not go
    with episodes of several rows.
    """
    environment = config.environment
    if not environment.classes:
        return config
    findings = template_findings(config)
    if environment.max_rows:
        return config
    reasons = [f"the chat template changes earlier turns ({each.check})" for each in findings if each.state == "rows"]
    reasons += [f"{name} is an agent" for name, source in environment.classes.items() if _is_agent(source)]
    rows = environment.max_turns if reasons else 1
    if reasons:
        logger.info("an episode may have %d rows of tokens: %s", rows, ", ".join(reasons))
    settled = config.with_values("environment", max_rows=rows)
    check(settled)
    return settled


def template_findings(config: Config) -> list[Finding]:
    """Return what was found of the chat template. Raises EnvironmentConfigError for one that cannot serve episodes."""
    tokenizer = tokenizer_of(config)
    findings = check_template(tokenizer, stop_token_ids(tokenizer, config.model.path))
    if failed := [each for each in findings if each.state == "failed"]:
        raise EnvironmentConfigError(
            f"the chat template of model.path='{config.model.path}' cannot serve episodes: {failed[0].check}: "
            f"{failed[0].detail}. `hybridflow check-template {config.model.path}` shows all checks."
        )
    return findings


def _is_agent(source: str) -> bool:
    closure = closure_of(source, ENVIRONMENT)
    return issubclass(closure.function(), Agent) if closure else names_agent(source)


def require_model_directory(key: str, path: str) -> None:
    """Raise ModelConfigError unless `path`, the value of `key`, is a directory with a config.json and regular files.

    Raises ModelError for weights in a form that is not read.
    """
    try:
        require_model_files(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error  # without the path, which may be long
        raise ModelConfigError(f"{key}='{path}' cannot be read: {reason}.") from error
    quantized_form(path)
    if not (Path(path) / "config.json").is_file():
        raise ModelConfigError(
            f"{key}='{path}' is not a model directory: config.json not found; give a local Hugging Face directory (a "
            f"relative path starts at '{Path.cwd()}'), or a model on the hub, as in Qwen/Qwen2.5-0.5B-Instruct."
        )


WITHOUT_TOKENIZER = ("critic.model_path", "reference.model_path")
"""Models that read the policy's tokens, so that their directories need no tokenizer."""


def with_required_files(config: Config, *file_keys: str, reference: bool = False, generates: bool = True) -> Config:
    """Return the configuration with local copies of what it names on the hub, after checks of the models.

    Raises ConfigError unless model.path and each of `file_keys` (of the section `data`) are set, ModelConfigError
    unless every configured model path is a model directory, DataError for one without the tokenizer that it needs, and
    ModelError for one whose family does not compute what transformers computes. `generates`: the run samples tokens.
    """
    values = {"model.path": config.model.path}
    values |= {key: getattr(config.data, key.removeprefix("data.")) for key in file_keys}
    if missing := [key for key, value in values.items() if not value]:
        raise ConfigError(f"{' and '.join(missing)} must be set, in the recipe or as KEY=VALUE on the command line.")
    config = with_local_files(config)
    used = {"critic": config.uses_critic, "reference": config.uses_reference or reference, "reward": True}
    used["teacher"] = config.uses_teacher
    paths = {f"{name}.model_path": getattr(config, name).model_path for name, is_used in used.items() if is_used}
    models = {key: path for key, path in {"model.path": config.model.path, **paths}.items() if path}
    for key, path in models.items():
        require_model_directory(key, path)
        if key not in WITHOUT_TOKENIZER:
            require_tokenizer(path, key)
    require_known_tokens(config)
    for path in models.values() if config.parallel.expert > 1 else ():
        require_expert_parallel(model_config(path), config.parallel.expert)
    require_families(config, models, generates=generates)
    return config


def require_known_tokens(config: Config) -> None:
    """Raise ModelError unless the policy's vocabulary has every token of its tokenizer and every stop token.

    Log a stop token of the chat template that the model's configuration does not name.
    """
    path, chat_template = config.model.path, config.data.chat_template
    tokenizer, entries = tokenizer_of(config), vocabulary_size(path)
    largest = max(tokenizer.get_vocab().values())
    if largest >= entries:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ModelError(
            f"model.path='{path}': the tokenizer has token {token!r} of id {largest}, but the model has a vocabulary "
            f"of {entries}; remove the token, resize the model's embeddings, or copy both from one directory."
        )
    stop_ids = stop_token_ids(tokenizer, path)
    if own := set(stop_token_ids(tokenizer, path, chat_template)).difference(stop_ids):
        logger.warning(
            "model.path='%s': the chat template ends an answer with %r, and so does this run; name it (%d) also as "
            "eos_token_id in generation_config.json, so that other programs stop there.",
            *(path, tokenizer.decode(list(own)), *own),
        )
    if beyond := [token_id for token_id in stop_ids if not 0 <= token_id < entries]:
        raise ModelError(
            f"model.path='{path}': stop token {beyond[0]} (eos_token_id of generation_config.json or config.json) is "
            f"not in the model's vocabulary of {entries}, so no response could end with it; correct it."
        )


def require_positions(config: Config, longest: int, found: str) -> None:
    """Raise DataConfigError, which says what was `found`, if `longest` tokens exceed the positions of the model."""
    model, data = model_config(config.model.path), config.data
    if longest > (num_positions(model) or math.inf):
        raise DataConfigError(
            f"{found}, but the model has {describe_positions(model)}; lower data.max_prompt_length="
            f"{data.max_prompt_length} or data.max_response_length={data.max_response_length}."
        )


def require_reward_functions(config: Config, samples: Iterable[Mapping[str, Any]], files: Iterable[str]) -> None:
    """Raise ConfigError for a data source without an environment or a reward function, or for a wrong function.

    A function is wrong if a parameter names nothing of a sample, of which `data_source` and `extra_info` are read.
    """
    classes, samples, name = config.environment.classes, [*samples], config.reward.function
    sources = sorted({sample["data_source"] for sample in samples})
    if len(classes) > 1 and (unknown := [source for source in sources if source not in classes]):
        raise EnvironmentConfigError(
            f"no environment serves data_source {', '.join(map(repr, unknown))} in {', '.join(files)}; "
            f"environment.classes has {', '.join(classes)}. Name the class in the column data_source of each row."
        )
    closure = closure_of(name)
    if function := closure.function() if closure else declared_function(name):
        label = getattr(function, "__name__", name) if closure else name
        (require_single if classes else check_signature)(function, label, config.reward.kwargs)
        more = {"messages": []} if classes else {}
        scored = [
            {**each, "solution_str": "", "extra_info": {**(each["extra_info"] or {}), **more}} for each in samples
        ]
        check_names(function, label, config.reward.kwargs, scored)
    elif not (name or classes or config.reward.model_path):
        require_known(sources, files)


def require_columns(config: Config) -> None:
    """Raise ConfigError if a function of the user reads a column that this run does not make."""
    makers = {
        "values": (config.uses_critic, "critic.always=true trains a critic"),
        "ref_log_probs": (
            config.uses_reference,
            "algorithm.kl_in_loss=true runs a reference model, and with algorithm.kl_coef=0 only the function uses it",
        ),
        "teacher_log_probs": (config.uses_teacher, "teacher.model_path names a teacher"),
        "reward_components": (bool(config.reward.weights), "reward.weights names the rewards"),
    }
    for column, (is_made, fix) in makers.items():
        if not is_made and reads_column(config, column):
            raise ConfigError(
                f"algorithm.advantage={config.algorithm.advantage!r} or actor.policy_loss={config.actor.policy_loss!r} "
                f"reads {column}, which nothing in this run makes; {fix}."
            )


def require_same_tokenizer(config: Config) -> None:
    """Raise ModelError if teacher and policy differ in tokens, ConfigError for a teacher.top_k above their number."""
    if not config.uses_teacher:
        return
    path, top_k = config.teacher.model_path, config.teacher.top_k
    theirs, ours = (load_tokenizer(model).get_vocab() for model in (path, config.model.path))
    differing = sorted(token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token))
    if differing:
        raise ModelError(
            f"teacher.model_path='{path}' has another tokenizer than model.path='{config.model.path}': "
            f"{len(differing)} tokens differ, such as {differing[0]!r}; use a teacher with the policy's tokenizer."
        )
    entries = vocabulary_size(path)
    if entries <= max(ours.values()):
        raise ModelError(
            f"teacher.model_path='{path}' has a vocabulary of {entries} entries, but the largest token id of its "
            f"tokenizer is {max(ours.values())}; config.json or the tokenizer belongs to another model."
        )
    both = min(entries, vocabulary_size(config.model.path))
    if config.teacher.loss != "none" and top_k > both:
        raise ConfigError(f"teacher.top_k={top_k}, but policy and teacher share {both} tokens; use at most {both}.")


def require_one_rank(config: Config) -> None:
    """Raise ConfigError for training on several ranks with the local backend, which cannot sum their gradients."""
    if config.controller.backend == "local" and config.controller.num_workers > 1:
        raise ConfigError(
            f"controller.num_workers={config.controller.num_workers} with controller.backend='local' runs ranks one "
            "after another, so their gradients cannot be summed; train with controller.backend = 'ray', or with "
            "num_workers = 1 (generation and evaluation work with any number)."
        )


def require_snapshot_dir(config: Config) -> None:
    """Raise ConfigError if recovery.snapshot_dir is set and is not a directory that can be written."""
    directory = config.recovery.snapshot_dir
    if directory and not Path(directory).is_dir():
        raise ConfigError(f"recovery.snapshot_dir='{directory}' is not a directory; create it, or leave the key empty.")
    if directory and not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"recovery.snapshot_dir='{directory}' cannot be written; choose another directory.")


def require_rollout_engine(config: Config) -> None:
    """Raise RolloutConfigError for an unsuitable dtype or draft model, or if vLLM is needed here and not installed.

    Workers on Ray may have another environment; they check vLLM themselves.
    """
    dtype, rollout, draft = config.model.dtype, config.rollout, config.rollout.speculative.get("model")
    if rollout.quantization and dtype != "bfloat16":
        raise RolloutConfigError(
            f"rollout.quantization={rollout.quantization!r} is not supported with model.dtype={dtype!r}: vLLM "
            "quantizes weights of bfloat16; use dtype = 'bfloat16', or quantization = ''."
        )
    if draft is not None and not Path(str(draft), "config.json").is_file():
        raise RolloutConfigError(
            f"rollout.speculative.model={draft!r} is not a model directory: config.json not found; give the directory "
            "of a smaller model with the same vocabulary."
        )
    if draft is not None and (size := vocabulary_size(str(draft))) != (own := vocabulary_size(config.model.path)):
        raise RolloutConfigError(
            f"rollout.speculative.model={draft!r} has a vocabulary of {size} tokens, but "
            f"model.path={config.model.path!r} one of {own}; give a draft model with the same vocab_size and tokenizer."
        )
    if rollout.backend == "vllm" and config.controller.backend == "local":
        require_vllm()


def require_profile_steps(config: Config, total_steps: int) -> None:
    """Raise ConfigError unless a run of this many steps has every step of trainer.profile_steps."""
    last = max(config.trainer.profile_steps, default=0)
    if last > total_steps:
        raise ConfigError(
            f"trainer.profile_steps has step {last}, but the run ends with step {total_steps}; name earlier steps, or "
            "train for longer (trainer.epochs, trainer.total_steps)."
        )
