"""The estimated memory of each role of a run on one rank, from the configurations of the run and of its models."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from hybridflow.config import Config
from hybridflow.controller import Role
from hybridflow.errors import ConfigError
from hybridflow.models.forward import max_logits_of, max_logits_on
from hybridflow.models.loading import model_config
from hybridflow.models.memory import MemoryLayout, RankMemory, forward_memory, generation_memory, training_memory
from hybridflow.models.model_sizes import ModelSizes, model_sizes
from hybridflow.models.tensor_parallel import require_tensor_parallel
from hybridflow.runtime.device import own_device
from hybridflow.runtime.observe import get_logger
from hybridflow.trainers.build.groups import meshes_of, pool_of, pools_of, traits_of
from hybridflow.trainers.build.preconditions import require_model_directory
from hybridflow.trainers.build.role_classes import role_classes

GENERATION = "generation"
LEARNING = (Role.ActorRollout, Role.Critic)
VALUE_HEADS = (Role.Critic, Role.Reward)
"""Roles whose models have one output per token or sequence."""

logger = get_logger(__name__)


@dataclass(frozen=True)
class RoleEstimate:
    """The need of one role on a rank while it works; `resident` bytes of it stay while other roles work."""

    name: str
    pool: str
    ranks: int
    memory: RankMemory
    resident: int


def estimate_memory(
    config: Config, device: Literal["gpu", "cpu"] = "gpu", gpu_memory_bytes: int = 0
) -> list[RoleEstimate]:
    """Return the estimate of each role with a model, and of generation by the embedded engine.

    A GPU of more than 8 GiB keeps more logits. `gpu_memory_bytes`: the memory of each GPU; 0: that of this process's
    GPU, or at most 8 GiB without one.
    A role whose model has no fused forward pass is left out, with a warning; so is generation by vLLM. Raises
    ConfigError for float64, for ranks that the parallel sizes do not divide and for a model that parallel.tensor does
    not divide, and ModelError for a model that cannot be read.
    """
    if config.model.dtype == "float64":
        raise ConfigError("model.dtype=float64 has no memory estimate; use float32 or bfloat16.")
    estimates: list[RoleEstimate] = []
    is_known = device == "cpu" or gpu_memory_bytes
    max_logits = max_logits_of(gpu_memory_bytes) if is_known else max_logits_on(own_device())
    for role in role_classes(config):
        if not traits_of(role).has_sharded_model(config):
            continue
        key, path = _model_of(config, role)
        require_model_directory(key, path)
        sizes = model_sizes(path, "value" if role in VALUE_HEADS else "policy")
        if sizes is None:
            logger.warning("%s: '%s' has no estimate; expected a Llama, Qwen2 or Qwen3 model", role.value, path)
        else:
            require_tensor_parallel(model_config(path), config.parallel.tensor)
            estimates += _estimates_of(config, role, sizes, device, max_logits)
    if config.rollout.backend == "vllm":
        logger.warning(
            "generation: left out; vLLM takes rollout.gpu_memory_utilization=%s of each GPU that it generates on",
            config.rollout.gpu_memory_utilization,
        )
    return estimates


def need_of_pools(estimates: list[RoleEstimate]) -> dict[str, int]:
    """Return the largest need of a rank of each pool: one role works, and the others keep what is resident."""
    needs: dict[str, int] = {}
    for working in estimates:
        others = [e for e in estimates if e.pool == working.pool and e is not working]
        need = working.memory.total + sum(other.resident for other in others)
        needs[working.pool] = max(needs.get(working.pool, 0), need)
    return needs


def _model_of(config: Config, role: Role) -> tuple[str, str]:
    """Return the key and the directory of a role's model."""
    paths = {
        Role.Critic: ("critic.model_path", config.critic.model_path),
        Role.RefPolicy: ("reference.model_path", config.reference.model_path),
        Role.Teacher: ("teacher.model_path", config.teacher.model_path),
        Role.Reward: ("reward.model_path", config.reward.model_path),
    }
    key, path = paths.get(role, ("", ""))
    return (key, path) if path else ("model.path", config.model.path)


def _estimates_of(config: Config, role: Role, sizes: ModelSizes, device: str, max_logits: int) -> list[RoleEstimate]:
    pool, longest = pool_of(config, role), config.data.max_prompt_length + config.data.max_response_length
    ranks = sum(pools_of(config)[pool])
    mesh = meshes_of(config, [role.value])[role.value].get("default")
    if mesh is None:
        product = config.parallel.divisor[1]
        raise ConfigError(f"{product} does not divide the {ranks} ranks of pool '{pool}'; change one of them.")
    offload: Any = dict(config.memory.offload).get(role.value, "none")  # pyright: ignore
    settled = config.with_dtype("float32" if device == "cpu" else "bfloat16")
    layout = MemoryLayout(
        dtype="float32" if settled.model.dtype == "float32" else "bfloat16",
        gradient_checkpointing=config.model.gradient_checkpointing,
        offload=offload,
        lora_rank=config.lora.rank if role is Role.ActorRollout else 0,
        lora_targets=config.lora.targets,
        kernels="cpu" if device == "cpu" else "compiled" if config.model.compile else "eager",
        longest=longest,
        max_logits=max_logits,
        replicas=config.parallel.replicas,
        **mesh,
    )
    budget = config.memory.max_tokens_per_micro_batch
    tokens = max(longest, 0 if budget == "auto" else budget)
    compute = training_memory if role in LEARNING else forward_memory
    memory = compute(sizes, layout, tokens)
    waits_on_host = offload == "idle" and device == "gpu"
    resident = 0 if waits_on_host else memory.resident
    found = [RoleEstimate(role.value, pool, ranks, memory, resident)]
    if role is Role.ActorRollout:
        has_weights = resident > 0 and ranks == 1
        if config.rollout.backend == "embedded":
            found.append(_generation(config, sizes, layout, config.has_rollout_pool, has_weights=has_weights))
    return found


def _generation(
    config: Config, sizes: ModelSizes, layout: MemoryLayout, in_own_pool: bool, *, has_weights: bool
) -> RoleEstimate:
    """Return the estimate of generation, which needs a copy of the weights unless the actor's own are on the device."""
    data, pool = config.data, pool_of(config, Role.Rollout if in_own_pool else Role.ActorRollout)
    ranks = sum(pools_of(config)[pool])
    of_rank = -(-data.train_batch_size * config.rollout.group_size // ranks)
    running = min(of_rank, config.rollout.max_running_sequences)
    cached = running * (data.max_prompt_length + data.max_response_length)
    memory = generation_memory(sizes, layout, cached, running)
    if config.rollout.kv_cache_bytes and layout.kernels != "cpu":
        memory = replace(memory, keys_and_values=min(memory.keys_and_values, config.rollout.kv_cache_bytes))
    if not has_weights or layout.lora_rank or in_own_pool:
        memory = replace(memory, weights=memory.weights + sizes.parameters * layout.width)
    resident = memory.weights if in_own_pool else 0
    return RoleEstimate(GENERATION, pool, ranks, memory, resident)
