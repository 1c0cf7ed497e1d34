"""Routes of a mixture of experts: the experts of each token in each layer, recorded in one pass, replayed in another.

The code of a router runs as it is, except for its top-k over the experts. A recorded pass notes the result. A replayed
pass returns the recorded experts with their present scores in place of the largest ones, so that weights and gradients
are those of the present router: Rollout Routing Replay (R3), Ma et al., 2025, https://arxiv.org/abs/2510.11370.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hybridflow.errors import BatchError, ModelError
from hybridflow.models.forward import OwnForward
from hybridflow.models.loading import build_without_weights, model_config

ROUTES = torch.int16
"""Dtype of routes."""
NOT_RECORDED = -1
"""Marks the experts of a token without recorded routes, which uses the experts that its routers choose."""


class Routes(Protocol):
    """A rule for the experts that routers choose in a pass, such as recording or replaying them."""

    def choose(self, layer: int, own: Tensor) -> Tensor | None:
        """Return the experts to take in place of `own` (tokens, top_k); None: these."""
        ...


class RecordedRoutes:
    """The routes of a pass, which stay as they are."""

    def __init__(self, num_layers: int) -> None:
        self._chosen: list[Tensor | None] = [None] * num_layers

    def choose(self, layer: int, own: Tensor) -> None:
        """Note the experts of a layer."""
        self._chosen[layer] = own.to(ROUTES)

    def stacked(self) -> Tensor:
        """Return the routes of all tokens, (tokens, layers, top_k)."""
        return torch.stack([chosen for chosen in self._chosen if chosen is not None], dim=1)


class ReplayedRoutes:
    """Routes (tokens, layers, top_k) that a pass takes where they are recorded, and its recomputation too."""

    def __init__(self, routes: Tensor) -> None:
        self._routes = routes
        self._changed: list[Tensor] = [routes.new_zeros(())] * routes.shape[1]

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """Return the recorded experts."""
        recorded = self._routes[:, layer].long()
        is_recorded = recorded[:, :1] != NOT_RECORDED
        differs = (recorded.sort(-1).values != own.sort(-1).values).any(-1)
        self._changed[layer] = differs & is_recorded[:, 0]
        return torch.where(is_recorded, recorded, own)

    def changed(self) -> Tensor:
        """Return the share of layers in which a token's own experts are others than the recorded ones, (tokens,)."""
        return torch.stack(self._changed).float().mean(0)


class Routers:
    """The routers of a model, in the order of its layers, each of which chooses the same number of experts."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.shape = len(modules), _sizes(modules[0])[1]
        self.num_experts = min(_sizes(module)[0] for module in modules)
        self._routes: Routes | None = None
        for layer, module in enumerate(modules):
            module.forward = partial(self._route, layer, *_sizes(module), module.forward)

    @staticmethod
    def of(model: PreTrainedModel) -> "Routers":
        """Return the routers of a model, always the same object. Raises ModelError for a model without replay."""
        if (known := vars(model).get("_hybridflow_routers")) is not None:
            return known
        modules = _routers_of(model)
        if not has_routers(model):
            raise ModelError(f"{model.config.model_type} models have no routers whose choice of experts is replayable.")
        routers = vars(model)["_hybridflow_routers"] = Routers(modules)
        return routers

    @contextmanager
    def using(self, routes: Routes | None) -> Iterator[None]:
        """Let routers choose by `routes` inside the context; None: each by itself."""
        before, self._routes = self._routes, routes
        try:
            yield
        finally:
            self._routes = before

    def require_valid(self, routes: Tensor) -> None:
        """Raise BatchError unless routes (..., layers, top_k) are those of these routers, or not recorded."""
        least, most = (int(routes.min()), int(routes.max())) if routes.numel() else (0, 0)
        if routes.shape[-2:] == self.shape and least >= NOT_RECORDED and most < self.num_experts:
            return
        raise BatchError(
            f"routes have shape {tuple(routes.shape)} and experts from {least} to {most}, but the model chooses "
            f"{self.shape[1]} of {self.num_experts} experts in {self.shape[0]} layers; they are of a different model: "
            "give the rollout engine the same one, or set actor.router_replay = false."
        )

    def contexts_of_checkpoint(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return `context_fn` of torch's checkpoint: the second pass of a layer takes the routes of the first."""
        return nullcontext(), self.using(self._routes)

    def _route(
        self, layer: int, num_experts: int, top_k: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._routes is None:
            return forward(*args, **kwargs)
        with _TopK(num_experts, top_k, partial(self._routes.choose, layer)) as mode:
            result = forward(*args, **kwargs)
        if mode.num_chosen != 1:
            raise ModelError(f"router {layer} has chosen its experts by {mode.num_chosen} calls of topk; expected one.")
        return result


class RecordingForward(OwnForward):
    """The forward pass of a mixture of experts that records the routes of each call."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._routers = Routers.of(model)
        self.routes_shape = self._routers.shape

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute logits, and record routes."""
        recorded = RecordedRoutes(self.routes_shape[0])
        with self._routers.using(recorded):
            logits = super().__call__(*args, **kwargs)
        self.routes = recorded.stacked()
        return logits


class _TopK(TorchFunctionMode):
    """Calls `choose` with the experts of a router's top-k. Weights are scores before those of groups are masked."""

    def __init__(self, num_experts: int, top_k: int, choose: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self._wanted, self._choose = (num_experts, top_k), choose
        self._masked: tuple[Tensor, Tensor] | None = None
        self.num_chosen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is Tensor.masked_fill:
            self._masked = result, args[0]
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, k = args[0], args[1] if len(args) > 1 else kwargs["k"]
        if scores.ndim != 2 or (scores.shape[-1], k) != self._wanted:
            return result
        self.num_chosen += 1
        experts = self._choose(result.indices)
        if experts is None:
            return result
        if self._masked and self._masked[0] is scores:
            scores = self._masked[1]
        return torch.return_types.topk((scores.gather(-1, experts), experts))  # pyright: ignore


def _sizes(router: nn.Module) -> tuple[int, int]:
    """Return the numbers of experts, and of those that it chooses."""
    return router.num_experts, router.top_k  # pyright: ignore[reportReturnType]


def _routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules beside `experts` that choose among them."""
    blocks = [block for block in model.modules() if hasattr(block, "experts")]
    children = [child for block in blocks for name, child in block.named_children() if name != "experts"]
    return [each for each in children if all(isinstance(getattr(each, n, None), int) for n in ("num_experts", "top_k"))]


def has_routers(model: nn.Module) -> bool:
    """Return whether the model has routers, which all choose the same number of experts."""
    return len({_sizes(module)[1] for module in _routers_of(model)}) == 1


def why_not_replayable(path: str | Path) -> str | None:
    """Return why the routes of a model directory cannot be replayed; None if they can.

    One router of each kind chooses for two tokens without data; what it gets besides is a bias for each expert. Raises
    ModelError as `load_causal_lm` does.
    """
    config, dense = model_config(path).get_text_config(), "is not a mixture of experts"
    if not any("expert" in name for name in config.to_dict()):
        return dense
    model = build_without_weights(path, "policy", torch.float32)
    if not any(hasattr(module, "experts") for module in model.modules()):  # with 0 of them
        return dense
    modules = {(type(module), *_sizes(module)): module for module in _routers_of(model)}
    try:
        routers = Routers.of(model)
        for module in modules.values():
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            on_meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
            more = [routers.num_experts] * (len(inspect.signature(type(module).forward).parameters) - 2)
            arguments = [torch.empty(size, device="meta") for size in ((2, config.hidden_size), *more)]
            with routers.using(RecordedRoutes(routers.shape[0])):
                functional_call(module, on_meta, tuple(arguments))
    except (ModelError, TypeError, RuntimeError):
        return f"chooses its experts in a way that cannot be replayed ({config.model_type})"
    return None
