"""Keys of the models and of their layout in memory and on ranks."""

from math import prod
from typing import Annotated, Literal

from pydantic import Field

from hybridflow.config.sections.base import CountOrAuto, NonNegative, Positive, RoleName, Section, SwitchOrAuto

DTypeName = Literal["float32", "bfloat16", "float64"]
OffloadName = Literal["idle", "host"]
TeacherLossName = Literal["none", "reverse_kl", "forward_kl"]


class ModelConfig(Section):
    """The policy model."""

    path: str = Field(
        default="",
        description="The policy: a Hugging Face directory (config.json, safetensors, tokenizer), or a model on the "
        "hub, as OWNER/NAME or OWNER/NAME@REVISION.",
    )
    chat_template: str = Field(
        default="",
        description="Chat template to use instead of the tokenizer's: chatml, chatml-tools, llama3-tools, or a "
        ".jinja file. The run stores its text and exports it with the model.",
    )
    dtype: Literal[DTypeName, "auto"] = Field(
        default="auto",
        description="Compute dtype. auto: bfloat16 on GPUs that have it, otherwise float32; chosen at the first start, "
        "then kept by the run. Parameters and optimizer state stay float32 (float64 with float64).",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, slower."
    )
    compile: Annotated[bool | Literal["auto"], SwitchOrAuto] = Field(
        default="auto",
        description="Train with layers compiled by torch.compile, once for all numbers of tokens. They replace "
        "controller.compiled_kernels, which generation still uses. The first step takes up to a minute longer; "
        "rounding changes. auto: on a GPU, for Llama, Qwen2 and Qwen3.",
    )


class LoRAConfig(Section):
    """Low-rank adapters of the actor."""

    rank: NonNegative = Field(
        default=0,
        description="Rank of the actor's adapters; only they are trained. 0: no adapters, all weights are trained. The "
        "reference is the actor with its adapters off, unless reference.model_path is set.",
    )
    alpha: Annotated[float, Field(gt=0)] = Field(
        default=32.0, description="Scale of the adapters: their output is multiplied by alpha / rank."
    )
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description="Names of the linear layers with adapters.",
    )

    @property
    def scaling(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / max(self.rank, 1)


class ReferenceConfig(Section):
    """The frozen policy of the KL penalty."""

    model_path: str = Field(default="", description="Directory of the reference policy; empty: model.path.")


class TeacherConfig(Section):
    """On-policy distillation."""

    model_path: str = Field(
        default="", description="Directory of the teacher for on-policy distillation; same tokenizer as the policy."
    )
    loss: TeacherLossName = Field(
        default="none",
        description="Add coef * KL to the policy loss: KL(policy || teacher) with reverse_kl, KL(teacher || policy) "
        "with forward_kl. none: distill by algorithm.advantage = 'distillation'.",
    )
    coef: Annotated[float, Field(ge=0)] = Field(default=1.0, description="Coefficient of the KL of teacher.loss.")
    top_k: Positive = Field(
        default=64,
        description="Number of the teacher's most likely tokens in the KL of teacher.loss; all others count as one "
        "token. The result is a lower bound of the full KL, and equals it if top_k is the size of the vocabulary.",
    )


class MemoryConfig(Section):
    """Micro-batches, packing and offload."""

    max_tokens_per_micro_batch: Annotated[Positive | Literal["auto"], CountOrAuto] = Field(
        default=16384,
        description="Largest number of tokens in one forward and backward pass of a rank: limits memory, changes "
        "results only by rounding. 'auto': each role finds it by trial at the first start; then the run keeps it.",
    )
    packing: bool = Field(
        default=True,
        description="Concatenate sequences without padding; false: pad each micro-batch (slower, equal results).",
    )
    share_prompts: bool = Field(
        default=True,
        description="With packing: compute a prompt once for all its responses in a micro-batch (faster, equal "
        "results).",
    )
    offload: dict[RoleName, OffloadName] = Field(
        default={},
        description="Roles with offload to host memory, as in {critic = 'idle'}. idle: offload weights and "
        "optimizer state between calls; forward passes and weight sync load only the weights (no effect on a CPU). "
        "host: offload always, also gradients, and run the optimizer on the CPU.",
    )


class ParallelConfig(Section):
    """Sharding of trained models over ranks; the remaining ranks are data parallel."""

    tensor: Positive = Field(
        default=1,
        description="Tensor parallel size: ranks that split heads, MLP and vocabulary. Llama, Qwen2 and Qwen3 only.",
    )
    sequence: Positive = Field(
        default=1,
        description="Sequence parallel size (Ulysses): ranks that split the tokens of each micro-batch.",
    )
    replicas: Positive = Field(
        default=1,
        description="Number of copies of the weights and the optimizer state (HSDP): data and sequence parallel "
        "ranks shard within a group and sum gradients between groups.",
    )
    expert: Positive = Field(
        default=1,
        description="Expert parallel size: number of data parallel ranks that split the experts and exchange tokens.",
    )

    @property
    def divisor(self) -> tuple[int, str]:
        """The number that must divide the number of ranks, and the keys whose product it is."""
        sizes = [(name, size) for name, size in reversed(list(self)) if size > 1]
        return prod(size for _, size in sizes), " times ".join(f"parallel.{name}={size}" for name, size in sizes)

    @property
    def contradiction(self) -> str:
        """The sizes that exclude each other, and the fix; empty if all combine."""
        if self.expert == 1 or self.replicas == self.tensor == 1:
            return ""
        return (
            f"{self.divisor[1]}: expert parallel ranks cannot be split further; set parallel.tensor and replicas to 1"
        )
