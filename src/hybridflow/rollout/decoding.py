"""What an engine asks of a way to decode; it does not know how keys, values and states are stored."""

from collections import deque
from typing import Protocol

from hybridflow.rollout.base import Completion, Request


class Decoding(Protocol):
    """Sequences that run, and finished ones with `Request.keep`, which are added to the engine's KeptSequences.

    After an error in a method the object is unusable; its requests start again in another.
    """

    @property
    def num_running(self) -> int:
        """The number of sequences that run, as far as the host knows."""
        ...

    def admit(self, waiting: deque[Request], room: int) -> None:
        """Start requests from the left of `waiting`, at most `room` sequences, as long as they fit in memory.

        Requests that memory no longer holds return to the left.
        """
        ...

    def advance(self, version: int) -> list[Completion]:
        """Add one token to every sequence; return completions, some of which may have ended in earlier steps."""
        ...

    def abort(self, request_id: int) -> list[Completion]:
        """End the sequences of a request; return completions of this and of other requests."""
        ...

    def retract(self) -> list[Completion]:
        """Compute the keys and values of all sequences again; return completions that ended in earlier steps."""
        ...

    def use_new_weights(self) -> None:
        """Forget what depends on the addresses of the weights; keep no running sequence unless it is retracted."""
        ...
