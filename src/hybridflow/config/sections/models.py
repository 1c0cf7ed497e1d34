"""The models of a run and how they lie in memory and on ranks."""

from typing import Annotated, Literal

from pydantic import Field

from hybridflow.config.sections.base import CountOrAuto, NonNegative, Positive, RoleName, Section

DTypeName = Literal["float32", "bfloat16", "float64"]
OffloadName = Literal["idle", "host"]
TeacherLossName = Literal["none", "reverse_kl", "forward_kl"]


class ModelConfig(Section):
    path: str = Field(
        default="", description="Hugging Face directory of the policy: config.json, safetensors, tokenizer."
    )
    dtype: DTypeName = Field(
        default="float32",
        description="Compute dtype. Parameters and optimizer state stay float32 (float64 with float64).",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, more time."
    )
    compile: bool = Field(
        default=False,
        description="Learn with layers compiled by torch.compile, which takes up to a minute at the first step, in "
        "place of controller.compiled_kernels, which generation keeps. Rounding depends on it.",
    )


class LoRAConfig(Section):
    rank: NonNegative = Field(
        default=0,
        description="Rank of the actor's adapters, which learn in place of its weights; 0 is none: all weights learn. "
        "The reference is the actor with its adapters off, unless reference.model_path names another.",
    )
    alpha: Annotated[float, Field(gt=0)] = Field(
        default=32.0, description="The adapters' products are scaled by alpha / rank."
    )
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description="Names of the linear layers that get adapters.",
    )

    @property
    def scaling(self) -> float:
        """What the product of an adapter is multiplied with."""
        return self.alpha / max(self.rank, 1)


class ReferenceConfig(Section):
    model_path: str = Field(default="", description="Directory of the reference policy; empty is model.path.")


class TeacherConfig(Section):
    model_path: str = Field(
        default="", description="Directory of a teacher, with the policy's tokenizer: on-policy distillation."
    )
    loss: TeacherLossName = Field(
        default="none",
        description="Add coef * KL between policy and teacher to the policy loss, of the policy from the teacher "
        "(reverse_kl) or of the teacher from the policy (forward_kl). Without: algorithm.advantage = 'distillation'.",
    )
    coef: Annotated[float, Field(ge=0)] = Field(default=1.0, description="Weight of that KL.")
    top_k: Positive = Field(
        default=64,
        description="It is taken over the teacher's k most likely tokens and all others as one: never above the whole "
        "KL, and equal to it for the whole vocabulary.",
    )


class MemoryConfig(Section):
    max_tokens_per_micro_batch: Annotated[Positive | Literal["auto"], CountOrAuto] = Field(
        default=16384,
        description="Tokens in one forward and backward per rank: the memory knob, which changes no result but "
        "rounding. 'auto' finds for each role what fits at the first start, and the run keeps it.",
    )
    packing: bool = Field(
        default=True,
        description="Concatenate sequences without padding; false pads each micro-batch: slower, equal results.",
    )
    share_prompts: bool = Field(
        default=True,
        description="When packing, compute a prompt once for its responses in a micro-batch: faster, equal results.",
    )
    offload: dict[RoleName, OffloadName] = Field(
        default={},
        description="Roles whose memory moves to the host, as in {critic = 'idle'}: 'idle' is weights and optimizer "
        "state between calls, 'host' is always, the optimizer steps there too. On a CPU 'idle' moves nothing.",
    )


class ParallelConfig(Section):
    tensor: Positive = Field(
        default=1,
        description="Ranks that share each layer: heads, MLP columns and vocabulary. Llama, Qwen2 and Qwen3 only.",
    )
    sequence: Positive = Field(
        default=1,
        description="Ranks that share the tokens of each micro-batch (Ulysses). Llama, Qwen2 and Qwen3 only.",
    )
