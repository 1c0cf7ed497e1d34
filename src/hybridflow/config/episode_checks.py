"""Checks of the section `environment` against the others."""

from collections.abc import Iterator

from hybridflow.config.sections.config import Config


def episode_problems(config: Config) -> Iterator[str]:
    """Yield one line for each contradiction of a run with environments."""
    environment = config.environment
    if not environment.classes:
        if environment.weights:
            yield f"environment.weights={environment.weights} needs environment.classes, which is empty; set it"
        return
    for name, source in environment.classes.items():
        if ":" not in source.strip(":"):
            yield (f"environment.classes.{name}={source!r} names no class; write 'path.py:Class' or 'module:Class'")
    classes = ", ".join(environment.classes)
    for name in environment.weights:
        if name not in environment.classes:
            yield f"environment.weights.{name} weighs no environment; environment.classes has {classes}"
    missing = [name for name in environment.classes if name not in environment.weights]
    if missing and environment.weights:
        yield f"environment.weights has no weight for {', '.join(missing)}; set one, or 0 to leave it out"
    if environment.weights and not any(environment.weights.values()):
        yield "environment.weights are all 0, so that there are no prompts; set one above 0"
    if environment.weights and config.data.order != "shuffled":
        yield (
            f"data.order={config.data.order!r} and environment.weights both decide which rows come next; set only one "
            "of them"
        )
    yield from _rewards(config)
    yield from _generation(config)


def _rewards(config: Config) -> Iterator[str]:
    for key, value in (("function", config.reward.function), ("model_path", config.reward.model_path)):
        if value:
            yield (
                f"reward.{key}={value!r} and environment.classes both give the rewards; set only one of them (an "
                "environment's `reward` may call the function)"
            )


def _generation(config: Config) -> Iterator[str]:
    """Yield what episodes do not do yet."""
    rollout = config.rollout
    for key, value, needed in (
        ("rollout.replay", rollout.replay, ""),
        ("rollout.tensor", rollout.tensor, 1),
        ("data.chat_template", config.data.chat_template, True),
    ):
        if value != needed:
            yield f"{key}={value!r} is not supported with environment.classes; use {needed!r}"
    if config.rows_per_episode > 1:
        yield from _several_rows(config)


def _several_rows(config: Config) -> Iterator[str]:
    """Yield what would count the rows of an episode as sequences."""
    rows = f"environment.max_rows={config.environment.max_rows}"
    if not config.actor.loss_aggregation.startswith("token-"):
        yield (
            f"actor.loss_aggregation={config.actor.loss_aggregation!r} would count the rows of an episode as sequences "
            f"({rows}); use 'token-mean' or 'token-sum'"
        )
