"""The estimated memory of each role of a run on one rank, from the configurations of the run and of its models."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from hybridflow.config import Config
from hybridflow.config.roles import pool_of, ranks_of
from hybridflow.controller import Role
from hybridflow.errors import ConfigError
from hybridflow.models.forward import max_logits_of, memory_of
from hybridflow.models.loading import DTYPES, model_config
from hybridflow.models.memory import MemoryLayout, RankMemory, forward_memory, generation_memory, training_memory
from hybridflow.models.model_sizes import ModelSizes, model_sizes
from hybridflow.models.tensor_parallel import require_tensor_parallel
from hybridflow.rollout.vllm.arguments import KV_CACHE_BYTES_ON_CPU
from hybridflow.runtime.device import own_device
from hybridflow.runtime.observe import get_logger
from hybridflow.trainers.build.groups import meshes_of, traits_of
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
    """Return the estimate of each role with a model, and of generation.

    A GPU of more than 8 GiB keeps more logits. `gpu_memory_bytes`: the memory of each GPU; 0: that of this process's
    GPU, or at most 8 GiB without one.
    A role whose model's code needs values of tensors is left out, with a warning; so is generation by vLLM with a share
    of a GPU whose memory is unknown. Raises ConfigError for float64, for ranks that the parallel sizes do not
    divide and for a model that parallel.tensor does not divide, and ModelError for a model that cannot be read.
    """
    if config.model.dtype == "float64":
        raise ConfigError("model.dtype=float64 has no memory estimate; use float32 or bfloat16.")
    estimates: list[RoleEstimate] = []
    dtype = config.with_dtype("float32" if device == "cpu" else "bfloat16").model.dtype
    gpu_memory_bytes = 0 if device == "cpu" else gpu_memory_bytes or memory_of(own_device())
    max_logits = max_logits_of(gpu_memory_bytes)
    for role in role_classes(config):
        if not traits_of(role).has_sharded_model(config):
            continue
        key, path = _model_of(config, role)
        require_model_directory(key, path)
        head = "value" if role in VALUE_HEADS else "policy"
        has_adapters = role is Role.ActorRollout and config.lora.rank > 0
        sizes = model_sizes(path, head, DTYPES[dtype], is_frozen=has_adapters)
        if sizes is None:
            logger.warning("%s: '%s' has no estimate: its code cannot be followed without weights", role.value, path)
        else:
            require_tensor_parallel(model_config(path), config.parallel.tensor)
            found, layout = _estimate_of(config, role, sizes, dtype, device, max_logits)
            estimates.append(found)
            if role is Role.ActorRollout:
                has_weights = found.resident > 0 and found.ranks == 1
                generation = _generation(config, sizes, layout, gpu_memory_bytes, has_weights=has_weights)
                estimates += [generation] if generation else []
    return estimates


def need_of_pools(estimates: list[RoleEstimate]) -> dict[str, int]:
    """Return the largest need of a rank of each pool: one role works, and the others keep what is resident.

    The buffers of NCCL are those of the process.
    """
    needs: dict[str, int] = {}
    for working in estimates:
        of_pool = [e for e in estimates if e.pool == working.pool]
        communication = max(e.memory.communication for e in of_pool) - working.memory.communication
        need = working.memory.total + communication + sum(e.resident for e in of_pool if e is not working)
        needs[working.pool] = max(needs.get(working.pool, 0), need)
    return needs


def _model_of(config: Config, role: Role) -> tuple[str, str]:
    """Return the key and the directory of a role's model."""
    path = "" if role is Role.ActorRollout else getattr(config, role.value).model_path
    return (f"{role.value}.model_path", path) if path else ("model.path", config.model.path)


def _estimate_of(
    config: Config, role: Role, sizes: ModelSizes, dtype: str, device: str, max_logits: int
) -> tuple[RoleEstimate, MemoryLayout]:
    longest = config.data.max_prompt_length + config.data.max_response_length
    pool, ranks = pool_of(config, role.value), ranks_of(config, role.value)
    mesh = meshes_of(config, [role.value])[role.value].get("default")
    if mesh is None:
        product = config.parallel.divisor[1]
        raise ConfigError(f"{product} does not divide the {ranks} ranks of pool '{pool}'; change one of them.")
    offload: Any = dict(config.memory.offload).get(role.value, "none")  # pyright: ignore
    layout = MemoryLayout(
        dtype="float32" if dtype == "float32" else "bfloat16",
        gradient_checkpointing=config.model.gradient_checkpointing,
        offload=offload,
        lora_rank=config.lora.rank if role is Role.ActorRollout else 0,
        lora_targets=config.lora.targets,
        kernels="cpu" if device == "cpu" else "compiled" if config.model.compile else "eager",
        longest=longest,
        max_logits=max_logits,
        replicas=config.parallel.replicas,
        expert=config.parallel.expert,
        **mesh,
    )
    budget = config.memory.max_tokens_per_micro_batch
    tokens = max(longest, 0 if budget == "auto" else budget)
    compute = training_memory if role in LEARNING else forward_memory
    memory = compute(sizes, layout, tokens)
    waits_on_host = offload == "idle" and device == "gpu"
    resident = 0 if waits_on_host else memory.resident
    return RoleEstimate(role.value, pool, ranks, memory, resident), layout


def _generation(
    config: Config, sizes: ModelSizes, layout: MemoryLayout, gpu_memory_bytes: int, *, has_weights: bool
) -> RoleEstimate | None:
    """Return the estimate of generation, which needs a copy of the weights unless the actor's own are on the device."""
    data, in_own_pool = config.data, config.has_rollout_pool
    role = "rollout" if in_own_pool else "actor_rollout"
    pool, ranks = pool_of(config, role), ranks_of(config, role)
    if config.rollout.backend == "vllm":
        memory = _share_of_vllm(config, sizes, layout, gpu_memory_bytes)
        sleeps = layout.kernels != "cpu" and not in_own_pool
        return memory and RoleEstimate(GENERATION, pool, ranks, memory, 0 if sleeps else memory.total)
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


def _share_of_vllm(config: Config, sizes: ModelSizes, layout: MemoryLayout, gpu_memory_bytes: int) -> RankMemory | None:
    """Return the weights of a rank and what vLLM keeps beside them: keys and values, and its own working memory."""
    weights, cache = sizes.parameters * layout.width // config.rollout.tensor, config.rollout.kv_cache_bytes
    if layout.kernels == "cpu":
        cache = cache or KV_CACHE_BYTES_ON_CPU
    elif not cache and not gpu_memory_bytes:
        logger.warning(
            "generation: left out; vLLM takes rollout.gpu_memory_utilization=%s of a GPU of unknown memory; "
            "set --gpu-memory",
            config.rollout.gpu_memory_utilization,
        )
        return None
    share = int(config.rollout.gpu_memory_utilization * gpu_memory_bytes)
    return RankMemory(weights=weights, keys_and_values=cache or max(0, share - weights))
