"""Weights that a directory has in few bits, with scales beside them: which forms are read, and what numbers they are.

They are read as those of a model that is not quantized. Other forms are an error that says how to convert them.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.errors import ModelError

QUANTIZED = "quantization_config"
"""The key of config.json that says how weights are quantized."""

UNUSED = ".activation_scale"
"""The end of the names of scales of activations, which are not quantized here."""

_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (*_HALF, *(-number for number in _HALF))
_FP4_PAIRS = torch.tensor([[low, high] for high in _FP4 for low in _FP4])
"""The two numbers of 4 bits of each byte."""


class Fp8:
    """Numbers of 8 bits with a scale for each block of a matrix, or for the whole: DeepSeek-V3, Qwen3-FP8.

    `ends`: the ends of the names of numbers and scales; `dtypes`: what each can be stored as. Both have the first
    dimension of a stack of matrices.
    """

    ends = ("", "_scale_inv")
    dtypes = (("F8_E4M3", "F8_E5M2"), ("F32", "BF16", "F16", "F8_E8M0"))

    def __init__(self, described: Mapping[str, Any]) -> None:
        block = described.get("weight_block_size")
        is_block = isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
        if block is not None and not is_block:
            raise ValueError(f"weight_block_size={block!r:.100} is not a list of two positive integers")
        self._block = block

    def shape(self, stored: list[int]) -> list[int]:
        """Return the shape of a weight from that of its numbers."""
        return stored

    def scales_shape(self, stored: list[int]) -> list[int]:
        """Return the number of blocks along both dimensions, after the shape of a stack."""
        if self._block is None:
            return [*stored[:-2], 1, 1] if len(stored) > 2 else []
        return [*stored[:-2], *(ceil(size / part) for size, part in zip(stored[-2:], self._block, strict=True))]

    def weight(self, stored: Tensor, scales: Tensor) -> Tensor:
        """Return the products in float32."""
        weight, scales = stored.float(), scales.float()
        if self._block is None:
            return weight.mul_(scales)
        rows, columns = self._block
        for first, scale in zip(range(0, weight.shape[-2], rows), scales.unbind(-2), strict=True):
            of_columns = scale.repeat_interleave(columns, -1)[..., None, : weight.shape[-1]]
            weight[..., first : first + rows, :].mul_(of_columns)
        return weight


class Mxfp4:
    """Numbers of 4 bits, two in a byte, with a power of 2 for each block; matrices are transposed: GPT-OSS."""

    ends = ("_blocks", "_scales")
    dtypes = (("U8",), ("U8",))

    def __init__(self, described: Mapping[str, Any]) -> None:
        pass

    def shape(self, stored: list[int]) -> list[int]:
        """Return the shape of a stack of transposed matrices from (matrices, rows, blocks, bytes of a block)."""
        matrices, rows, blocks, size = stored
        return [matrices, 2 * blocks * size, rows]

    def scales_shape(self, stored: list[int]) -> list[int]:
        """Return the shape without the bytes of a block."""
        return stored[:3]

    def weight(self, stored: Tensor, scales: Tensor) -> Tensor:
        """Return the weight in bfloat16, which has each of its numbers; a matrix at a time is in float32."""
        weight = torch.empty(self.shape(list(stored.shape)), dtype=torch.bfloat16)
        for matrix, blocks, powers in zip(weight, stored, scales.view(torch.float8_e8m0fnu), strict=True):
            pairs = _FP4_PAIRS[blocks.int()].flatten(-2)
            matrix.copy_((pairs * powers.float()[..., None]).flatten(-2).T)
        return weight


Form = Fp8 | Mxfp4
FORMS: dict[str, type[Form]] = {"fp8": Fp8, "mxfp4": Mxfp4}
"""The forms that are read, by `quant_method`."""

CONVERTED = {
    "bitsandbytes": ("bitsandbytes", "", ".dequantize()"),
    "compressed-tensors": (
        "compressed-tensors",
        ", quantization_config=t.CompressedTensorsConfig(dequantize=True)",
        "",
    ),
}
"""The other forms that transformers converts, by `quant_method`: the package for it, an argument, and a call."""
GGUF = ", quantization_config=t.GgufConfig(dequantize=True)"


def quantized_form(path: str | Path) -> Form | None:
    """Return how the weights of a directory are quantized; None if they are not, or if config.json cannot be read.

    Raises ModelError, which says what converts them, if the form is not read.
    """
    _require_no_gguf(Path(path))
    config: Any = None
    with suppress(OSError, ValueError, RecursionError):  # of which others tell
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    described = config.get(QUANTIZED) if isinstance(config, dict) else None
    if not described:
        return None
    method = described.get("quant_method") if isinstance(described, dict) else None
    begin = f"'{path}': config.json: the model is quantized ({QUANTIZED}.quant_method={method!r:.100})"
    if isinstance(method, str) and method in FORMS:
        try:
            return FORMS[method](described)
        except ValueError as error:
            raise ModelError(f"{begin}: {error}; copy the file from the model's original directory.") from error
    begin += f"; read are weights that are not quantized, and {' and '.join(FORMS)}"
    if isinstance(method, str) and method in CONVERTED:
        package, argument, call = CONVERTED[method]
        raise ModelError(f"{begin}. Convert them: {_command(path, package, argument, call)}")
    raise ModelError(f"{begin}; use the original weights, which the model's card names.")


def quantized_weights(path: str | Path, form: Form, stored: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the stored names of the numbers and scales of each quantized weight, from the slices of all tensors.

    Raises ModelError if one is missing, or has another dtype or shape.
    """
    found: dict[str, tuple[str, str]] = {}
    shapes: dict[str, list[int]] = {name: tensor.get_shape() for name, tensor in stored.items()}
    numbers_end, scales_end = form.ends
    for scales in (name for name in shapes if name.endswith(scales_end)):
        weight = scales.removesuffix(scales_end)
        numbers = weight + numbers_end
        try:
            expected = form.scales_shape(shapes[numbers])
            form.shape(shapes[numbers])
        except (KeyError, ValueError) as error:
            raise ModelError(
                f"'{path}': {scales} are the scales of {numbers}, which is missing or has another shape; copy the "
                "files again."
            ) from error
        if shapes[scales] != expected:
            raise ModelError(
                f"'{path}': {scales} has shape {shapes[scales]} in the weights, but {expected} by config.json for "
                f"{numbers} of {shapes[numbers]}; they are of different models, copy both again."
            )
        for name, dtypes in zip((numbers, scales), form.dtypes, strict=True):
            if (dtype := stored[name].get_dtype()) not in dtypes:
                raise ModelError(
                    f"'{path}': {name} is stored as {dtype}, not as {' or '.join(dtypes)}; copy the files again."
                )
        found[weight] = (numbers, scales)
    return found


def _require_no_gguf(path: Path) -> None:
    """Raise ModelError for a GGUF file, or a directory that has no other weights."""
    if path.suffix == ".gguf":
        files, directory = [path], path.parent
    else:
        files, directory = sorted(path.glob("*.gguf")) if path.is_dir() else [], path
    if files and not any(directory.glob("*.safetensors")):
        option = f", gguf_file='{files[0].name}'"
        command = _command(
            directory, "gguf", f"{option}, quantization_config=t.GgufConfig(dequantize=True)", "", option
        )
        raise ModelError(f"'{path}': GGUF weights are not read ({files[0].name}). Convert them: {command}")


def _command(path: str | Path, package: str, argument: str, call: str, of_tokenizer: str = "") -> str:
    """Return the command by which transformers writes a model in bfloat16, with its tokenizer."""
    return (
        f'pip install {package}; python -c "import transformers as t; m = t.AutoModelForCausalLM.from_pretrained('
        f"'{path}', dtype='bfloat16'{argument}){call}; m.save_pretrained('NEW'); "
        f"t.AutoTokenizer.from_pretrained('{path}'{of_tokenizer}).save_pretrained('NEW')\""
    )
