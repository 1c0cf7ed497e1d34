"""The routes that vLLM returns, of every layer of a model: checked, and those of layers with experts."""

import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridflow.errors import RolloutError
from hybridflow.models.routes import ROUTES, Routers


class ReturnedRoutes:
    """The routes that vLLM must return for a model with router replay, in the `shape` of `Completion.routes`."""

    def __init__(self, model: PreTrainedModel) -> None:
        routers = Routers.of(model)
        self.shape, self._num_experts = routers.shape, routers.num_experts
        names = [name for name, module in model.named_modules() if hasattr(module, "experts")]
        self._layers = [int(number) for name in names for number in re.findall(r"layers\.(\d+)\.", name)]

    def checked(self, returned: Any, num_tokens: int) -> Tensor:
        """Return the routes of the first tokens of a sequence; `returned`: an array (tokens, layers, top_k).

        Raises RolloutError unless all are there, and are different experts of the model for each token.
        """
        least = (num_tokens, max(self._layers) + 1, self.shape[1])
        found = "none" if returned is None else f"shape {tuple(returned.shape)}"
        if returned is not None and returned.ndim == 3 and returned.shape[2] == least[2]:
            routes = torch.tensor(returned.tolist(), dtype=torch.int64).reshape(returned.shape)
            if len(routes) >= num_tokens and routes.shape[1] >= least[1]:
                routes = routes[:num_tokens, self._layers]
                in_order = routes.sort(-1).values
                first, last = int(in_order.min()), int(in_order.max())
                if first >= 0 and last < self._num_experts and bool((in_order.diff(dim=-1) > 0).all()):
                    return routes.to(ROUTES)
                found = f"experts from {first} to {last}, for some token one twice or out of range"
        raise RolloutError(
            f"vLLM returned routes that cannot be replayed: {found}; expected those of {least[0]} tokens in {least[1]} "
            f"layers, {least[2]} different ones of {self._num_experts} experts each; set actor.router_replay = false, "
            "or rollout.backend = 'embedded'."
        )
