"""A tensor of which one box is in memory, for a loader that itself takes its part of a whole tensor."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridflow.errors import WeightSyncError
from hybridflow.runtime.boxes import Box, box_of_view, contains, part_of


class PartialTensor(Tensor):
    """A tensor with the shape of a whole one, of which `box` is in memory as `contents`; without, nothing is.

    It has views as the whole tensor has. When a view is copied into another tensor, its elements are read from
    `contents`. A tensor without contents copies nothing, and records in `boxes_read` what would be read.

    Raises WeightSyncError if elements outside of the box are read, and for every operation besides views and copies.
    """

    # Parameters of vLLM are another subclass of Tensor; the two meet in `__torch_dispatch__` alone.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    contents: Tensor | None
    boxes_read: list[Box | None]
    _name: str
    _box: Box
    _whole: Tensor  # on the meta device
    _view: Tensor  # of `_whole`

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        box: Box | None = None,
        contents: Tensor | None = None,
    ) -> "PartialTensor":
        """Return such a tensor of `shape`, the whole one; `name` is the one in errors."""
        whole = torch.empty(tuple(shape), dtype=dtype, device="meta")
        device = torch.device("cpu") if contents is None else contents.device
        made = cls._showing(whole, device)
        made._name, made._box, made._whole = name, box or (), whole
        made.contents, made.boxes_read = contents, []
        return made

    @classmethod
    def _showing(cls, view: Tensor, device: torch.device) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, view.shape, view.stride(), view.storage_offset(), dtype=view.dtype, device=device
        )
        made._view = view
        return made

    def _like(self, view: Tensor) -> "PartialTensor":
        """Return another view of the same whole tensor."""
        made = self._showing(view, self.device)
        for name in ("_whole", "_box", "contents", "_name", "boxes_read"):
            setattr(made, name, getattr(self, name))
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take a view, or copy from one."""
        if func is torch.ops.aten.copy_.default and isinstance(args[1], cls) and not isinstance(args[0], cls):
            return args[1]._copy_into(args[0])
        source = next(arg for arg in tree_leaves(args) if isinstance(arg, cls))
        if not func.is_view:
            raise WeightSyncError(
                f"weight '{source._name}' is in memory in part; only views and copies of it are possible, not {func}."
            )
        shown = func(*tree_map_only(cls, lambda arg: arg._view, args), **kwargs or {})
        return tree_map_only(Tensor, source._like, shown)

    def _copy_into(self, target: Tensor) -> Tensor:
        box = box_of_view(self._view, self._whole)
        self.boxes_read.append(box)
        if self.contents is None:
            return target
        if box is None or not contains(self._box, box):
            raise WeightSyncError(
                f"weight '{self._name}': the engine reads the elements {box}, but this rank received {self._box}; "
                "the slices of this rank's engine were determined for another model or another rank."
            )
        return target.copy_(part_of(self.contents, self._box, box))

    def __repr__(self, *_: Any, **__: Any) -> str:
        """Return the name and the box."""
        return f"PartialTensor({self._name!r}, {tuple(self.shape)}, box={self._box})"


def contents_of(tensor: Tensor) -> Tensor:
    """Return the elements in memory: the box of a PartialTensor, or the tensor itself."""
    if isinstance(tensor, PartialTensor):
        assert tensor.contents is not None, "a tensor without contents was sent"
        return tensor.contents
    return tensor
