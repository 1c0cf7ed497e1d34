"""The tensors of a model directory, and the form in which a family's files have them.

The files of a family may have other names than the model, and several tensors for one of the model: experts are fused
in memory and stored one by one. transformers has the conversions; here they apply to a few tensors at a time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    revert_weight_conversion,
)

from hybridflow.errors import ModelError
from hybridflow.models.lora import is_adapter, plain_name
from hybridflow.models.model_files import INDEX, LOADING_ERRORS, SINGLE, require_sound_weights, weight_files
from hybridflow.models.quantized_weights import UNUSED, quantized_form, quantized_weights


class StoredModel:
    """The tensors of a model directory by their stored names, read one at a time; quantized weights are dequantized."""

    def __init__(self, path: str | Path, *, is_tied: bool = False) -> None:
        self.path, self._open = Path(path), ExitStack()
        self._files: dict[str, Any] = {}
        self._form, self._quantized = quantized_form(path), dict[str, tuple[str, str]]()
        try:
            for file_path in weight_files(path):
                file: Any = self._open.enter_context(safe_open(file_path, framework="pt"))
                self._files |= dict.fromkeys(file.keys(), file)
            if self._form is not None:
                slices = {name: file.get_slice(name) for name, file in self._files.items()}
                self._quantized = quantized_weights(path, self._form, slices)
            self._parts = {name for parts in self._quantized.values() for name in parts}
            require_sound_weights(path, is_tied=is_tied, quantized=self._parts)
        except LOADING_ERRORS as error:
            self._open.close()
            raise ModelError(
                f"'{path}': the weights cannot be read: {' '.join(str(error).split())}. The directory must hold "
                f"{SINGLE}, or {INDEX} and every file that it lists; copy them again."
            ) from error

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        others = (name for name in self._files if name not in self._parts)
        return [*self._quantized, *(name for name in others if self._form is None or not name.endswith(UNUSED))]

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor without reading it."""
        if self._form is not None and name in self._quantized:
            return self._form.shape(self._stored_shape(self._quantized[name][0]))
        return self._stored_shape(name)

    def read(self, name: str, some: slice | None = None) -> Tensor:
        """Read a tensor, or `some` matrices of a stack."""
        if self._form is not None and name in self._quantized:
            numbers, scales = (self._read(part, some) for part in self._quantized[name])
            return self._form.weight(numbers, scales)
        return self._read(name, some)

    def _stored_shape(self, name: str) -> list[int]:
        return self._files[name].get_slice(name).get_shape()

    def _read(self, name: str, some: slice | None) -> Tensor:
        file = self._files[name]
        return file.get_tensor(name) if some is None else file.get_slice(name)[some]

    def __enter__(self) -> "StoredModel":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()


@dataclass
class _Source:
    """Stored tensors, each with the converter's pattern for it, that together are one or several of the model's."""

    target: str
    converter: WeightConverter | None
    stored: list[tuple[str, str]] = field(default_factory=list)


class ModelTensors:
    """The tensors of a directory by the names and in the shapes of a model, read as often as they are asked for.

    `ignored`: stored names of which the model has no tensor. Sets the conversions of the model, for `PublishedForm`.
    """

    def __init__(self, model: PreTrainedModel, files: StoredModel) -> None:
        self.path, self._files = files.path, files
        self._model: Any = model
        self._names = {plain_name(name) for name in model.state_dict(keep_vars=True) if not is_adapter(name)}
        transforms = get_model_conversion_mapping(model)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        self.ignored: list[str] = []
        sources: dict[str, _Source] = {}
        for name in sorted(files.names, key=dot_natural_key):
            target = name
            for renaming in renamings:
                target, _ = renaming.rename_source_key(target)
            target, pattern, converter = _converted_name(target, converters)
            found = self._own_name(target)
            if found is None:  # already in the model's form
                found, pattern, converter = self._own_name(name), None, None
            if found is None:
                self.ignored.append(name)
            else:
                sources.setdefault(found, _Source(found, converter)).stored.append((pattern or name, name))
        self._model._weight_conversions = [transform for transform in transforms if transform.was_used()]
        self._source_of: dict[str, _Source] = {}
        self._shapes: dict[str, Sequence[int]] = {}
        for source in sources.values():
            shaped = self._converted(source, lambda name: torch.empty(files.shape(name), device="meta"))
            self._shapes |= {name: tensor.shape for name, tensor in shaped.items()}
            self._source_of |= dict.fromkeys(shaped, source)
        self._last: tuple[_Source, dict[str, Tensor]] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._source_of

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of a tensor of the model without reading it."""
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """Read a tensor of the model, in the dtype of the files."""
        source = self._source_of[name]
        if self._last is None or self._last[0] is not source:
            self._last = None  # before others are in memory
            self._last = (source, self._converted(source, self._files.read))
        return self._last[1][name]

    def read_experts(self, name: str, first: int, end: int) -> Tensor | None:
        """Read some matrices of a stack of experts; None if the files have them in another form."""
        source = self._source_of[name]
        if source.converter is None and len(self._shapes[name]) == 3:
            return self._files.read(source.stored[-1][1], slice(first, end))
        if source.converter is None or not isinstance(source.converter.operations[0], MergeModulelist) or end == first:
            return None
        of_pattern: dict[str, list[tuple[str, str]]] = {}
        for pattern, stored in source.stored:
            of_pattern.setdefault(pattern, []).append((pattern, stored))
        some = replace(source, stored=[pair for pairs in of_pattern.values() for pair in pairs[first:end]])
        experts = self._converted(some, self._files.read)[name]
        return experts if experts.shape == (end - first, *self._shapes[name][1:]) else None

    def _own_name(self, name: str) -> str | None:
        """Return the model's name of a tensor whose name may lack the prefix of the body, or have it in excess."""
        prefix = f"{self._model.base_model_prefix}."
        candidates = (name, name.removeprefix(prefix), prefix + name)
        return next((candidate for candidate in candidates if candidate in self._names), None)

    def _converted(self, source: _Source, read: Any) -> dict[str, Tensor]:
        if source.converter is None:
            return {source.target: read(source.stored[-1][1])}
        converter: Any = deepcopy(source.converter)
        for pattern, name in source.stored:
            converter.add_tensor(source.target, name, pattern, read(name))
        try:
            converted = converter.convert(source.target, model=self._model, config=self._model.config)
        except LOADING_ERRORS as error:
            raise ModelError(
                f"'{self.path}': {source.stored[0][1]} and {len(source.stored) - 1} other weights do not fit together "
                f"as {source.target} ({' '.join(str(error).split())}); files are missing or of another model, copy "
                "them again."
            ) from error
        return {name: _single(tensor) for name, tensor in converted.items()}


def _converted_name(name: str, converters: Iterable[WeightConverter]) -> tuple[str, str | None, WeightConverter | None]:
    """Return the name that the first matching converter gives, with its pattern and the converter."""
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return renamed, pattern, converter
    return name, None, None


def _single(tensor: Any) -> Tensor:
    return tensor[0] if isinstance(tensor, list) else tensor


Waiting = dict[tuple[str, ...], dict[str, Tensor]]
"""The tensors of the model that have come of each group, while others of the group have not."""


class PublishedForm:
    """The form in which the files of a model have its tensors: as it was read by ModelTensors, or as it is published.

    `groups`: the names of the model's tensors that become stored tensors together, mostly one alone.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        self._model: Any = model
        if getattr(model, "_weight_conversions", None) is None:
            published = get_model_conversion_mapping(model, add_legacy=False)
            self._model._weight_conversions = [form for form in published if not isinstance(form, PrefixChange)]
        forms: Any = self._model._weight_conversions
        converters: Any = [form.reverse_transform() for form in forms[::-1] if isinstance(form, WeightConverter)]
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(_converted_name(name, converters)[0], []).append(name)
        self.groups = [tuple(group) for group in groups.values()]
        self._group_of = {name: group for group in self.groups for name in group}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the stored tensors of one group, or of several."""
        if not self._model._weight_conversions:
            return dict(tensors)
        return revert_weight_conversion(self._model, dict(tensors))

    def stream(self, tensors: Iterable[tuple[str, Tensor]], waiting: Waiting) -> Iterator[tuple[str, Tensor]]:
        """Yield the stored tensors of each group when its last tensor comes; the others are kept in `waiting`."""
        for name, tensor in tensors:
            group = self._group_of[name]
            came = waiting.setdefault(group, {})
            came[name] = tensor
            if len(came) == len(group):
                yield from self.of(waiting.pop(group)).items()

    def unchanged(self, shapes: Mapping[str, torch.Size]) -> set[str]:
        """Return those of the model's tensors that are stored by the same name."""
        alone = [name for name in shapes if len(self._group_of[name]) == 1]
        return {name for name in alone if list(self.of({name: torch.empty(shapes[name], device="meta")})) == [name]}
