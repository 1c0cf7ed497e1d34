"""The interface of rollout engines, which serve requests, and batch generation on top of it.

Streaming, partial rollouts and agents use the same interface. Each token carries the version of the weights that
generated it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Size, Tensor

from hybridflow.errors import RolloutConfigError
from hybridflow.runtime.boxes import Box

FinishReason = Literal["stop", "length", "abort"]
"""How a response ended: by a stop token or string, at the limit of its length, or interrupted."""
SleepingPart = Literal["weights", "kv_cache"]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of a response.

    Temperature 0 is greedy; top_k 0 and top_p 1 keep the whole vocabulary. A stop string may span several tokens; like
    a stop token it is part of the response.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RolloutConfigError(f"max_new_tokens={self.max_new_tokens} is invalid: it must be at least 1.")
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise RolloutConfigError(
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p} is invalid: expected a finite "
                "temperature >= 0, top_k >= 0 and 0 < top_p <= 1."
            )
        if "" in self.stop_strings:
            raise RolloutConfigError(
                f"stop_strings={self.stop_strings!r} is invalid: an empty string would end every response; remove it."
            )


@dataclass(frozen=True)
class Request:
    """A request for several responses to one prompt."""

    request_id: int
    """May be used again when all its completions are finished."""
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    group_size: int = 1
    """Number of responses."""
    noise_key: tuple[int, ...] = (0,)
    """Seed, step and prompt: with the index in the group and the token's position they determine a token's noise."""
    resume_offset: int = 0
    """Number of tokens of a continued response that were made before: positions are counted from its first token."""
    first_index: int = 0
    """Index of the first response in the group."""
    keep: bool = False
    """Keep the keys and values of finished responses for a request whose prompt begins with their tokens."""
    total_tokens: int = 0
    """Number of tokens that it may have with those of such requests, for which there is room at once."""


@dataclass
class Completion:
    """One response; `log_probs` are under the sampling distribution, `token_ids` includes the stop token.

    `routes` (tokens, layers, top_k), if the engine records them: the experts of the tokens of prompt and response, all
    but the last one, in the pass from which the next token was sampled (a prompt's in the pass that computed it first).
    """

    request_id: int
    index: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    routes: Tensor | None = None


class RolloutEngine(Protocol):
    """An engine on one rank. `version` is the version of its weights, None if it has no weights.

    `routes_shape`: the last sizes of `Completion.routes`; (0, 0) if it records none.
    """

    version: int | None
    routes_shape: tuple[int, int]

    def submit(self, request: Request) -> None:
        """Queue a request; raise RolloutError if it can never be served, or if its id is in use."""
        ...

    def step(self) -> None:
        """Admit waiting requests, then advance every running sequence by one token.

        Raises RolloutError if the model's logits are not finite. An engine that does not wait for each token reports
        this, and sequences that stop, up to a few steps later; sequences that reach `max_new_tokens` at once. After any
        error, unfinished requests restart from their prompts and get the same tokens as without the error.
        """
        ...

    def finished(self) -> list[Completion]:
        """Return the completions since the last call; those of one step in order of submission and index."""
        ...

    def has_unfinished(self) -> bool:
        """Return whether requests are waiting or running."""
        ...

    def abort(self, request_id: int) -> None:
        """Stop a request; its unfinished completions become finished, with their tokens so far and reason "abort".

        Raises RolloutError if none of its sequences is waiting or running.
        """
        ...

    def forget_kept(self) -> None:
        """Free what `Request.keep` has kept, before weights change in place; loads, `sleep` and errors free it too."""
        ...

    def start_loading(self, shapes: Mapping[str, Size]) -> None:
        """Announce weights of these names and shapes; running sequences continue with them after `finish_loading`.

        Raises RolloutError, with nothing changed, unless every parameter is announced with its shape.
        """
        ...

    def boxes_to_load(self) -> Mapping[str, Box]:
        """Return the part that this rank loads of each weight; weights that it loads whole are left out.

        `load` accepts a PartialTensor with at least this box in place of the whole tensor. Raises RolloutError while
        weights are being loaded.
        """
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load some of the announced weights, each once, in any order.

        Raises RolloutError for a weight that was not announced with this name and shape. Between the first call and
        `finish_loading`, steps may raise RolloutError.
        """
        ...

    def finish_loading(self, version: int) -> None:
        """Use the new weights from the next step on, under `version`; running sequences keep their keys and values.

        Raises RolloutError if weights are missing: all of them must then be loaded again.
        """
        ...

    def retract(self) -> None:
        """Compute the keys and values of running sequences again with the present weights; their tokens stay.

        Each next token is then that of an engine which starts with prompt and tokens. Memory is needed as for a prompt
        of this length. After an error requests restart, as after one in `step`.
        """
        ...

    def abandon_loading(self) -> None:
        """Discard the weights, loaded or being loaded; the engine cannot generate until new ones are loaded."""
        ...

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probs of each sequence's tokens but the first, at temperature 1.

        Requests that wait or run get the same tokens as without the call. Some engines advance them by a step.
        """
        ...

    def wake(self, part: SleepingPart) -> None:
        """Allocate memory for weights, which must then be loaded, or for keys and values."""
        ...

    def sleep(self) -> None:
        """Free memory between generations; `version` becomes None if the weights are freed."""
        ...
