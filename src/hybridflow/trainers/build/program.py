"""One step of a recipe on placeholder workers: finds missing columns before a worker starts, traces the dataflow."""

from collections.abc import Mapping

from hybridflow.config import Config
from hybridflow.config.roles import pool_of, pools_of, ranks_of
from hybridflow.controller import ClassWithInitArgs, ResourcePool, Role
from hybridflow.controller.placeholder import PlaceholderBackend, synthetic_batch
from hybridflow.runtime.observe import TraceEvent
from hybridflow.trainers.build.groups import spawn_groups
from hybridflow.trainers.build.role_classes import role_classes
from hybridflow.trainers.ppo import PPO
from hybridflow.trainers.rl_metrics import batch_metrics, lengths_of
from hybridflow.trainers.run.samples import samples_of
from hybridflow.trainers.sampling.in_flight import require_in_flight
from hybridflow.trainers.sampling.sampling import Sampling
from hybridflow.workers.generating import DATASET_COLUMNS
from hybridflow.workers.losses import actor_columns, actor_loss


def run_on_placeholders(config: Config, classes: Mapping[Role, ClassWithInitArgs] | None = None) -> list[TraceEvent]:
    """Run one step on synthetic prompts with placeholder workers, and return its trace.

    Raises ConfigError if updates in flight cannot serve the algorithm, AlgorithmError for a parameter out of range, and
    FieldError for a column that no method made, with the method that needs it and the method that makes it.
    """
    require_in_flight(config)
    backend = PlaceholderBackend(_lengths(config))
    pools = {name: ResourcePool(processes) for name, processes in pools_of(config).items()}
    groups = spawn_groups(config, backend, classes or role_classes(config), pools)
    config = config.with_values("algorithm", max_sampling_rounds=1)
    sampling = Sampling(config, groups.get(Role.Rollout, groups[Role.ActorRollout]), groups[Role.Reward])
    algorithm = PPO(config, groups, sample=sampling, sync_weights=dict, costs_of=list)  # there are no weights to sync
    algorithm.global_step = config.critic.warmup_steps
    prompts = synthetic_batch(DATASET_COLUMNS, config.data.train_batch_size)
    prompts.meta_info.clear()
    batch = algorithm.step(lambda: prompts)
    _check_policy_loss(config)
    batch_metrics(batch, config.data.max_response_length)
    lengths_of(batch)
    samples_of(batch, config, 1, text_of=str)
    return backend.trace.take()


def _lengths(config: Config) -> dict[str, int]:
    """Return the lengths of the axes that the configuration sets."""
    own = {"components": len(config.reward.weights), "candidates": config.teacher.top_k}
    return {**own, "expert_layers": 1, "experts_per_token": 1}


def _check_policy_loss(config: Config) -> None:
    """Compute the loss of one synthetic row, which raises AlgorithmError for parameters out of range."""
    rows = synthetic_batch([*actor_columns(config), "selected_tokens"], 1, _lengths(config))
    outputs = {name: rows.batch["response_mask"].float() for name in ("log_probs", "entropies")}
    if "candidate_ids" in rows.batch:
        outputs["candidate_log_probs"] = -rows.batch["candidate_ids"].float()
    num_tokens = int(rows.batch["response_mask"].sum())
    actor_loss(config, config.algorithm.kl_coef, num_tokens, num_sequences=1)(outputs, rows)


def placement_notes(config: Config) -> dict[str, str]:
    """Return pool and ranks of each method, as in "main, 4 ranks", by the name of the method in the trace."""
    notes = {}
    for role, cls_with_init in role_classes(config).items():
        pool, ranks = pool_of(config, role.value), ranks_of(config, role.value)
        for method in dir(cls_with_init.cls):
            notes[f"{cls_with_init.cls.__name__}.{method}"] = f"{pool}, {ranks} rank{'s' if ranks > 1 else ''}"
    return notes
