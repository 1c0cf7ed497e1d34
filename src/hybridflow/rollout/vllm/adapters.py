"""The vLLM engine with the base weights of the model's files, and adapters (LoRA) that a weight sync replaces.

vLLM has one adapter, in whose place the next version is loaded: an engine generates with one version at a time, and
sequences that run go on with a new one. Keys and values of different versions do not meet, as with merged weights: the
prefix cache is emptied, and its blocks are known by the version as their salt.
"""

# pyright: reportMissingImports=false

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.models.lora import plain_adapter_name
from hybridflow.rollout.vllm.arguments import EngineOptions, adapters_refused
from hybridflow.rollout.vllm.versions import VLLMEngine
from hybridflow.runtime.boxes import Box

ADAPTER_ID = 1


class AdapterEngine(VLLMEngine):
    """An engine that loads `EngineOptions.adapters`; `names` are those of the parameters that it will get."""

    _sleep_level = 1

    def __init__(self, options: EngineOptions, names: Iterable[str]) -> None:
        assert options.adapters
        try:
            super().__init__(options)
        except ValueError as error:
            if "LoRA" not in str(error):
                raise
            raise adapters_refused(f"'{options.path}'", " ".join(str(error).split()).rstrip(".")) from error
        self._rank, self._received = options.adapters.rank, dict[str, Tensor]()
        self._on_model(lambda model, config: _require_served(model, names, self._on_gpu))

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
        self._lora_request = _request()
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
        raise adapters_refused(f"lora.targets of {missing[0]}", f"vLLM has no such layer in a {kind}; remove it")
    if head := [layer for layer in layers if layer.endswith("lm_head")]:
        raise adapters_refused(f"lora.targets of {head[0]}", "vLLM has no log-probs of prompts with it; remove it")
    if is_moe_model(model) and not on_gpu:
        raise adapters_refused(f"a {kind} on a CPU", "there vLLM computes no experts beside adapters")


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
