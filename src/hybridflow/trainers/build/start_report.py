"""What a run logs at its start: keys without effect, parts of the model that do not train, and what a lag does."""

from collections.abc import Iterator
from pathlib import Path

from hybridflow.config import Config, leaf_keys, load_config
from hybridflow.errors import ConfigError
from hybridflow.models.hub import with_names
from hybridflow.models.loading import model_config
from hybridflow.models.support import other_parts
from hybridflow.runtime.observe import get_logger
from hybridflow.trainers.stages import updates_per_step
from hybridflow.workers.algorithm_functions import keys_without_effect

logger = get_logger(__name__)


def report_start(config: Config, total_steps: int) -> None:
    """Log these lines. Raises ConfigError if all batches would be sampled before training."""
    for line in (*keys_without_effect(config), *_corrections_without_effect(config)):
        logger.warning("%s", line)
    if config.trainer.stream and not config.has_rollout_pool:
        logger.info(
            "trainer.stream: generation and the actor share processes, so only roles in other pools compute while "
            "responses are generated"
        )
    if config.rollout.replay:
        _report_replay(config)
    if lag := config.trainer.lag:
        _report_lag(config, lag, total_steps)


def report_parts(path: str) -> None:
    """Log what happens to the parts of the policy's directory that are not a language model."""
    config = model_config(path)
    if parts := other_parts(config):
        logger.info(
            "model.path='%s' is a %s model, of which only the language model trains; weights of %s do not change, and "
            "an export copies them",
            *(path, config.model_type, " and ".join(parts)),
        )


def _corrections_without_effect(config: Config) -> Iterator[str]:
    """Yield one line for each correction of a mismatch that old log-probs of the rollout engine do not have."""
    if config.actor.old_log_probs_from == "trainer":
        return
    algorithm, actor = config.algorithm, config.actor
    changed = {
        "algorithm.rollout_weights": algorithm.rollout_weights if algorithm.rollout_weights != "none" else "",
        "algorithm.rollout_reject": algorithm.rollout_reject,
        "actor.policy_loss": actor.policy_loss if actor.loss.has_behavior_weight else "",
    }
    for key, value in changed.items():
        if value:
            yield f"{key}={value!r} corrects nothing: actor.old_log_probs_from='rollout' makes its ratio always 1."


def _report_lag(config: Config, lag: int, total_steps: int) -> None:
    if lag >= total_steps:
        raise ConfigError(
            f"trainer.lag={lag} samples all {total_steps} batches of the run with the initial weights; use a lag below "
            f"{total_steps}, or more steps."
        )
    updates = updates_per_step(config, config.actor)
    in_turn = "; generation and training share processes, so they run in turn"
    if config.rollout.on_new_weights != "wait":
        in_turn += ", and no weights come while sequences run"
    logger.info(
        "trainer.lag=%d: a batch is sampled with weights %s%d optimizer steps old, and its last mini-batch is %d steps "
        "from them%s",
        lag,
        "at most " if config.updates_in_flight else "",
        lag * updates,
        (lag + 1) * updates - 1,
        "" if config.has_rollout_pool else in_turn,
    )


def _report_replay(config: Config) -> None:
    """Warn of keys that differ from those of the replayed run."""
    recipe = Path(config.rollout.replay) / "config.toml"
    if not recipe.is_file():
        return
    replayed, keys = leaf_keys(load_config(recipe)), leaf_keys(with_names(config))
    free = ("controller.", "placement.", "rollout.replay", "rollout.weight_sync", "trainer.run_dir", "trainer.stream")
    differ = [
        f"{key} was {replayed[key]!r} and is {value!r}"
        for key, value in keys.items()
        if replayed[key] != value and not key.startswith(free)
    ]
    if differ:
        logger.warning("the replay of %s may have other results: %s", config.rollout.replay, "; ".join(differ))
