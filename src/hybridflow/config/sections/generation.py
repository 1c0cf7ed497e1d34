"""Generation: rollouts and validation."""

from typing import Annotated, Literal

from pydantic import Field

from hybridflow.config.sections.base import NonNegative, Positive, Section


class RolloutConfig(Section):
    backend: Literal["embedded", "vllm"] = Field(
        default="embedded",
        description="The engine that generates: the trainer's own model, or vLLM. In the processes that learn, or in a "
        "pool of its own (placement.roles.rollout).",
    )
    group_size: Positive = Field(
        default=8, description="Responses sampled for each prompt; grpo compares them with each other."
    )
    temperature: Annotated[float, Field(ge=0)] = Field(default=1.0, description="Softmax temperature; 0 is greedy.")
    top_k: NonNegative = Field(default=0, description="Sample among the k most likely tokens; 0 is all of them.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Sample among the fewest tokens whose probability reaches top_p."
    )
    max_running_sequences: Positive = Field(
        default=1024, description="Sequences decoded together; more wait for a place."
    )
    pack_weights: bool = Field(
        default=True,
        description="On a CPU, decode in one compiled call from a copy of the weights in the order it reads: faster, "
        "with the weights twice in memory while generating.",
    )
    stop_strings: tuple[str, ...] = Field(
        default=(), description="Texts that end a response, besides the model's stop tokens; they are part of it."
    )
    tensor: Positive = Field(default=1, description="vllm: ranks that share an engine and each of its layers.")
    max_model_len: NonNegative = Field(
        default=0, description="vllm: longest prompt and response together; 0 is what data allows."
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5, description="vllm: share of a GPU's memory that it uses, weights included, while generating."
    )
    kv_cache_bytes: NonNegative = Field(
        default=0,
        description="vllm: memory of keys and values on each rank; 0 is what gpu_memory_utilization leaves, on a CPU "
        "1 GiB.",
    )
    enforce_eager: bool = Field(
        default=False, description="vllm: start in seconds, without compiled graphs, and generate slower."
    )
    weight_sync: Literal["object_store", "broadcast", "disk"] = Field(
        default="object_store",
        description="How weights go to rollout engines in a pool of their own: shared memory (between nodes Ray's "
        "transfer), a collective (gloo, NCCL on GPUs), or files in trainer.run_dir. In one process nothing is sent.",
    )
    sync_bucket_bytes: Positive = Field(
        default=256 * 2**20, description="Weights are gathered and sent so many bytes at a time."
    )


class ValidationConfig(Section):
    temperature: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Temperature of validation samples; 0 is greedy."
    )
    group_size: Positive = Field(
        default=1, description="Samples for each validation prompt; pass@k is reported for the powers of two up to it."
    )
    batch_size: Positive = Field(default=512, description="Validation prompts generated in one call.")
    max_samples: NonNegative = Field(default=0, description="Use only the first rows of the validation data; 0 is all.")
