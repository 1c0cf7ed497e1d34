"""Decoding on a GPU: all sequences in one step of fixed shapes, with keys and values in pages.

The host does not wait for single tokens. It knows how long each row can be at most, assigns pages a few steps ahead,
and reads what the rows emitted in a window of steps while the device computes the next one:

    device   | window 0 | window 1 | window 2 | ...
    host          | start 1 | read 0, start 2 | read 1, start 3 | ...
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridflow.models.forward import Forward
from hybridflow.models.paged_kv_cache import PAGE_SIZE, PagedKVCache, PageTable, pages_of
from hybridflow.rollout.base import Completion, Request
from hybridflow.rollout.decoding_state import NO_TOKEN, Emitted, StepShape, row_sizes, table_width
from hybridflow.rollout.kept_sequences import KeptSequences
from hybridflow.rollout.page_memory import PageMemory
from hybridflow.rollout.paged_prompts import Prefill, write_prompts
from hybridflow.rollout.requests import StopStrings, not_finite
from hybridflow.rollout.running_row import RunningRow, final_length, first_pages, most_pages, shared_pages
from hybridflow.rollout.sampling import SamplingKinds
from hybridflow.rollout.step_graphs import DecodingSteps
from hybridflow.runtime.random_streams import uniform_state

READ_EVERY = 4
"""Steps in a window. A row that stops stays in the steps until its window is read, at the end of the next one; it emits
nothing."""


class PagedDecoding:
    """All running sequences of an engine; pages are allocated with the first request and freed with the object.

    `memory` bounds what is allocated. `steps` are used by one object at a time. A request is admitted as a whole. If
    pages run out, the request that was admitted last waits again and restarts; its tokens will be the same.
    """

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        *,
        steps: DecodingSteps,
        max_running_sequences: int,
        stop_strings: StopStrings,
        kept: KeptSequences[list[int]],
        memory: PageMemory,
    ) -> None:
        self._forward, self._device, self._stop_strings, self._kept = forward, device, stop_strings, kept
        self._memory = memory
        self._sizes = row_sizes(max_running_sequences)
        self._steps, self._state = steps, steps.state
        steps.begin()
        self._cache: PagedKVCache | None = None
        self._rows: list[RunningRow | None] = []  # by place in the device's buffers; the last one runs
        self._num_admitted = 0
        self._num_stale = 0  # of these, the ones that may have keys and values of earlier weights
        self._is_full = False  # pages were missing since the last window began
        self._windows: deque[_Window] = deque()  # that have ended and were not read
        self._versions: list[int] = []  # of the steps in the present window
        self._due = 0  # the number of its steps after which a row reaches its limit
        self._shape = StepShape(1, table_width(1), SamplingKinds())

    @property
    def num_running(self) -> int:
        """The number of sequences that run, as far as the host knows."""
        return sum(row is not None for row in self._rows)

    def admit(self, waiting: deque[Request], room: int) -> None:
        """Start requests from the left of `waiting`; before a window, first give running rows pages for its steps.

        If a request loses its pages, no other is started in the same call.
        """
        begins_window = not self._versions
        if begins_window:
            self._is_full = self._extend_tables(waiting)
        admitted: list[tuple[int, RunningRow]] = []
        may_start = waiting and not self._is_full and waiting[0].group_size <= room
        num_growing = sum(row.grows for row in self._rows if row) if may_start else 0
        while not self._is_full and waiting and waiting[0].group_size <= room:
            if not self._has_pages(waiting, num_growing):
                self._is_full = True
                break
            request = waiting.popleft()
            room -= request.group_size
            reserved = self._reserve(request)
            num_growing += sum(row.grows for _, row in reserved)
            admitted += reserved
        if admitted:
            self._start(admitted)
        if admitted or begins_window:
            self._plan_steps()

    def advance(self, version: int) -> list[Completion]:
        """Run one step; after a window of steps, return the rows that have ended in the one before.

        A window ends early if a row reaches its limit; then it is read as well. Raises RolloutError if a row's logits
        were not finite.
        """
        if not self._rows:
            return []
        assert self._cache is not None
        self._steps.run(self._cache, self._shape)
        self._versions.append(version)
        num_steps = len(self._versions)
        if num_steps < min(READ_EVERY, self._due):
            return []
        done = self._read(num_left=int(num_steps < self._due))
        for row in self._rows:
            if row and not row.is_finite:
                raise not_finite(row.request.request_id)
        return done

    def abort(self, request_id: int) -> list[Completion]:
        """End the rows of a request with their tokens so far; rows of any request may have ended before."""
        if not self._places(request_id):
            return []
        done = self._read()
        return done + [row.completion("abort") for row in self._remove(self._places(request_id))]

    def retract(self) -> list[Completion]:
        """Write the keys and values of all rows again; return the rows that had ended before."""
        done = self._read()
        seen: set[int] = set()
        parts: list[Prefill] = []
        for row in self._rows:
            if row:
                tokens = [*row.request.prompt_ids, *row.tokens][:-1]
                parts.append(Prefill(tokens, [(row, row.request.request_id in seen)]))
                seen.add(row.request.request_id)
        self._prefill(parts, notes_routes=False)  # they stay those of the passes that the tokens were sampled in
        self._num_stale = 0
        return done

    def use_new_weights(self) -> None:
        """Keep no running row; graphs are made again if weights have moved."""
        self._num_stale = self._num_admitted

    def _read(self, *, num_left: int = 0) -> list[Completion]:
        """End the window, and read what was emitted, except in the last `num_left` windows; return rows that ended.

        All windows are read if the running rows may lack pages, which rows that have ended may have.
        """
        if self._versions:
            num_steps, rows = len(self._versions), [(row, row.since) if row else None for row in self._rows]
            self._windows.append(_Window(rows, self._versions, self._state.take(num_steps, len(rows))))
            for row in self._rows:
                if row:
                    row.in_flight += num_steps - row.since
                    row.since = 0
            self._versions = []
        done: list[Completion] = []
        while len(self._windows) > num_left or (self._windows and self._lacks_pages()):
            done += self._end_rows(self._windows.popleft())
        return done

    def _end_rows(self, window: "_Window") -> list[Completion]:
        """Wait until a window has ended; remove and return the rows that have ended in it."""
        emitted, log_probs, routes = window.emitted.read()
        counts = (emitted != NO_TOKEN).sum(0)
        is_finite: np.ndarray = (np.isfinite(log_probs) | (emitted == NO_TOKEN)).all(axis=0)
        columns = zip(window.rows, *(x.tolist() for x in (emitted.T, log_probs.T, counts, is_finite)), strict=True)
        done, ended = [], []
        for place, (entry, tokens, values, count, finite) in enumerate(columns):
            if entry is None or entry[0].is_removed:
                continue
            row, since = entry
            steps = slice(since, since + count)
            row.extend(tokens[steps], values[steps], window.versions[steps])
            if routes is not None:
                row.routes.append(routes[steps, place].clone())  # not a view of all rows
            row.in_flight -= len(window.versions) - since
            row.is_finite = row.is_finite and finite
            reason = row.end(count, self._stop_strings)
            if row.is_finite and reason:
                done.append(row.completion(reason))
                ended.append(row.place)
                if row.request.keep and row.order > self._num_stale and not self._is_recurrent:
                    self._keep(row, done[-1].routes)
        self._remove(ended)
        return done

    def _keep(self, row: RunningRow, routes: Tensor | None) -> None:
        """Keep the pages of a row's tokens, all but the last one."""
        table, tokens = self._pages, [*row.request.prompt_ids, *row.tokens[:-1]]
        pages = table.share(row.pages[: pages_of(len(tokens))])
        self._kept.add(tokens, pages, lambda: table.release(pages), routes)

    def _remove(self, places: list[int]) -> list[RunningRow]:
        """Free the places and the pages of rows, and return the rows."""
        rows = [row for place in places if (row := self._rows[place])]
        for place, row in zip(places, rows, strict=True):
            self._pages.release(row.pages)
            self._rows[place], row.is_removed = None, True
        while self._rows and self._rows[-1] is None:
            self._rows.pop()
        if places:
            self._state.stop(places)
        return rows

    # ------------------------------------------------------------------------------------ pages and places

    def _places(self, request_id: int) -> list[int]:
        return [place for place, row in enumerate(self._rows) if row and row.request.request_id == request_id]

    @property
    def _is_recurrent(self) -> bool:
        """Whether rows have states, which go on until they are removed."""
        return self._cache is not None and bool(self._cache.states)

    @property
    def _pages(self) -> PageTable:
        assert self._cache is not None
        return self._cache.table

    def _has_pages(self, waiting: deque[Request], num_growing: int) -> bool:
        """Return whether the next request fits and leaves a free page for each running row that grows.

        Kept sequences are freed for it, except the one that it continues. Raises RolloutConfigError if it never fits.
        """
        request = waiting[0]
        if not self._rows and not self._holds(request):
            self._kept.clear()
            self._cache = None  # frees its memory first
            self._cache = self._memory.allocate(self._forward, self._device, self._steps, waiting, self._sizes)
        if not self._holds(request):
            return False
        needed = shared_pages(request) + request.group_size * first_pages(request, READ_EVERY)
        own = self._kept.find(request.prompt_ids)
        while needed + num_growing - len(own.storage if own else []) > self._pages.num_free:
            if not self._kept.drop_oldest(but=own):
                return False
        return True

    def _holds(self, request: Request) -> bool:
        """Return whether there are pages for a request that runs alone, and rows beside those that run."""
        if self._cache is None or self.num_running + request.group_size > self._cache.num_rows:
            return False
        return most_pages(request) <= self._pages.count

    def _extend_tables(self, waiting: deque[Request]) -> bool:
        """Give rows the pages of their steps in the next window.

        If there are too few, they are taken from kept sequences, then from the newest request. One request alone always
        has enough. Returns whether a request lost its pages.
        """
        num_waiting = len(waiting)
        while self._lacks_pages():
            if self._kept.drop_oldest():
                continue
            newest = max((row for row in self._rows if row), key=lambda row: row.order).request
            self._remove([place for place, row in enumerate(self._rows) if row and row.request is newest])
            waiting.appendleft(newest)
        self._close_gaps()
        entries: list[tuple[int, int, int]] = []  # place, column, page
        for place, row in enumerate(self._rows):
            if row and (missing := row.missing_pages(READ_EVERY)):
                first, pages = len(row.pages), self._pages.take(missing)
                entries += [(place, first + i, page) for i, page in enumerate(pages)]
                row.pages += pages
        if entries:
            self._state.write_pages(entries)
        return len(waiting) > num_waiting

    def _lacks_pages(self) -> bool:
        """Whether the rows that may run need more pages for the next window than are free."""
        return (
            bool(self._rows) and sum(row.missing_pages(READ_EVERY) for row in self._rows if row) > self._pages.num_free
        )

    def _close_gaps(self) -> None:
        """Move the last rows into free places if the step then has a smaller size."""
        num_running = self.num_running
        if not self._rows or self._size(num_running) == self._size(len(self._rows)):
            return
        sources = [place for place in range(num_running, len(self._rows)) if self._rows[place]]
        targets = [place for place in range(num_running) if self._rows[place] is None]
        for source, target in zip(sources, targets, strict=True):
            self._rows[target] = row = self._rows[source]
            if row:
                row.place = target
        del self._rows[num_running:]
        if sources and self._cache:
            self._state.move(sources, targets)
            self._cache.move_states(sources, targets)

    def _size(self, num_rows: int) -> int:
        return next(size for size in self._sizes if size >= num_rows)

    def _plan_steps(self) -> None:
        """Set the shape of the steps until the next window or admission, and when a row reaches its limit."""
        rows = [row for row in self._rows if row]
        if not rows:
            return
        samplings = {row.request.sampling for row in rows}
        kinds = SamplingKinds(
            greedy=any(sampling.temperature == 0 for sampling in samplings),
            restricted=any(bool(sampling.top_k) or sampling.top_p < 1 for sampling in samplings),
        )
        pages = table_width(max(len(row.pages) for row in rows))
        self._shape = StepShape(self._size(len(self._rows)), pages, kinds)
        self._due = min(row.since + row.remaining - row.in_flight for row in rows)

    def _prefill(self, parts: Sequence[Prefill], *, notes_routes: bool) -> None:
        assert self._cache is not None
        write_prompts(self._forward, self._cache, self._device, parts, notes_routes=notes_routes)

    # ------------------------------------------------------------------------------------ new rows

    def _reserve(self, request: Request) -> list[tuple[int, RunningRow]]:
        """Give a request its places and pages; the first row of a group writes the shared pages.

        The pages of a kept sequence that the request continues become the first ones of its first row.
        """
        num_own, num_shared = first_pages(request, READ_EVERY), shared_pages(request)
        kept = self._kept.take(request.prompt_ids)
        pages, num_known = (kept.storage, len(kept)) if kept else ([], 0)
        pages = [*pages, *self._pages.take(num_shared + num_own - len(pages))]
        shared = pages[:num_shared]
        places = [place for place, row in enumerate(self._rows) if row is None][: request.group_size]
        places += range(len(self._rows), len(self._rows) + request.group_size - len(places))
        self._rows += [None] * (places[-1] + 1 - len(self._rows))
        reserved = []
        for index, place in enumerate(places):
            if index:
                pages = [*self._pages.share(shared), *self._pages.take(num_own)]
            self._num_admitted += 1
            row = RunningRow(request, index, self._num_admitted, place, len(self._versions), pages, num_known=num_known)
            if kept and kept.routes is not None:
                row.routes.append(kept.routes)
            self._rows[place] = row
            reserved.append((place, row))
        if self._cache is not None and num_known > num_shared * PAGE_SIZE:  # a page that the rows do not share
            first, *others = (row.pages[num_shared] for _, row in reserved)
            self._cache.copy_page(first, others)
        return reserved

    def _start(self, admitted: Sequence[tuple[int, RunningRow]]) -> None:
        """Compute the prompts, except their last tokens, and write the rows of the device."""
        rows = [row for _, row in admitted]
        groups = {row.request.request_id: (row.request, []) for row in rows}
        for row in rows:
            groups[row.request.request_id][1].append(row)
        self._prefill(
            [
                Prefill(request.prompt_ids[:-1], [(row, bool(row.index)) for row in group], group[0].num_known)
                for request, group in groups.values()
            ],
            notes_routes=True,
        )
        stops = [row.request.sampling.stop_token_ids for row in rows]
        longest = table_width(max(pages_of(final_length(row.request)) for row in rows))
        if self._state.widen(stop_ids=max(map(len, stops)), tables=longest):
            self._steps.graphs.clear()
        # In the order of the rows, which are listed by request and index.
        states = [
            uniform_state(*request.noise_key, request.first_index + np.array([row.index for row in group]))
            for request, group in groups.values()
        ]
        samplings, offsets = [row.request.sampling for row in rows], [row.request.resume_offset for row in rows]
        self._state.write(
            [place for place, _ in admitted],
            tokens=[row.request.prompt_ids[-1] for row in rows],
            lengths=[len(row.request.prompt_ids) - 1 for row in rows],
            positions=offsets,
            ends=[offset + sampling.max_new_tokens for offset, sampling in zip(offsets, samplings, strict=True)],
            running=[True] * len(rows),
            noise=np.concatenate(states).view(np.int64),
            temperatures=[sampling.temperature for sampling in samplings],
            top_k=[sampling.top_k if sampling.temperature else 0 for sampling in samplings],
            top_p=[sampling.top_p if sampling.temperature else 1.0 for sampling in samplings],
            stop_ids=stops,
            tables=[row.pages for row in rows],
        )


@dataclass(frozen=True)
class _Window:
    """Steps that were started: by place the row and the step at which it began, and what was emitted."""

    rows: Sequence[tuple[RunningRow, int] | None]
    versions: Sequence[int]
    emitted: Emitted
