"""Checks of generation: the rollout engine, weights that come while sequences run, and environments."""

from collections.abc import Iterator, Mapping
from typing import Any

from hybridflow.algorithms.declarations import ESTIMATORS
from hybridflow.config.checks.refusal import Refusal, any_of
from hybridflow.config.environment_sources import FORMS, is_source
from hybridflow.config.roles import pool_of, ranks_of
from hybridflow.config.sections.config import Config


def _chat_template(config: Config) -> Iterator[str]:
    if config.model.chat_template and not config.data.chat_template:
        yield "model.chat_template has no effect with data.chat_template=false; remove one of them"


def _samples(config: Config) -> Iterator[str]:
    rollout = config.rollout
    for name, section in (("rollout", rollout), ("validation", config.validation)):
        if section.group_size > rollout.max_running_sequences:
            yield (
                f"{name}.group_size={section.group_size} exceeds rollout.max_running_sequences="
                f"{rollout.max_running_sequences}, but a group is decoded at once; raise max_running_sequences"
            )
        if section.temperature == 0 and section.group_size > 1:
            yield (
                f"{name}.temperature=0 gives the same response {section.group_size} times "
                f"({name}.group_size={section.group_size}); use a temperature above 0 or group_size = 1"
            )


def _engine(config: Config) -> Iterator[str]:
    rollout, data = config.rollout, config.data
    longest = data.max_prompt_length + data.max_response_length
    if "" in rollout.stop_strings:
        yield (
            f"rollout.stop_strings={list(rollout.stop_strings)} has an empty string, which ends every response; "
            "remove it"
        )
    if rollout.backend == "embedded" and (rollout.quantization or rollout.speculative):
        key = "quantization" if rollout.quantization else "speculative"
        yield (f"rollout.{key}={getattr(rollout, key)!r} needs rollout.backend = 'vllm'; remove it, or set the backend")
    if rollout.exact and rollout.backend == "vllm":
        yield "rollout.exact=true needs rollout.backend = 'embedded', whose kernels train too; set it, or exact = false"
    yield from _speculative(rollout.speculative)
    if not (rollout.merge_adapters or (rollout.backend == "vllm" and config.lora.rank)):
        yield (
            "rollout.merge_adapters=false needs rollout.backend = 'vllm' and adapters, but rollout.backend="
            f"{rollout.backend!r} and lora.rank={config.lora.rank}; set both, or use merge_adapters = true"
        )
    if rollout.backend == "embedded":
        return
    for name, temperature in (("rollout", rollout.temperature), ("validation", config.validation.temperature)):
        if temperature and not 0.01 <= temperature <= 2:
            yield (
                f"{name}.temperature={temperature} is not supported by rollout.backend='vllm': expected 0, or 0.01 to "
                "2; change it, or use backend = 'embedded'"
            )
    if 0 < rollout.max_model_len < longest:
        yield (
            f"rollout.max_model_len={rollout.max_model_len} cannot hold data.max_prompt_length="
            f"{data.max_prompt_length} and data.max_response_length={data.max_response_length}; use 0, or at least "
            f"{longest}"
        )
    if rollout.tensor > 1 and config.controller.backend == "local":
        yield (
            f"rollout.tensor={rollout.tensor} needs several processes, but controller.backend='local' has one; "
            "use backend = 'ray'"
        )
        return
    role = "rollout" if config.has_rollout_pool else "actor_rollout"
    key = f"placement.pools.{pool_of(config, role)}" if config.placement.pools else "controller.num_workers"
    ranks = ranks_of(config, role)
    if ranks % rollout.tensor:
        yield f"rollout.tensor={rollout.tensor} does not divide {key}={ranks}; change one of them"


def _speculative(values: Mapping[Any, object]) -> Iterator[str]:
    key, counts = "rollout.speculative", [name for name in values if name not in ("method", "model")]
    if values and values.get("method") != (None if "model" in values else "ngram"):
        yield f"{key}={values!r} names no source of drafts, or two; set method = 'ngram', or model to a directory"
    elif "model" in values and not isinstance(values["model"], str):
        yield f"{key}.model={values['model']!r} is not a directory of a draft model"
    if values and "num_speculative_tokens" not in values:
        yield f"{key} needs num_speculative_tokens, the number of tokens in a draft; set it, for example to 3"
    for name in counts:
        number = values[name]
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            yield f"{key}.{name}={number!r} is invalid: expected a positive integer"
        elif "model" in values and name != "num_speculative_tokens":
            yield f"{key}.{name}={number} has no effect with a draft model; remove it"
        elif name == "prompt_lookup_min" and isinstance(most := values.get("prompt_lookup_max"), int) and number > most:
            yield f"{key}.{name}={number} exceeds prompt_lookup_max={most}; exchange them"


def _in_flight(config: Config) -> Iterator[str]:
    rollout, key = config.rollout, f"rollout.on_new_weights={config.rollout.on_new_weights!r}"
    if rollout.replay and not config.updates_in_flight:
        yield (
            f"rollout.replay={rollout.replay!r} needs rollout.on_new_weights = 'retract' and a separate "
            "pool (placement.roles.rollout), as the run that is replayed; set them, or remove replay"
        )
    if rollout.on_new_weights == "wait":
        return
    if not config.trainer.lag:
        yield (
            f"{key} is for sequences that run while the policy learns, but trainer.lag=0 starts them afterwards; set "
            "trainer.lag = 1 or more, or on_new_weights = 'wait'"
        )


def _environments(config: Config) -> Iterator[str]:
    environment = config.environment
    if not environment.classes:
        if environment.weights:
            yield f"environment.weights={environment.weights} needs environment.classes, which is empty; set it"
        return
    for name, source in environment.classes.items():
        if not is_source(source):
            yield f"environment.classes.{name}={source!r} is invalid: expected {FORMS}"
    classes = ", ".join(environment.classes)
    for name in environment.weights:
        if name not in environment.classes:
            yield f"environment.weights.{name} weighs no environment; environment.classes has {classes}"
    missing = [name for name in environment.classes if name not in environment.weights]
    if missing and environment.weights:
        yield f"environment.weights has no weight for {', '.join(missing)}; set one, or 0 to leave it out"
    if environment.weights and not any(environment.weights.values()):
        yield "environment.weights are all 0, so that there are no prompts; set one above 0"
    if not config.data.chat_template:
        yield "data.chat_template=False leaves out what separates the turns of environment.classes; use true"


def _is_embedded(config: Config) -> bool:
    return config.rollout.backend == "embedded"


def _has_environments(config: Config) -> bool:
    return bool(config.environment.classes)


_GREEDY = any_of(name for name, estimator in ESTIMATORS.items() if "baseline_scores" in estimator.extra_columns)
GREEDY_IN_FLIGHT = Refusal(
    "rollout.on_new_weights = 'retract'",
    f"algorithm.advantage = {_GREEDY}",
    "its greedy responses need an idle engine",
    "use on_new_weights = 'wait', or another estimator",
    lambda c: c.updates_in_flight and "baseline_scores" in c.extra_columns,
)
REPLAY_IN_FLIGHT = Refusal(
    "rollout.on_new_weights = 'retract'",
    "hybridflow replay or bisect",
    "the weights that sample a token depend on time",
    "use rollout.replay in a run of its own",
    lambda c: c.updates_in_flight,
)
CHECKS = (_chat_template, _samples, _engine, _in_flight, _environments)
REFUSALS = (
    Refusal(
        "rollout.tensor above 1",
        "rollout.backend = 'embedded'",
        "the embedded engine computes with a whole model",
        "use backend = 'vllm', or tensor = 1",
        lambda c: _is_embedded(c) and c.rollout.tensor > 1,
    ),
    Refusal(
        "parallel.tensor above 1",
        "rollout.backend = 'embedded' in the actor's processes",
        "it splits layers over ranks, but the engine generates with the whole model on each rank",
        "use rollout.backend = 'vllm' with rollout.tensor, or generate in a separate pool (placement.roles.rollout)",
        lambda c: _is_embedded(c) and c.parallel.tensor > 1 and not c.has_rollout_pool,
    ),
    Refusal(
        "model.dtype = 'float64'",
        "rollout.backend = 'vllm'",
        "vLLM does not support it",
        "use float32 or bfloat16, or backend = 'embedded'",
        lambda c: not _is_embedded(c) and c.model.dtype == "float64",
    ),
    Refusal(
        "rollout.on_new_weights = 'retract'",
        "rollout.tensor above 1",
        "an engine's ranks would load weights at different steps",
        "use tensor = 1, or on_new_weights = 'wait'",
        lambda c: c.updates_in_flight and c.rollout.tensor > 1,
    ),
    GREEDY_IN_FLIGHT,
    REPLAY_IN_FLIGHT,
    Refusal(
        "environment.weights",
        "data.order other than 'shuffled'",
        "both decide which rows come next",
        "set only one of them",
        lambda c: _has_environments(c) and bool(c.environment.weights) and c.data.order != "shuffled",
    ),
    Refusal(
        "environment.classes",
        "reward.model_path",
        "both give the rewards",
        "set only one of them",
        lambda c: _has_environments(c) and bool(c.reward.model_path),
    ),
    Refusal(
        "environment.classes",
        "rollout.replay",
        "environments answer at other steps of the engine",
        "remove replay",
        lambda c: _has_environments(c) and bool(c.rollout.replay),
    ),
    Refusal(
        "environment.classes",
        "rollout.tensor above 1",
        "an engine's ranks would get environments' answers at different steps",
        "use tensor = 1",
        lambda c: _has_environments(c) and c.rollout.tensor > 1,
    ),
    Refusal(
        "environment.max_rows above 1",
        "actor.loss_aggregation of sequences",
        "it would count the rows of an episode as sequences",
        "use 'token-mean' or 'token-sum'",
        lambda c: c.rows_per_episode > 1 and not c.actor.loss_aggregation.startswith("token-"),
    ),
)
