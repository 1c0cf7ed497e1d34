"""Checks of contradictions between keys: one function per subject, which yields one line for each contradiction.

The checks read only the configuration; values that depend on a file or a tokenizer are checked where it is opened.
"""

from collections.abc import Iterator
from math import isqrt

from hybridflow.algorithms.declarations import ESTIMATORS, LOSSES
from hybridflow.config.environment import wrong_variable
from hybridflow.config.episode_checks import episode_problems
from hybridflow.config.roles import ROLES, ranks_of
from hybridflow.config.sections.base import RoleName
from hybridflow.config.sections.config import Config
from hybridflow.errors import ConfigError

REWARD_ARGUMENTS = (
    *("data_source", "solution_str", "ground_truth", "extra_info"),
    *("data_sources", "solution_strs", "ground_truths", "extra_infos"),
)
"""Arguments of a reward function, for one sample or for a batch."""


def contradictions(config: Config) -> list[str]:
    """Return one line for each contradiction between keys, with both values and the fix."""
    return [problem for subject in SUBJECTS for problem in subject(config)]


def check(config: Config) -> None:
    """Raise ConfigError with all contradictions in a `Config` that was built in Python."""
    if problems := contradictions(config):
        raise ConfigError("\n  ".join([f"{len(problems)} problem(s) in the configuration:", *problems]))


def _environment(config: Config) -> Iterator[str]:
    if problem := wrong_variable(config.controller.environment):
        yield f"controller.environment: {problem}"


def _mini_batches(config: Config) -> Iterator[str]:
    train_batch_size = config.data.train_batch_size
    for name, size in (("actor", config.actor.mini_batch_size), ("critic", config.critic.mini_batch_size)):
        if size and train_batch_size % size:
            divisors = _divisors(train_batch_size)
            valid = " or ".join(filter(None, [", ".join(divisors[:-1]), divisors[-1]]))
            yield (
                f"{name}.mini_batch_size={size} does not divide data.train_batch_size={train_batch_size}; use {valid}"
            )


def _divisors(number: int) -> list[str]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return [str(n) for n in sorted({*small, *(number // n for n in small)})]


def _groups(config: Config) -> Iterator[str]:
    rollout, validation = config.rollout, config.validation
    advantage, estimator = config.algorithm.advantage, config.algorithm.estimator
    if estimator.compares_groups and rollout.group_size == 1:
        yield (
            f"rollout.group_size=1 makes every advantage of algorithm.advantage={advantage!r} 0; use a group_size of 2 "
            f"or more, or advantage = {_advantages_with('values')}"
        )
    elif estimator.at_most_group_size:
        name, default = estimator.at_most_group_size
        value = config.algorithm.advantage_kwargs.get(name, default)
        if isinstance(value, int) and value > rollout.group_size:
            yield (
                f"algorithm.advantage_kwargs.{name}={value} exceeds rollout.group_size={rollout.group_size}; "
                f"{advantage} draws {name} responses of each group"
            )
    if config.algorithm.filter_groups and rollout.group_size == 1:
        yield (
            "algorithm.filter_groups=true with rollout.group_size=1 discards every group, as a single response has no "
            "difference; use a group_size of 2 or more"
        )
    for name, section in (("rollout", rollout), ("validation", validation)):
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


def _advantages_with(column: str) -> str:
    """Return the names of the estimators that read a column of EXTRA_COLUMNS, joined by "or"."""
    return " or ".join(repr(name) for name, estimator in ESTIMATORS.items() if column in estimator.extra_columns)


def _kl(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.kl_in_reward and not algorithm.estimator.takes_kl_in_reward:
        yield (
            f"algorithm.kl_in_reward=true is not supported with algorithm.advantage={algorithm.advantage!r}, which "
            "does not compare sums of rewards; use kl_in_loss = true"
        )
    if algorithm.kl_importance_weight and not algorithm.kl_in_loss:
        yield (
            "algorithm.kl_importance_weight=true weights the KL in the loss, but algorithm.kl_in_loss=false; set "
            "kl_in_loss = true or kl_importance_weight = false"
        )
    if algorithm.kl_controller == "adaptive" and not algorithm.kl_in_reward:
        yield (
            "algorithm.kl_controller='adaptive' adjusts the KL in the reward, but algorithm.kl_in_reward=false; "
            "set kl_in_reward = true or kl_controller = 'fixed'"
        )
    if algorithm.kl_controller == "adaptive" and algorithm.kl_coef == 0:
        yield (
            "algorithm.kl_coef=0 stays 0 under algorithm.kl_controller='adaptive', which multiplies it; "
            "start from a kl_coef above 0"
        )


def _extra_columns(config: Config) -> Iterator[str]:
    algorithm, actor = config.algorithm, config.actor
    for function, columns in (
        (f"algorithm.advantage={algorithm.advantage!r}", algorithm.estimator.extra_columns),
        (f"actor.policy_loss={actor.policy_loss!r}", actor.loss.extra_columns),
    ):
        if "sum_squared_probs" in columns and actor.old_log_probs_from == "rollout":
            yield (
                f"{function} needs a column of the trainer's log-prob pass, but actor.old_log_probs_from='rollout' "
                "skips that pass; use old_log_probs_from = 'trainer'"
            )
        if "teacher_log_probs" in columns and not config.teacher.model_path:
            yield f"{function} needs a teacher, but teacher.model_path is empty; set it"
        if "reward_components" in columns and not config.reward.weights:
            yield (
                f"{function} compares several rewards, but reward.weights={{}} names none; give weights to the numbers "
                "that the reward function returns, as in {correct = 1.0, format = 0.2}"
            )


def _teacher(config: Config) -> Iterator[str]:
    teacher, advantage = config.teacher, config.algorithm.advantage
    if not teacher.model_path:
        if teacher.loss != "none":
            yield f"teacher.loss={teacher.loss!r} needs a teacher, but teacher.model_path is empty; set it"
        if config.algorithm.estimator.is_zero and not config.algorithm.kl_in_loss and not config.actor.entropy_coef:
            yield (
                f"algorithm.advantage={advantage!r} leaves no term in the loss; set teacher.loss and "
                "teacher.model_path, or another advantage"
            )
    elif teacher.loss == "none" and advantage in ESTIMATORS and "teacher_log_probs" not in config.extra_columns:
        yield (
            f"teacher.model_path={teacher.model_path!r} has no effect: teacher.loss='none' and "
            f"algorithm.advantage={advantage!r}; set teacher.loss, or advantage = "
            f"{_advantages_with('teacher_log_probs')}"
        )
    if teacher.loss != "none" and teacher.coef == 0:
        yield f"teacher.coef=0 disables teacher.loss={teacher.loss!r}; use a coef above 0, or loss = 'none'"


def _policy_loss(config: Config) -> Iterator[str]:
    actor, weights = config.actor, config.algorithm.rollout_weights
    valid = actor.loss.aggregations
    if valid and actor.loss_aggregation not in valid:
        yield (
            f"actor.policy_loss={actor.policy_loss!r} is not defined for actor.loss_aggregation="
            f"{actor.loss_aggregation!r}; use {' or '.join(map(repr, valid))}"
        )
    if actor.loss.has_behavior_weight and weights != "none":
        yield (
            f"actor.policy_loss={actor.policy_loss!r} and algorithm.rollout_weights={weights!r} both weight each token "
            "by trainer / sampler, so that it counts twice; use rollout_weights = 'none', or another policy_loss"
        )
    if actor.loss.has_behavior_weight and actor.old_log_probs_from == "rollout":
        yield (
            f"actor.old_log_probs_from='rollout' makes the weights of actor.policy_loss={actor.policy_loss!r} always "
            "1; use old_log_probs_from = 'trainer', or another policy_loss"
        )


def _rollout_correction(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if config.corrects_rollouts and config.actor.old_log_probs_from == "rollout":
        yield (
            "actor.old_log_probs_from='rollout' makes the ratio of algorithm.rollout_weights and "
            "algorithm.rollout_reject always 1; use old_log_probs_from = 'trainer', or unset both"
        )
    bounds = {"rollout_weight_bounds": algorithm.rollout_weight_bounds}
    bounds |= {f"rollout_reject.{name}": pair for name, pair in algorithm.rollout_reject.items()}
    for key, (lowest, highest) in bounds.items():
        if lowest > highest:
            yield f"algorithm.{key}=[{lowest}, {highest}] is an empty range; write the lower bound first"


def _old_log_probs(config: Config) -> Iterator[str]:
    rollout = config.rollout
    limits = {"temperature": rollout.temperature == 0, "top_k": rollout.top_k > 0, "top_p": rollout.top_p < 1}
    if config.actor.old_log_probs_from == "rollout" and any(limits.values()):
        key = next(key for key, limiting in limits.items() if limiting)
        yield (
            f"actor.old_log_probs_from='rollout' with rollout.{key}={getattr(rollout, key)} compares probabilities "
            "under different distributions; use old_log_probs_from = 'trainer', or sample from the full distribution "
            "(temperature above 0, top_k = 0, top_p = 1)"
        )


def _tokens(config: Config) -> Iterator[str]:
    budget, data = config.memory.max_tokens_per_micro_batch, config.data
    longest = data.max_prompt_length + data.max_response_length
    if budget != "auto" and budget < longest:
        yield (
            f"memory.max_tokens_per_micro_batch={budget} cannot hold one sequence of data.max_prompt_length="
            f"{data.max_prompt_length} and data.max_response_length={data.max_response_length}; use at least {longest}"
        )


def _critic_warmup(config: Config) -> Iterator[str]:
    warmup_steps, total_steps = config.critic.warmup_steps, config.trainer.total_steps
    if warmup_steps and not config.uses_critic:
        yield (
            f"critic.warmup_steps={warmup_steps}, but algorithm.advantage={config.algorithm.advantage!r} "
            f"has no critic; use 0, or advantage = {_advantages_with('values')}"
        )
    elif warmup_steps and 0 < total_steps <= warmup_steps:
        yield (
            f"critic.warmup_steps={warmup_steps} leaves the actor no step of trainer.total_steps={total_steps}; "
            f"use at most {total_steps - 1}"
        )


def _order(config: Config) -> Iterator[str]:
    data = config.data
    if data.order in ("curriculum", "weighted") and not data.order_by:
        yield f"data.order={data.order!r} needs a column of numbers, but data.order_by is empty; set it"
    if data.order in ("shuffled", "sequential") and data.order_by:
        yield (
            f"data.order_by={data.order_by!r} has no effect with data.order={data.order!r}; use order = 'curriculum' "
            "or 'weighted', or unset order_by"
        )


def _validation(config: Config) -> Iterator[str]:
    if config.trainer.val_every and not config.data.val_files:
        yield (
            f"trainer.val_every={config.trainer.val_every}, but data.val_files is empty; "
            "add a validation file or use val_every = 0"
        )


def _placement(config: Config) -> Iterator[str]:
    pools, num_workers = config.placement.pools, config.controller.num_workers
    if pools and num_workers != 1:
        yield (
            f"controller.num_workers={num_workers} and placement.pools={pools} both set the number of ranks; "
            "use only the pools and leave num_workers at 1"
        )
    for name, processes in pools.items():
        if not processes:
            yield f"placement.pools.{name}=[] has no processes; list the processes on each node, as in [4] or [4, 4]"
    for role, pool in config.placement.roles.items():
        if pool not in pools:
            known = ", ".join(pools) or "none, placement.pools is empty"
            yield f"placement.roles.{role}={pool!r} is not a defined pool; defined pools: {known}"
    rollout_pool = config.placement.roles.get("rollout")
    if rollout_pool in pools and not config.has_rollout_pool:
        yield (
            f"placement.roles.rollout={rollout_pool!r} is the actor's pool, where the actor generates; remove it, or "
            "use another pool"
        )
    used: list[RoleName] = [role for role, traits in ROLES.items() if traits.runs(config)]
    for name in list(pools)[1:]:
        if name not in [config.placement.roles.get(role) for role in used]:
            yield (
                f"placement.pools.{name} has no role of this run; place one of {', '.join(used)} on it in "
                f"placement.roles, or remove it"
            )


def _min_processes(config: Config) -> Iterator[str]:
    pools = {**config.placement.pools} or {"main": (config.controller.num_workers,)}
    for name, fewest in config.placement.min_processes.items():
        key = f"placement.min_processes.{name}={fewest}"
        if name not in pools:
            yield f"{key} is of no defined pool; defined pools: {', '.join(pools)}"
        elif fewest > sum(pools[name]):
            yield f"{key} is more than the {sum(pools[name])} processes of the pool; use at most {sum(pools[name])}"
        if config.controller.backend == "local":
            yield f"{key} needs controller.backend = 'ray', which can lose processes; remove it, or use 'ray'"
        elif not config.recovery.max_restarts:
            yield f"{key} needs recovery.max_restarts of 1 or more: a run changes its processes as it recovers"
        if config.trainer.deterministic:
            yield (
                f"{key} lets the number of ranks change, and sums over other ranks round differently, but "
                "trainer.deterministic=true rules that out; use deterministic = false, or remove the key"
            )


def _shared_devices(config: Config) -> Iterator[str]:
    pools, controller = config.placement.pools, config.controller
    ranks = {f"placement.pools.{name}": list(processes) for name, processes in pools.items()}
    for key, processes in (ranks or {"controller.num_workers": [controller.num_workers]}).items():
        if controller.gpus_per_worker < 1 and max(processes, default=1) > 1:
            yield (
                f"controller.gpus_per_worker={controller.gpus_per_worker} would place several ranks of one pool on a "
                f"GPU, but {key}={processes}; use one process on each node, or gpus_per_worker = 1"
            )
    nodes = pools.get(config.placement.roles.get("rollout", ""), ())
    if config.rollout.weight_sync == "ipc" and config.has_rollout_pool and len(nodes) > 1:
        yield (
            f"rollout.weight_sync='ipc' shares memory of one node, but the rollout engines are on {len(nodes)} "
            f"(placement.pools.{config.placement.roles['rollout']}={list(nodes)}); use weight_sync = 'broadcast'"
        )


def _parallel(config: Config) -> Iterator[str]:
    parallel, controller = config.parallel, config.controller
    size = parallel.tensor * parallel.sequence
    if size == 1:
        return
    both = f"parallel.tensor={parallel.tensor} times parallel.sequence={parallel.sequence}"
    if controller.backend == "local":
        yield f"{both} needs {size} processes, but controller.backend='local' has one; use backend = 'ray'"
        return
    placement = config.placement
    sharded: list[RoleName] = [role for role, traits in ROLES.items() if traits.has_sharded_model(config)]
    elsewhere = {pool for role, pool in placement.roles.items() if role not in sharded} - {
        placement.roles.get(role, next(iter(placement.pools), "")) for role in sharded if not ROLES[role].offline
    }
    pools = {f"placement.pools.{n}": sum(ranks) for n, ranks in placement.pools.items() if n not in elsewhere}
    for key, ranks in (pools or {"controller.num_workers": controller.num_workers}).items():
        if ranks % size:
            yield f"{both} does not divide {key}={ranks}; change one of them"


def _engine(config: Config) -> Iterator[str]:
    rollout, data, parallel = config.rollout, config.data, config.parallel
    longest = data.max_prompt_length + data.max_response_length
    if "" in rollout.stop_strings:
        yield (
            f"rollout.stop_strings={list(rollout.stop_strings)} has an empty string, which ends every response; "
            "remove it"
        )
    if rollout.backend == "embedded":
        if rollout.tensor > 1:
            yield f"rollout.tensor={rollout.tensor} is not supported with rollout.backend='embedded'; use 'vllm'"
        if parallel.tensor > 1 and not config.has_rollout_pool:
            yield (
                f"parallel.tensor={parallel.tensor} splits layers over ranks, but rollout.backend='embedded' "
                "generates with the whole model on each rank; use rollout.backend = 'vllm' with rollout.tensor, or "
                "generate in a separate pool (placement.roles.rollout)"
            )
        return
    for name, temperature in (("rollout", rollout.temperature), ("validation", config.validation.temperature)):
        if temperature and not 0.01 <= temperature <= 2:
            yield (
                f"{name}.temperature={temperature} is not supported by rollout.backend='vllm': expected 0, or 0.01 to "
                "2; change it, or use backend = 'embedded'"
            )
    if config.model.dtype == "float64":
        yield (
            "model.dtype='float64' is not supported by rollout.backend='vllm'; use float32 or bfloat16, or backend = "
            "'embedded'"
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
    pools = config.placement.pools
    pool = config.placement.roles.get(role, next(iter(pools), ""))
    key, ranks = (
        (f"placement.pools.{pool}", sum(pools.get(pool, ())))
        if pools
        else ("controller.num_workers", config.controller.num_workers)
    )
    if ranks % rollout.tensor:
        yield f"rollout.tensor={rollout.tensor} does not divide {key}={ranks}; change one of them"


def _offload(config: Config) -> Iterator[str]:
    for role, how in config.memory.offload.items():
        traits = ROLES[role]
        if not traits.offline and not (traits.has_group(config) and traits.has_sharded_model(config)):
            reason = traits.reason.format(config=config)
            yield f"memory.offload.{role}={how!r}, but {reason}; remove the role"


def _lora(config: Config) -> Iterator[str]:
    if config.lora.rank and config.parallel.tensor > 1:
        yield (
            f"lora.rank={config.lora.rank} is not supported with parallel.tensor={config.parallel.tensor}; use "
            "parallel.tensor = 1, which also shards weights over all ranks"
        )
    if config.model.compile is True and config.parallel.tensor > 1:
        yield (
            f"model.compile=true is not supported with parallel.tensor={config.parallel.tensor}; use compile = false "
            "or tensor = 1"
        )
    if config.lora.rank and not config.lora.targets:
        yield "lora.targets=[] leaves no trained weights; name some linear layers"


def _reward(config: Config) -> Iterator[str]:
    reward = config.reward
    if reward.weights and reward.model_path:
        yield (
            f"reward.weights={reward.weights} needs the numbers of a reward function, but reward.model_path="
            f"{reward.model_path!r} gives one score; set only one of them"
        )
    if reward.overlong_buffer > config.data.max_response_length:
        yield (
            f"reward.overlong_buffer={reward.overlong_buffer} exceeds data.max_response_length="
            f"{config.data.max_response_length}; use at most {config.data.max_response_length}"
        )
    if reward.kwargs and not reward.function:
        yield f"reward.kwargs={reward.kwargs} needs reward.function, which is empty; set it"
    taken = [name for name in reward.kwargs if name in REWARD_ARGUMENTS]
    if taken:
        yield f"reward.kwargs.{taken[0]} is reserved for the sample; reserved names: {', '.join(REWARD_ARGUMENTS)}"
    if reward.model_path and reward.function:
        yield (
            f"reward.model_path={reward.model_path!r} and reward.function={reward.function!r} both give the score; "
            "set only one of them"
        )


def _backend(config: Config) -> Iterator[str]:
    controller = config.controller
    has_pools = config.placement.pools and not config.rollout.replay  # a replay runs them one after another
    if controller.backend == "local" and (controller.address or has_pools):
        key = "controller.address" if controller.address else "placement.pools"
        yield f"{key} is set, but controller.backend='local' has one process; use backend = 'ray'"


def _parts(config: Config) -> Iterator[str]:
    if config.controller.parts == "measured" and config.trainer.deterministic:
        yield (
            "controller.parts='measured' assigns rows to ranks by timings, but trainer.deterministic=true needs a "
            "fixed assignment; use parts = 'equal', or deterministic = false"
        )


def _lag(config: Config) -> Iterator[str]:
    lag, actor = config.trainer.lag, config.actor
    yield from _in_flight(config)
    if not lag:
        return
    if not (config.corrects_rollouts or actor.loss.has_behavior_weight or actor.old_log_probs_from == "rollout"):
        losses = " or ".join(repr(name) for name, loss in LOSSES.items() if loss.has_behavior_weight)
        yield (
            f"trainer.lag={lag} trains on samples of older weights, and no key corrects for it; set "
            f"actor.policy_loss = {losses} (decoupled PPO), algorithm.rollout_weights = 'token' or 'sequence' "
            "(truncated importance weights, TIS), these with algorithm.rollout_weight_outside = 'mask' (masked ones, "
            "IcePop), algorithm.rollout_reject = {sequence_mean_k3 = [0.0, 0.01]} (mismatched tokens or responses "
            "left out), or actor.old_log_probs_from = 'rollout' (log-probs of the rollout as the old ones); or use "
            "lag = 0"
        )


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
    if rollout.tensor > 1 and config.has_rollout_pool:
        yield (
            f"{key} is not supported with rollout.tensor={rollout.tensor}, whose ranks would load weights at different "
            "steps; use tensor = 1, or on_new_weights = 'wait'"
        )


def _profile(config: Config) -> Iterator[str]:
    how = config.trainer
    if how.total_steps and how.profile_steps and max(how.profile_steps) > how.total_steps:
        yield (
            f"trainer.profile_steps has step {max(how.profile_steps)}, but trainer.total_steps={how.total_steps} ends "
            "the run before; name earlier steps, or raise total_steps"
        )
    if how.profile_steps and not how.profile_ranks:
        yield "trainer.profile_ranks=[] profiles no rank of the steps in trainer.profile_steps; name ranks, such as [0]"
    roles: list[RoleName] = [
        role for role, traits in ROLES.items() if traits.has_group(config) or role in ("actor", "reference")
    ]
    largest = max(ranks_of(config, role) for role in roles) - 1
    if how.profile_ranks and max(how.profile_ranks) > largest:
        yield (
            f"trainer.profile_ranks has rank {max(how.profile_ranks)}, but the ranks of this run are 0 to {largest} "
            "(controller.num_workers, placement.pools); name some of these"
        )


SUBJECTS = (
    _placement,
    _min_processes,
    _backend,
    _environment,
    _shared_devices,
    _parallel,
    _engine,
    _offload,
    _lora,
    _reward,
    episode_problems,
    _parts,
    _mini_batches,
    _groups,
    _kl,
    _old_log_probs,
    _extra_columns,
    _teacher,
    _policy_loss,
    _rollout_correction,
    _order,
    _tokens,
    _critic_warmup,
    _validation,
    _lag,
    _profile,
)
