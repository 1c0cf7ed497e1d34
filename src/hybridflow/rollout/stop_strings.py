"""Responses that end with a stop string: one test on the tokens so far, for all engines."""

from collections.abc import Sequence
from typing import Any, Protocol

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import Request

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
