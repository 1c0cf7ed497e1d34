from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from hybridflow.engines import TorchEngine
    from hybridflow.protocol import DataProto


@pytest.fixture
def rows(rollout_rows) -> "DataProto":
    return rollout_rows([3, 1, 5, 2], [4, 6, 1, 3])


@pytest.fixture
def build_engine() -> "Callable[..., TorchEngine]":
    """Return `build_engine(directory, "policy", dtype="float64", max_tokens=40, lr=0.01)`.

    Other arguments configure the optimizer; `learns=False` builds an engine without one.
    """

    def build(
        directory: Path,
        head: Literal["policy", "value"] = "policy",
        *,
        dtype: Literal["auto", "float32", "bfloat16", "float64"] = "float32",
        max_tokens: int = 1000,
        packing: bool = True,
        share_prompts: bool = True,
        gradient_checkpointing: bool = False,
        compile: Any = False,
        learns: bool = True,
        total_updates: int = 1,
        lora: dict[str, Any] | None = None,
        offload: Literal["idle", "host"] | None = None,
        seed: int = 0,
        **optimizer: Any,
    ) -> "TorchEngine":
        # Imported late, so that the hook that checks shapes is installed before.
        from hybridflow.config import LoRAConfig, MemoryConfig, ModelConfig, OptimizerConfig
        from hybridflow.engines import TorchEngine

        return TorchEngine(
            str(directory),
            head,
            model=ModelConfig(
                path=str(directory), dtype=dtype, gradient_checkpointing=gradient_checkpointing, compile=compile
            ),
            memory=MemoryConfig(max_tokens_per_micro_batch=max_tokens, packing=packing, share_prompts=share_prompts),
            optimizer=OptimizerConfig(**({"lr": 0.01} | optimizer)) if learns else None,
            total_updates=total_updates,
            lora=LoRAConfig(**lora) if lora else None,
            offload=offload,
            seed=seed,
        )

    return build
