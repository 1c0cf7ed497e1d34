"""What an engine of vLLM is started with: the options, and vLLM's arguments for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.config import LoRAConfig
from hybridflow.errors import RolloutConfigError
from hybridflow.models.quantized_weights import QUANTIZED, quantized_form

KV_CACHE_BYTES_ON_CPU = 2**30
"""Memory of keys and values on a CPU, where vLLM's default is a share of the host's memory."""

TOKENS_IN_A_STEP_ON_CPU = 4096

LARGEST_CAPTURED, STRIDE_ABOVE = 512, 64
"""vLLM captures CUDA graphs of decoding steps for up to 512 sequences; ours continue in steps of 64 sequences."""

DTYPES = ("float32", "bfloat16")

QUANTIZATIONS = {"": None, "fp8": "fp8_per_channel"}
"""vLLM's names: of fp8 the one with a scale for each output of a layer, and for each token of its input."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of adapters that vLLM has memory for; an adapter of a smaller rank is padded."""


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine. `in_group`: the process is in a process group, all ranks of which build an engine.

    `seed_requests`: each sequence has a seed. Otherwise `VLLMEngine.seed` determines the noise of all of them.
    `can_sleep`: the engine can free its memory on a GPU, where a process can have one such engine at a time.
    `adapters`: only adapters are loaded, the base weights come from the files in `path`. `quantization` and
    `speculative` are those of `rollout`. `max_model_len` 0 stands for the positions of the model.
    """

    path: str
    dtype: str = "float32"
    max_model_len: int = 0
    max_running_sequences: int = 256
    tensor_parallel: int = 1
    in_group: bool = False
    gpu_memory_utilization: float = 0.5
    kv_cache_bytes: int = 0
    enforce_eager: bool = False
    seed_requests: bool = True
    can_sleep: bool = False
    adapters: LoRAConfig | None = None
    quantization: str = ""
    speculative: Mapping[Any, Any] | None = None


def engine_arguments(options: EngineOptions, on_gpu: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's engine.

    Ranks that share an engine sum by NCCL. vLLM's own all-reduce must see the GPUs of all ranks, where a worker of Ray
    sees its own, and the sums of FlashInfer's differ from run to run (`process.ENVIRONMENT` turns off the others).
    """
    return {
        "model": options.path,
        "dtype": options.dtype,
        "load_format": "dummy",  # weights come from the trainer
        "hf_overrides": not_quantized if _is_quantized(options) else {},
        "use_tqdm_on_load": False,
        "skip_tokenizer_init": True,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_running_sequences,
        "tensor_parallel_size": options.tensor_parallel,
        "distributed_executor_backend": "external_launcher" if options.in_group else "uni",
        "disable_custom_all_reduce": True,
        "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": options.kv_cache_bytes or (None if on_gpu else KV_CACHE_BYTES_ON_CPU),
        "enforce_eager": options.enforce_eager,
        "cudagraph_capture_sizes": capture_sizes(options) if on_gpu else None,
        "enable_sleep_mode": on_gpu and options.can_sleep,
        "logprobs_mode": "processed_logprobs",  # under the sampling distribution
        # A chunked prompt would return a random number that it drew, which CPU generators do not support.
        "enable_chunked_prefill": None if on_gpu else False,
        "max_num_batched_tokens": None
        if on_gpu
        else max(TOKENS_IN_A_STEP_ON_CPU, options.max_model_len, options.max_running_sequences),
        "async_scheduling": on_gpu,  # vLLM's configuration of a CPU does not allow it
        "disable_log_stats": True,
        "seed": 0,
        "quantization": QUANTIZATIONS[options.quantization],
        **_adapter_arguments(options, on_gpu),
        **_speculation_arguments(options),
    }


def not_quantized(config: Any) -> Any:
    """Return a configuration without what it says of quantized weights: those of the trainer are dequantized."""
    vars(config).pop(QUANTIZED, None)
    return config


def _is_quantized(options: EngineOptions) -> bool:
    return quantized_form(options.path) is not None


def capture_sizes(options: EngineOptions) -> list[int] | None:
    """Return the numbers of tokens for which CUDA graphs are captured; None: those that vLLM chooses.

    vLLM's own end at `LARGEST_CAPTURED`, and a larger step runs without a graph. With drafts of k tokens a step has
    1 + k tokens of each sequence.
    """
    tokens = 1 + int((options.speculative or {}).get("num_speculative_tokens", 0))
    largest = options.max_running_sequences
    if options.enforce_eager or largest * tokens <= LARGEST_CAPTURED:
        return None
    below = (1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_CAPTURED + 1, 16))
    above = range(LARGEST_CAPTURED + STRIDE_ABOVE, largest, STRIDE_ABOVE)
    return [number * tokens for number in (*below, *above) if number < largest] + [largest * tokens]


def adapters_refused(feature: str, why: str) -> RolloutConfigError:
    """Return the error of a model or of adapters that vLLM does not compute beside each other."""
    return RolloutConfigError(
        f"rollout.merge_adapters=false is not supported with {feature}: {why}, or set rollout.merge_adapters = true."
    )


def _adapter_arguments(options: EngineOptions, on_gpu: bool) -> dict[str, Any]:
    lora = options.adapters
    if lora is None:
        return {}
    rank = next((rank for rank in RANKS if rank >= lora.rank), None)
    if on_gpu and options.dtype == "float32":
        raise adapters_refused("model.dtype='float32'", "on a GPU vLLM computes adapters in bfloat16; use it")
    if rank is None:
        raise adapters_refused(f"lora.rank={lora.rank}", f"vLLM has ranks up to {RANKS[-1]}; use a smaller one")
    if _is_quantized(options):
        raise adapters_refused("quantized weights", "vLLM would compute with them, and the trainer dequantizes them")
    return {
        "load_format": "auto",
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": rank,
        "lora_target_modules": list(lora.targets),
    }


def _speculation_arguments(options: EngineOptions) -> dict[str, Any]:
    """Return vLLM's arguments for speculative decoding.

    Tokens are scheduled synchronously, so that none of a step in flight depends on drafts that are not verified yet.
    """
    speculative = options.speculative or {}
    if not speculative:
        return {}
    arguments: dict[str, Any] = {"speculative_config": dict(speculative), "async_scheduling": False}
    if "model" in speculative:
        if _is_quantized(options):
            raise RolloutConfigError(
                "rollout.speculative.model is not supported with quantized weights: vLLM reads both models from their "
                "files; use method = 'ngram', or a model.path that is not quantized."
            )
        # vLLM loads both models in the same way, and only the trained one gets weights from the trainer.
        arguments |= {"load_format": "auto", "sleep_preserve_parameter_names": ["draft.*"]}
        arguments["speculative_config"]["method"] = "draft_model"
    return arguments
