"""What a rollout engine is: it serves requests, and batch generation is a few lines on top.

Streaming, partial rollouts and agents need no other interface. Every token carries the version of the weights that
made it.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from hybridflow.errors import RolloutError

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Temperature 0 is greedy; top_k 0 and top_p 1 keep the whole vocabulary."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RolloutError(f"max_new_tokens={self.max_new_tokens}; it must be at least 1.")
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise RolloutError(
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}; valid are a finite "
                "temperature >= 0, top_k >= 0 and 0 < top_p <= 1."
            )


@dataclass(frozen=True)
class Request:
    """`group_size` responses to one prompt.

    `noise_key` (seed, step, prompt), the index in the group and the token's position fix the noise of each token.
    `request_id` is free to be used again once all its completions are finished.
    """

    request_id: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    group_size: int = 1
    noise_key: tuple[int, ...] = (0,)


@dataclass
class Completion:
    """One response. `log_probs` are under the distribution sampled from; the stop token is part of `token_ids`."""

    request_id: int
    index: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"


class RolloutEngine(Protocol):
    """An engine on one rank."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RolloutError if it can never be served, or if its id is in use."""
        ...

    def step(self) -> None:
        """Advance every running sequence by one token, admitting waiting requests first.

        Raises RolloutError if the model's logits are not finite. After any error, requests that are not finished start
        again from their prompts and get the tokens that they would have got.
        """
        ...

    def finished(self) -> list[Completion]:
        """Completions since the last call; those of one step in the order of submission and index in the group."""
        ...

    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        ...

    def abort(self, request_id: int) -> None:
        """Stop a request; its unfinished completions come back as finished, with what they have, reason "abort".

        Raises RolloutError if no sequence of it is waiting or running.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Generate with these weights from the next step on and stamp tokens with `version`.

        Running sequences go on. Raises RolloutError, with nothing loaded, unless every parameter is given and fits.
        """
        ...


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> list[Completion]:
    """Serve all requests with an idle engine; completions in the order of requests and of indices within a group.

    Raises RolloutError if the engine is at work, and if a request is invalid: the engine is then idle again.
    """
    if engine.has_unfinished():
        raise RolloutError("generate needs an idle engine, but requests are waiting or running; finish or abort them.")
    done: dict[tuple[int, int], Completion] = {}
    try:
        for request in requests:
            engine.submit(request)
        while engine.has_unfinished():
            engine.step()
            done.update({(c.request_id, c.index): c for c in engine.finished()})
    except BaseException:
        for request in requests:
            with suppress(RolloutError):  # finished, or never submitted
                engine.abort(request.request_id)
        engine.finished()
        raise
    return [done[request.request_id, index] for request in requests for index in range(request.group_size)]
