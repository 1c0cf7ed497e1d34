"""A running sequence as the host knows it, and the numbers of pages that a request needs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.models.paged_kv_cache import PAGE_SIZE, pages_of
from hybridflow.rollout.base import Completion, FinishReason, Request
from hybridflow.rollout.requests import StopStrings


@dataclass
class RunningRow:
    """One running sequence: its pages, and what it has emitted in the windows of steps that were read.

    `order` counts admissions, `place` is the row of the device's buffers, `since` the step of the present window at
    which the row began, `in_flight` the number of its steps in windows that have ended and were not read, `num_known`
    the number of prompt tokens whose keys and values were kept from an earlier sequence. `routes`: those of its first
    tokens, in parts, if they are recorded.
    """

    request: Request
    index: int
    order: int
    place: int
    since: int
    pages: list[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    is_finite: bool = True
    num_known: int = 0
    in_flight: int = 0
    is_removed: bool = False
    routes: list[Tensor] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """The number of tokens until the limit."""
        return self.request.sampling.max_new_tokens - len(self.tokens)

    def missing_pages(self, num_steps: int) -> int:
        """Return the number of pages that the next steps need in addition, if no step in flight ends the row."""
        length = len(self.request.prompt_ids) - 1 + len(self.tokens)
        return max(0, pages_of(length + min(self.in_flight + num_steps, self.remaining)) - len(self.pages))

    @property
    def grows(self) -> bool:
        """Whether the row has fewer pages than it needs at its limit."""
        return self.missing_pages(self.remaining) > 0

    def extend(self, tokens: list[int], log_probs: list[float], versions: Sequence[int]) -> None:
        """Add emitted tokens."""
        self.tokens += tokens
        self.log_probs += log_probs
        self.versions += versions

    def end(self, num_new: int, stop_strings: StopStrings) -> FinishReason | None:
        """Return why the sequence has ended with one of its `num_new` last tokens; drop tokens after a stop string."""
        sampling, before = self.request.sampling, len(self.tokens) - num_new
        for count in range(before + 1, len(self.tokens) + 1) if sampling.stop_strings else ():
            if stop_strings.end(self.tokens[:count], sampling.stop_strings):
                del self.tokens[count:], self.log_probs[count:], self.versions[count:]
                return "stop"
        if num_new and self.tokens[-1] in sampling.stop_token_ids:
            return "stop"
        return None if self.remaining else "length"

    def completion(self, reason: FinishReason) -> Completion:
        """Return what the sequence has emitted."""
        routes = torch.cat(self.routes)[: len(self.request.prompt_ids) + len(self.tokens) - 1] if self.routes else None
        emitted = self.tokens, self.log_probs, self.versions
        return Completion(self.request.request_id, self.index, *emitted, reason, routes)


def final_length(request: Request) -> int:
    """Return the largest number of tokens of a sequence that have keys and values: all but the last one."""
    return len(request.prompt_ids) + request.sampling.max_new_tokens - 1


def shared_pages(request: Request) -> int:
    """Return the number of whole pages of the prompt, without its last token, that a group shares."""
    return (len(request.prompt_ids) - 1) // PAGE_SIZE


def first_pages(request: Request, num_steps: int) -> int:
    """Return the number of pages that each sequence needs for itself in its first steps."""
    reached = len(request.prompt_ids) - 1 + min(num_steps, request.sampling.max_new_tokens)
    return pages_of(reached) - shared_pages(request)


def most_pages(request: Request) -> int:
    """Return the number of pages of a whole group whose responses have their largest length."""
    shared = shared_pages(request)
    return shared + request.group_size * (pages_of(final_length(request)) - shared)
