"""The vLLM engine with the base weights of the model's files, and adapters (LoRA) that a weight sync replaces.

vLLM has one adapter, in whose place the next version is loaded: an engine generates with one version at a time, and
sequences that run go on with a new one. Keys and values of different versions do not meet, as with merged weights: the
prefix cache is emptied, and its blocks are known by the version as their salt.
"""

# pyright: reportMissingImports=false

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridflow.config import LoRAConfig
from hybridflow.errors import RolloutConfigError
from hybridflow.models.lora import plain_adapter_name
from hybridflow.rollout.vllm.versions import EngineOptions, VLLMEngine
from hybridflow.runtime.boxes import Box

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM has memory for; an adapter of a smaller rank is padded."""

ADAPTER_ID = 1


class AdapterEngine(VLLMEngine):
    """An engine that loads adapters; `names` are those of the parameters that it will get."""

    _sleep_level = 1

    def __init__(self, options: EngineOptions, lora: LoRAConfig, names: Iterable[str]) -> None:
        on_gpu, rank = torch.cuda.is_available(), next((rank for rank in RANKS if rank >= lora.rank), None)
        if on_gpu and options.dtype == "float32":
            raise _refused("model.dtype='float32'", "on a GPU vLLM computes adapters in bfloat16; use it")
        if rank is None:
            raise _refused(f"lora.rank={lora.rank}", f"vLLM has ranks up to {RANKS[-1]}; use a smaller one")
        arguments = {
            "load_format": "auto",
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": rank,
            "lora_target_modules": list(lora.targets),
        }
        try:
            super().__init__(replace(options, arguments={**options.arguments, **arguments}))
        except ValueError as error:
            if "LoRA" not in str(error):
                raise
            raise _refused(f"'{options.path}'", " ".join(str(error).split()).rstrip(".")) from error
        self._rank, self._received = lora.rank, dict[str, Tensor]()
        self._on_model(lambda model, config: _require_served(model, names, on_gpu))
        self._lora_request = _request()

    def start_loading(self) -> None:
        """Begin with no adapters; those in use stay until `finish_loading`."""
        self._received = {}

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Keep copies of some adapters: the sender's memory may change."""
        self._received |= {plain_adapter_name(name): tensor.clone() for name, tensor in weights}

    def boxes_to_load(self, shapes: Mapping[str, torch.Size]) -> dict[str, Box]:
        """Return no boxes: adapters are sent whole."""
        return {}

    def finish_loading(self) -> None:
        """Generate with the adapters that were loaded."""
        received, self._received = self._received, {}
        self._on_model(lambda model, config: _replace_adapters(model, received, self._rank))
        self.forget_prompts()

    def abandon_loading(self) -> None:
        """Discard what was loaded."""
        self._received = {}

    def sleep(self) -> bool:
        """Free the memory on a GPU, with the weights on the host; return that they are not lost."""
        super().sleep()
        return False


def _request() -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapters", ADAPTER_ID, "in memory")  # the path of an adapter that is loaded is not read


def _mapper(model: Any) -> Any:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return mapper and mapper.get_rename_mapper()


def _require_served(model: Any, names: Iterable[str], on_gpu: bool) -> None:
    """Raise RolloutConfigError for adapters that vLLM's model would ignore, or does not compute."""
    from vllm.lora.utils import is_moe_model, parse_fine_tuned_lora_name

    manager, mapper = model.lora_manager, _mapper(model)
    served = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
    layers = {parse_fine_tuned_lora_name(plain_adapter_name(name), mapper)[0] for name in names}
    kind = type(model).__name__
    if missing := sorted(layers - served):
        raise _refused(f"lora.targets of {missing[0]}", f"vLLM has no such layer in a {kind}; remove it")
    if head := [layer for layer in layers if layer.endswith("lm_head")]:
        raise _refused(f"lora.targets of {head[0]}", "vLLM has no log-probs of prompts with it; remove it")
    if is_moe_model(model) and not on_gpu:
        raise _refused(f"a {kind} on a CPU", "there vLLM computes no experts beside adapters")


def _refused(feature: str, why: str) -> RolloutConfigError:
    return RolloutConfigError(
        f"rollout.merge_adapters=false is not supported with {feature}: {why}, or set rollout.merge_adapters = true."
    )


def _replace_adapters(model: Any, tensors: dict[str, Tensor], rank: int) -> None:
    """Load adapters in place of the ones of before, into the memory that CUDA graphs know.

    B comes multiplied by alpha / rank.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = model.lora_manager
    described = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    adapters = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        tensors,
        described,
        device=str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_mapper(model),
    )
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapters)
    manager.activate_adapter(ADAPTER_ID)
