"""What a rollout engine is: it serves requests, and batch generation is a few lines on top.

Streaming, partial rollouts and agents need no other interface. Every token carries the version of the weights that
made it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Size, Tensor

from hybridflow.errors import RolloutConfigError, RolloutError

FinishReason = Literal["stop", "length", "abort"]
SleepingPart = Literal["weights", "kv_cache"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn, and which end a response. Temperature 0 is greedy; top_k 0 and top_p 1 keep the whole
    vocabulary. A stop string may begin in one token and end in another; like a stop token it is part of the response.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RolloutConfigError(f"max_new_tokens={self.max_new_tokens}; it must be at least 1.")
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise RolloutConfigError(
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}; valid are a finite "
                "temperature >= 0, top_k >= 0 and 0 < top_p <= 1."
            )
        if "" in self.stop_strings:
            raise RolloutConfigError(
                f"stop_strings={self.stop_strings!r} has an empty one, which would end every response."
            )


@dataclass(frozen=True)
class Request:
    """`group_size` responses to one prompt.

    `noise_key` (seed, step, prompt), the index in the group and the token's position fix the noise of each token.
    `resume_offset` is how many tokens at the end of the prompt are a response that is continued: noise goes on there.
    `request_id` is free to be used again once all its completions are finished.
    """

    request_id: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    group_size: int = 1
    noise_key: tuple[int, ...] = (0,)
    resume_offset: int = 0


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
    """An engine on one rank. `version` is that of its weights, None where it has none to generate with."""

    version: int | None

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

    def start_loading(self, shapes: Mapping[str, Size]) -> None:
        """Expect weights of these names and shapes. Running sequences go on with them once they are loaded.

        Raises RolloutError, with nothing changed, unless every parameter is there and fits.
        """
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take some of the weights that are expected, each once, in any order.

        Raises RolloutError for one that is not expected like this. From the first on until `finish_loading`, steps
        may raise RolloutError.
        """
        ...

    def finish_loading(self, version: int) -> None:
        """Generate with the new weights from the next step on and stamp tokens with `version`.

        Raises RolloutError if weights have not come: the engine then needs them all again.
        """
        ...

    def abandon_loading(self) -> None:
        """Forget what came since `start_loading`, or what was loaded: there are no weights to generate with."""
        ...

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each sequence the log-probs of its tokens but the first, at temperature 1, by an idle engine."""
        ...

    def wake(self, part: SleepingPart) -> None:
        """Have memory again for weights, which are to be loaded then, or for keys and values."""
        ...

    def sleep(self) -> None:
        """Free memory while nothing is generated; `version` is None if the weights are gone."""
        ...


def load_weights(engine: RolloutEngine, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Load all weights at once.

    Raises RolloutError, with nothing loaded, unless every parameter is given once and fits.
    """
    given: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name in given:
            raise RolloutError(f"weight '{name}' came twice.")
        given[name] = tensor
    engine.start_loading({name: tensor.shape for name, tensor in given.items()})
    engine.load(given.items())
    engine.finish_loading(version)


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> list[Completion]:
    """Serve all requests with an idle engine; completions in the order of requests and of indices within a group.

    Those that may take longest start first, so that few run on alone at the end. Raises RolloutError if the engine is
    at work, and if a request is invalid: the engine is then idle again.
    """
    if engine.has_unfinished():
        raise RolloutError("generate needs an idle engine, but requests are waiting or running; finish or abort them.")
    done: dict[tuple[int, int], Completion] = {}
    try:
        for request in sorted(requests, key=_longest_first):
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


def not_finite(request_id: int) -> RolloutError:
    """The error of a sequence whose next token cannot be drawn."""
    return RolloutError(
        f"request {request_id}: the model's logits are not finite, so no token can be sampled. Its weights have "
        "diverged: resume from an earlier checkpoint with a lower learning rate."
    )


def _longest_first(request: Request) -> tuple[int, int]:
    return -request.sampling.max_new_tokens, -len(request.prompt_ids)
