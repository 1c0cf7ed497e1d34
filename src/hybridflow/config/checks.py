"""Values that need each other: one function per subject, each returning what contradicts.

Only the configuration is looked at; what needs a file or a tokenizer is checked where that is opened.
"""

from collections.abc import Iterator
from math import isqrt

from hybridflow.algorithms.declarations import ESTIMATORS
from hybridflow.config.roles import ROLES
from hybridflow.config.sections.base import RoleName
from hybridflow.config.sections.config import Config
from hybridflow.errors import ConfigError

REWARD_ARGUMENTS = (
    *("data_source", "solution_str", "ground_truth", "extra_info"),
    *("data_sources", "solution_strs", "ground_truths", "extra_infos"),
)
"""What a reward function is given of each sample."""


def contradictions(config: Config) -> list[str]:
    """One line for each contradiction between two keys, with both values and the fix; empty if there is none."""
    return [problem for subject in SUBJECTS for problem in subject(config)]


def check(config: Config) -> None:
    """Raise ConfigError with every contradiction of a `Config` that was built in Python."""
    if problems := contradictions(config):
        raise ConfigError("\n  ".join([f"{len(problems)} problem(s) in the configuration:", *problems]))


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
            f"rollout.group_size=1 gives algorithm.advantage={advantage!r} nothing to compare, every advantage would "
            f"be 0; use a group_size of 2 or more, or advantage = {_advantages_with('values')}"
        )
    elif estimator.at_most_group_size:
        name, default = estimator.at_most_group_size
        value = config.algorithm.advantage_kwargs.get(name, default)
        if isinstance(value, int) and value > rollout.group_size:
            yield (
                f"algorithm.advantage_kwargs.{name}={value} exceeds rollout.group_size={rollout.group_size}; "
                f"{advantage} draws {name} of a group's responses"
            )
    if config.algorithm.filter_groups and rollout.group_size == 1:
        yield (
            "algorithm.filter_groups=true with rollout.group_size=1 leaves out every group, as one response differs "
            "from no other; use a group_size of 2 or more"
        )
    for name, section in (("rollout", rollout), ("validation", validation)):
        if section.group_size > rollout.max_running_sequences:
            yield (
                f"{name}.group_size={section.group_size} exceeds rollout.max_running_sequences="
                f"{rollout.max_running_sequences}, but a group is decoded together; raise max_running_sequences"
            )
        if section.temperature == 0 and section.group_size > 1:
            yield (
                f"{name}.temperature=0 gives the same response {section.group_size} times "
                f"({name}.group_size={section.group_size}); use a temperature above 0 or group_size = 1"
            )


def _advantages_with(column: str) -> str:
    """The estimators that read one of EXTRA_COLUMNS, as a fix names them."""
    return " or ".join(repr(name) for name, estimator in ESTIMATORS.items() if column in estimator.extra_columns)


def _kl(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.kl_in_reward and algorithm.kl_in_loss:
        yield (
            "algorithm.kl_in_reward=true and algorithm.kl_in_loss=true count the same KL twice with one kl_coef; "
            "set one of them to false"
        )
    if algorithm.kl_in_reward and not algorithm.estimator.takes_kl_in_reward:
        yield (
            f"algorithm.kl_in_reward=true has no place in algorithm.advantage={algorithm.advantage!r}, which does not "
            "compare sums of rewards; use kl_in_loss = true"
        )
    if algorithm.kl_controller == "adaptive" and not algorithm.kl_in_reward:
        yield (
            "algorithm.kl_controller='adaptive' steers the KL in the reward, but algorithm.kl_in_reward=false; "
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
                f"{function} needs what the trainer computes beside its log-probs, but "
                "actor.old_log_probs_from='rollout' leaves that pass out; use old_log_probs_from = 'trainer'"
            )
        if "teacher_log_probs" in columns and not config.teacher.model_path:
            yield f"{function} needs a teacher, but teacher.model_path is empty; name it"
        if "reward_components" in columns and not config.reward.weights:
            yield (
                f"{function} compares several rewards, but reward.weights={{}} names none; name the numbers that the "
                "function returns, as in {correct = 1.0, format = 0.2}"
            )


def _teacher(config: Config) -> Iterator[str]:
    teacher, advantage = config.teacher, config.algorithm.advantage
    if not teacher.model_path:
        if teacher.loss != "none":
            yield f"teacher.loss={teacher.loss!r} needs a teacher, but teacher.model_path is empty; name its directory"
        if config.algorithm.estimator.is_zero and not config.algorithm.kl_in_loss and not config.actor.entropy_coef:
            yield (
                f"algorithm.advantage={advantage!r} leaves nothing to learn from; set teacher.loss with "
                "teacher.model_path, or another advantage"
            )
    elif teacher.loss == "none" and advantage in ESTIMATORS and "teacher_log_probs" not in config.extra_columns:
        yield (
            f"teacher.model_path={teacher.model_path!r} is read by nothing: teacher.loss='none' and "
            f"algorithm.advantage={advantage!r}; set teacher.loss, or advantage = "
            f"{_advantages_with('teacher_log_probs')}"
        )
    if teacher.loss != "none" and teacher.coef == 0:
        yield f"teacher.coef=0 leaves teacher.loss={teacher.loss!r} without effect; use more than 0, or loss = 'none'"


def _rollout_correction(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if config.corrects_rollouts and config.actor.old_log_probs_from == "rollout":
        yield (
            "actor.old_log_probs_from='rollout' makes every weight of algorithm.rollout_weights and statistic of "
            "algorithm.rollout_reject that of a ratio of 1; use old_log_probs_from = 'trainer', or leave them out"
        )
    bounds = {"rollout_weight_bounds": algorithm.rollout_weight_bounds}
    bounds |= {f"rollout_reject.{name}": pair for name, pair in algorithm.rollout_reject.items()}
    for key, (lowest, highest) in bounds.items():
        if lowest > highest:
            yield f"algorithm.{key}=[{lowest}, {highest}] leaves nothing between; the lower bound comes first"


def _old_log_probs(config: Config) -> Iterator[str]:
    rollout = config.rollout
    limits = {"temperature": rollout.temperature == 0, "top_k": rollout.top_k > 0, "top_p": rollout.top_p < 1}
    if config.actor.old_log_probs_from == "rollout" and any(limits.values()):
        key = next(key for key, limiting in limits.items() if limiting)
        yield (
            f"actor.old_log_probs_from='rollout' with rollout.{key}={getattr(rollout, key)} compares probabilities "
            "under different distributions; use old_log_probs_from = 'trainer', or sample from the whole one "
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
            f"critic.warmup_steps={warmup_steps} leaves the actor none of trainer.total_steps={total_steps}; "
            f"use at most {total_steps - 1}"
        )


def _order(config: Config) -> Iterator[str]:
    data = config.data
    if data.order in ("curriculum", "weighted") and not data.order_by:
        yield f"data.order={data.order!r} orders rows by numbers, but data.order_by is empty; name their column"
    if data.order in ("shuffled", "sequential") and data.order_by:
        yield (
            f"data.order_by={data.order_by!r} is read by no data.order={data.order!r}; use order = 'curriculum' or "
            "'weighted', or leave it out"
        )


def _validation(config: Config) -> Iterator[str]:
    if config.trainer.val_every and not config.data.val_files:
        yield (
            f"trainer.val_every={config.trainer.val_every}, but data.val_files is empty; "
            "name a validation file or use val_every = 0"
        )


def _placement(config: Config) -> Iterator[str]:
    pools, num_workers = config.placement.pools, config.controller.num_workers
    if pools and num_workers != 1:
        yield (
            f"controller.num_workers={num_workers} and placement.pools={pools} both say how many ranks there are; "
            "the pools decide, leave num_workers at 1"
        )
    for name, processes in pools.items():
        if not processes:
            yield f"placement.pools.{name}=[] has no process; give the processes on each node, as in [4] or [4, 4]"
    for role, pool in config.placement.roles.items():
        if pool not in pools:
            known = ", ".join(pools) or "none, as placement.pools is empty"
            yield f"placement.roles.{role}={pool!r} is no pool; there are: {known}"
    rollout_pool = config.placement.roles.get("rollout")
    if rollout_pool in pools and not config.has_rollout_pool:
        yield (
            f"placement.roles.rollout={rollout_pool!r} is the actor's own pool, where it generates itself; leave it "
            "out, or name another pool"
        )
    used: list[RoleName] = [role for role, traits in ROLES.items() if traits.runs(config)]
    for name in list(pools)[1:]:
        if name not in [config.placement.roles.get(role) for role in used]:
            yield (
                f"placement.pools.{name} is the pool of no role that runs; give it one of {', '.join(used)} in "
                f"placement.roles, or remove it"
            )


def _parallel(config: Config) -> Iterator[str]:
    parallel, controller = config.parallel, config.controller
    size = parallel.tensor * parallel.sequence
    if size == 1:
        return
    both = f"parallel.tensor={parallel.tensor} times parallel.sequence={parallel.sequence}"
    if controller.backend == "local":
        yield f"{both} needs {size} ranks that meet, but controller.backend='local' is one process; use backend = 'ray'"
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
        yield f"rollout.stop_strings={list(rollout.stop_strings)} has an empty text, which ends every response"
    if rollout.backend == "embedded":
        if rollout.tensor > 1:
            yield f"rollout.tensor={rollout.tensor}, but the embedded engine is one on each rank; use backend = 'vllm'"
        if parallel.tensor > 1 and not config.has_rollout_pool:
            yield (
                f"parallel.tensor={parallel.tensor} shares layers among ranks, but rollout.backend='embedded' "
                "generates with the whole model on each of them; use rollout.backend = 'vllm' with rollout.tensor, or "
                "generate in a pool of its own (placement.roles.rollout)"
            )
        return
    for name, temperature in (("rollout", rollout.temperature), ("validation", config.validation.temperature)):
        if temperature and not 0.01 <= temperature <= 2:
            yield (
                f"{name}.temperature={temperature} with rollout.backend='vllm', which samples at 0, or from 0.01 to 2; "
                "use one of these, or backend = 'embedded'"
            )
    if config.model.dtype == "float64":
        yield "rollout.backend='vllm' has no model.dtype='float64'; use float32 or bfloat16, or backend = 'embedded'"
    if 0 < rollout.max_model_len < longest:
        yield (
            f"rollout.max_model_len={rollout.max_model_len} cannot hold data.max_prompt_length="
            f"{data.max_prompt_length} and data.max_response_length={data.max_response_length}; use 0, or at least "
            f"{longest}"
        )
    if rollout.tensor > 1 and config.controller.backend == "local":
        yield (
            f"rollout.tensor={rollout.tensor} needs ranks that meet, but controller.backend='local' is one process; "
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
            yield f"memory.offload.{role}={how!r}, but {reason}; leave the role out"


def _lora(config: Config) -> Iterator[str]:
    if config.lora.rank and config.parallel.tensor > 1:
        yield (
            f"lora.rank={config.lora.rank} with parallel.tensor={config.parallel.tensor}: adapters are not shared by "
            "the ranks of a layer; use parallel.tensor = 1, which shards weights over all ranks as well"
        )
    if config.model.compile and config.parallel.tensor > 1:
        yield (
            f"model.compile=true with parallel.tensor={config.parallel.tensor}: layers in which ranks meet are not "
            "compiled; use one of them"
        )
    if config.lora.rank and not config.lora.targets:
        yield "lora.targets=[] leaves nothing that learns; name some linear layers"


def _reward(config: Config) -> Iterator[str]:
    reward = config.reward
    if reward.weights and reward.model_path:
        yield (
            f"reward.weights={reward.weights} weighs numbers of a function, but reward.model_path="
            f"{reward.model_path!r} gives one score; leave one of them empty"
        )
    if reward.overlong_buffer > config.data.max_response_length:
        yield (
            f"reward.overlong_buffer={reward.overlong_buffer} exceeds data.max_response_length="
            f"{config.data.max_response_length}; a response would lose score before its first token"
        )
    if reward.kwargs and not reward.function:
        yield f"reward.kwargs={reward.kwargs} are arguments of reward.function, which is empty; name it"
    taken = [name for name in reward.kwargs if name in REWARD_ARGUMENTS]
    if taken:
        yield f"reward.kwargs.{taken[0]} is what each sample brings; the others of this kind are {REWARD_ARGUMENTS}"
    if reward.model_path and reward.function:
        yield (
            f"reward.model_path={reward.model_path!r} and reward.function={reward.function!r} both give the score; "
            "leave one of them empty"
        )


def _backend(config: Config) -> Iterator[str]:
    controller = config.controller
    if controller.backend == "local" and (controller.address or config.placement.pools):
        key = "controller.address" if controller.address else "placement.pools"
        yield f"{key} is set, but controller.backend='local' is this process alone; use backend = 'ray'"


def _parts(config: Config) -> Iterator[str]:
    if config.controller.parts == "measured" and config.trainer.deterministic:
        yield (
            "controller.parts='measured' lets timings decide which rank computes a row, but trainer.deterministic=true "
            "promises equal bits; use parts = 'equal', or deterministic = false"
        )


SUBJECTS = (
    _placement,
    _backend,
    _parallel,
    _engine,
    _offload,
    _lora,
    _reward,
    _parts,
    _mini_batches,
    _groups,
    _kl,
    _old_log_probs,
    _extra_columns,
    _teacher,
    _rollout_correction,
    _order,
    _tokens,
    _critic_warmup,
    _validation,
)
