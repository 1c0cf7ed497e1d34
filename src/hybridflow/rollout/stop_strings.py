"""Responses that end with a text: the same test for every engine, on the tokens so far."""

from collections.abc import Sequence
from typing import Any, Protocol

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import Request

MARGIN = 8
"""Tokens before a stop string that are decoded with it: the bytes of one character may be several."""


class Decoder(Protocol):
    """What of a tokenizer is needed."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


class StopStrings:
    """Whether a response has reached one of its request's stop strings; tokens are text by `tokenizer`."""

    def __init__(self, tokenizer: Decoder | None) -> None:
        self._tokenizer = tokenizer

    def require_served(self, request: Request) -> None:
        """Raises RolloutError for a request with stop strings where there is no tokenizer, or an empty one."""
        stops = request.sampling.stop_strings
        if stops and self._tokenizer is None:
            raise RolloutError(
                f"request {request.request_id} has stop_strings={stops!r}, but the engine was built without a "
                "tokenizer; give it one, or use stop_token_ids."
            )

    def end(self, token_ids: Sequence[int], stop_strings: Sequence[str]) -> bool:
        """Whether a stop string is there, of which the last token is a part."""
        if not stop_strings or self._tokenizer is None:
            return False
        longest = max(len(text.encode()) for text in stop_strings)  # a token is a byte at least
        tail = list(token_ids[-(longest + MARGIN) :])
        text = self._tokenizer.decode(tail, skip_special_tokens=False)  # a stop string may be one of them
        return any(stop in text for stop in stop_strings)
