"""Keys of generation: rollouts, validation, and environments, which answer the turns of an episode."""

from typing import Annotated, Literal

from pydantic import Field

from hybridflow.config.sections.base import NoneAsText, NonNegative, Parameter, Positive, Section, Temperature

Speculative = Literal["method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"]


class RolloutConfig(Section):
    """Sampling of responses for training, and the rollout engine."""

    backend: Literal["embedded", "vllm"] = Field(
        default="embedded",
        description="Rollout engine: embedded (the trainer's own model) or vLLM. It runs in the training processes, "
        "or in a separate pool (placement.roles.rollout).",
    )
    group_size: Positive = Field(
        default=8, description="Responses sampled for each prompt; group-relative estimators such as grpo compare them."
    )
    temperature: Temperature = Field(default=1.0, description="Softmax temperature; 0: greedy.")
    top_k: NonNegative = Field(default=0, description="Sample among the k most likely tokens; 0: all tokens.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="Sample among the fewest most likely tokens whose total probability reaches top_p; 1: all tokens.",
    )
    max_running_sequences: Positive = Field(
        default=1024, description="Largest number of sequences decoded at once; others wait in a queue."
    )
    pack_weights: bool = Field(
        default=True,
        description="embedded, on a CPU: decode with a compiled kernel from a copy of the weights in its memory order. "
        "Faster, but the weights are in memory twice during generation.",
    )
    exact: bool = Field(default=False, description="embedded: log-probs are the trainer's, bit for bit.")
    stop_strings: tuple[str, ...] = Field(
        default=(),
        description="Strings that end a response, in addition to the model's stop tokens; they stay in the response.",
    )
    tensor: Positive = Field(default=1, description="vllm: tensor parallel size, the ranks that share one engine.")
    max_model_len: NonNegative = Field(
        default=0,
        description="vllm: largest number of tokens in a prompt and its response; 0: data.max_prompt_length + "
        "data.max_response_length.",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5,
        description="vllm: share of GPU memory used during generation, weights included. embedded, on a GPU: share of "
        "the memory that is free when generation starts, for keys and values.",
    )
    kv_cache_bytes: NonNegative = Field(
        default=0,
        description="Memory of the KV cache on each rank, in bytes: sequences that do not fit wait. 0: what "
        "gpu_memory_utilization leaves (vllm on a CPU: 1 GiB; embedded on a CPU: what its sequences need).",
    )
    enforce_eager: bool = Field(
        default=False,
        description="vllm: run without torch.compile and CUDA graphs: starts in seconds, generates slower.",
    )
    on_new_weights: Literal["wait", "retract"] = Field(
        default="wait",
        description="With trainer.lag and a separate pool: wait: load new weights after the started batches are "
        "generated; retract: load them between two steps; running sequences keep their tokens but recompute keys "
        "and values, so a batch depends on timings.",
    )
    replay: str = Field(
        default="",
        description="With on_new_weights = retract: a run directory to repeat. Each engine starts batches and loads "
        "weights at the same steps as in that run. The embedded engine gives equal bits, also with "
        "controller.backend = 'local'.",
    )
    merge_adapters: bool = Field(
        default=True, description="vllm: sync weights with merged adapters (lora.rank); false: sync only the adapters."
    )
    quantization: Literal["", "fp8"] = Field(default="", description="vllm: fp8: generate with 8-bit weights.")
    speculative: dict[Speculative, Parameter] = Field(
        default={}, description="vllm: draft tokens that the model verifies; keys and example: docs/rollout.md."
    )
    weight_sync: Literal["object_store", "broadcast", "disk", "ipc"] = Field(
        default="object_store",
        description="Transport of the weight sync to rollout engines in a separate pool: Ray's object store (shared "
        "memory on one node), a collective broadcast (gloo, or NCCL on GPUs), files in trainer.run_dir, or shared "
        "memory of one node (ipc; with GPUs: of one GPU).",
    )
    sync_bucket_bytes: Positive = Field(
        default=256 * 2**20,
        description="Bucket size of the weight sync, in bytes; weights are sent one bucket at a time.",
    )


class ValidationConfig(Section):
    """Sampling of responses for validation."""

    temperature: Temperature = Field(default=0.0, description="Softmax temperature of validation samples; 0: greedy.")
    group_size: Positive = Field(
        default=1,
        description="Responses for each validation prompt (n); pass@k is reported for k = 1, 2, 4, ... up to n.",
    )
    batch_size: Positive = Field(
        default=512, description="Validation prompts (offline: examples) in one call of the workers."
    )
    max_samples: NonNegative = Field(
        default=0, description="Use only the first N rows of the validation data; 0: all rows."
    )


class EnvironmentConfig(Section):
    """Environments, which answer the turns of a model; with none, a response is one turn."""

    classes: dict[str, str] = Field(
        default={},
        description="Environments by name, as in {calculator = 'path.py:Calculator'}: a class, an `async` function "
        "or a command ('command:COMMAND') of an agent, or an environment of another package ('SCHEME:NAME'). With "
        "several, a row's data_source names its class. They run in reward.processes.",
    )
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={},
        description="Shares of the classes in the training prompts, as in {calculator = 2, maze = 1}; rows are then "
        "drawn with replacement. Empty: the rows as data.order says.",
    )
    max_turns: Positive = Field(default=8, description="Largest number of turns of an episode.")
    max_seconds: Annotated[Annotated[float, Field(gt=0)] | None, NoneAsText] = Field(
        default=None,
        description="Seconds since its start after which an episode gets no further turn; 'none': no limit.",
    )
    max_rows: NonNegative = Field(
        default=0,
        description="Largest number of token rows of an episode: a new row begins where the template changes "
        "earlier turns, or an agent's conversation branches. 0: 1 without agents if the template never changes "
        "earlier turns (`hybridflow check-template`), otherwise max_turns.",
    )


class AgentConfig(Section):
    """Agents among environment.classes, which call the model behind a base URL."""

    timeout_s: Annotated[Annotated[float, Field(gt=0)] | None, NoneAsText] = Field(
        default=600.0, description="Seconds of an agent for an episode, without waits for the model; 'none': no limit."
    )
    train_branches: Literal["all", "last"] = Field(
        default="all",
        description="all: train every turn of an agent, in all branches of its conversations; last: train only the "
        "conversation with the last turn.",
    )
    override_sampling: bool = Field(
        default=False,
        description="Replace temperature, top_p and top_k of an agent's requests by the run's values; false: refuse "
        "requests with other values.",
    )
