"""What all engines check of requests: that they can be served, and whether a response ends with a stop string."""

from collections.abc import Sequence
from typing import Any, Protocol

from hybridflow.errors import AlgorithmError, RolloutConfigError, RolloutError
from hybridflow.rollout.base import Request
from hybridflow.runtime.random_streams import derive_seed


def require_servable(request: Request, *, max_running_sequences: int, max_len: int | None, vocabulary: int) -> None:
    """Raise RolloutError for a request that can never be served; `max_len` is the number of the model's positions."""
    name, prompt_len, new = f"request {request.request_id}", len(request.prompt_ids), request.sampling.max_new_tokens
    try:
        derive_seed(*request.noise_key)
    except AlgorithmError as error:
        raise RolloutError(f"{name} has noise_key={request.noise_key!r}: {error}") from error
    if not prompt_len:
        raise RolloutError(f"{name} has an empty prompt; expected at least one token.")
    if request.group_size < 1:
        raise RolloutError(f"{name} has group_size={request.group_size}; it must be at least 1.")
    if request.group_size > max_running_sequences:
        raise RolloutConfigError(
            f"{name}: group_size={request.group_size} exceeds rollout.max_running_sequences={max_running_sequences}; "
            "raise rollout.max_running_sequences."
        )
    if request.resume_offset < 0 or request.first_index < 0:
        raise RolloutError(
            f"{name} has resume_offset={request.resume_offset} and first_index={request.first_index}; they count the "
            "tokens of the response and the responses of the group that were made before, so they must be at least 0."
        )
    if max_len is not None and prompt_len + new > max_len:
        raise RolloutError(
            f"{name}: {prompt_len} prompt tokens and {new} new ones exceed the model's {max_len} positions; shorten "
            "the prompt or data.max_response_length."
        )
    lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
    if lowest < 0 or highest >= vocabulary:
        raise RolloutError(f"{name} has token ids from {lowest} to {highest}; they must be in [0, {vocabulary}).")


def not_finite(request_id: int) -> RolloutError:
    """Return the error of a sequence whose next token cannot be sampled."""
    return RolloutError(
        f"request {request_id}: the model's logits are not finite, so no token can be sampled: its weights have "
        "diverged; resume from an earlier checkpoint with a lower learning rate."
    )


def longest_of(request: Request) -> int:
    """Return the number of tokens for which a sequence of a request gets room: prompt and response, or more."""
    return max(len(request.prompt_ids) + request.sampling.max_new_tokens, request.total_tokens)


MARGIN = 8
"""Tokens decoded before a possible stop string: a character may be split over several tokens."""


class TokenDecoder(Protocol):
    """The part of a tokenizer that stop strings need."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any:
        """Return the text of token ids."""
        ...


class StopStrings:
    """The test for stop strings of requests, with the text of tokens by `tokenizer`."""

    def __init__(self, tokenizer: TokenDecoder | None) -> None:
        self._tokenizer = tokenizer

    def require_served(self, request: Request) -> None:
        """Raise RolloutError for a request with stop strings if there is no tokenizer."""
        stops = request.sampling.stop_strings
        if stops and self._tokenizer is None:
            raise RolloutError(
                f"request {request.request_id} has stop_strings={stops!r}, but the engine was built without a "
                "tokenizer; give it one, or use stop_token_ids."
            )

    def end(self, token_ids: Sequence[int], stop_strings: Sequence[str]) -> bool:
        """Return whether the last tokens contain a stop string."""
        if not stop_strings or self._tokenizer is None:
            return False
        longest = max(len(text.encode()) for text in stop_strings)  # a token has at least one byte
        tail = list(token_ids[-(longest + MARGIN) :])
        text = self._tokenizer.decode(tail, skip_special_tokens=False)  # a stop string may be a special token
        return any(stop in text for stop in stop_strings)
