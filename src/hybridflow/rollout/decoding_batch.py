"""Sequences that decode together, one token each per step.

A prompt is computed once for its whole group. Finished rows are removed when their share is large enough.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridflow.models.attention import AttentionPlan
from hybridflow.models.continued_prefill import ContinuedPlan
from hybridflow.models.forward import Forward
from hybridflow.models.kernels.exact import exact_log_probs
from hybridflow.models.kv_cache import DecodePlan, KeysValues, KVCache, PrefillPlan
from hybridflow.models.routes import ROUTES
from hybridflow.rollout.base import Completion, FinishReason, Request, SamplingParams
from hybridflow.rollout.kept_sequences import KeptSequence, KeptSequences
from hybridflow.rollout.parked_rows import ParkedRow, ParkedRows, in_places
from hybridflow.rollout.requests import StopStrings, longest_of, not_finite
from hybridflow.rollout.sampling import sample_tokens
from hybridflow.runtime.random_streams import uniform

COMPACT_BELOW = 0.9
"""Finished rows are removed when the share of running rows falls below this value."""

COMPACT_PARKED_BELOW = 0.75
"""`COMPACT_BELOW` while rows are kept for later turns: these move too, and move back for their turn."""

PREFILL_TOKENS = 16384
"""Maximal number of prompt tokens in one forward pass; a longer prompt has a pass to itself."""

CONTINUED_TOKENS = 4 * PREFILL_TOKENS
"""`PREFILL_TOKENS` of prompts that continue kept sequences, whose known tokens only need attention."""


class DecodingBatch:
    """Sequences with equal sampling parameters; each is one row of the cache and of every tensor below.

    Only `max_new_tokens` may differ between rows. After an error in a method the batch is unusable: its requests
    restart in another one.
    """

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        dtype: torch.dtype,
        sampling: SamplingParams,
        stop_strings: StopStrings,
        kept: KeptSequences[ParkedRow],
    ) -> None:
        self.forward, self.sampling, self._stop_strings, self._kept = forward, sampling, stop_strings, kept
        self.num_running = 0
        self._cache = KVCache(device)
        self._parked = ParkedRows(self._cache)
        self._stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        self._names: list[tuple[int, int]] = []  # (request_id, index in the group)
        self._requests: list[Request] = []
        # (rows, width + 1): tokens computed for finished rows are written after their ends, at most in the last column.
        self._columns = {
            "uniforms": torch.zeros(0, 1, dtype=torch.float64, device=device),
            "tokens": torch.zeros(0, 1, dtype=torch.int64, device=device),
            "log_probs": torch.zeros(0, 1, dtype=torch.promote_types(dtype, torch.float32), device=device),
        }
        if forward.routes_shape[0]:
            no_routes = torch.zeros(0, 1, *forward.routes_shape, dtype=ROUTES, device=device)
            self._columns["routes"] = no_routes  # of the tokens
        self._prompt_routes: dict[int, list[Tensor]] = {}  # by request, of the tokens of its prompt
        self._versions: list[int] = []  # of each step
        self._fresh_from = 0  # rows that start at this step or later have keys and values of the present weights only
        self._starts = torch.zeros(0, dtype=torch.int64, device=device)  # the step of a row's first token
        self._counts = torch.zeros(0, dtype=torch.int64, device=device)
        self._limits = torch.zeros(0, dtype=torch.int64, device=device)
        self._is_running = torch.zeros(0, dtype=torch.bool, device=device)
        self._first_logits: list[Tensor] = []  # of admitted rows without a token

    @property
    def num_rows(self) -> int:
        """The number of rows without parked ones, those that have finished and were not removed included."""
        return len(self._names) - self._parked.num_below(len(self._names))

    @property
    def num_parked(self) -> int:
        """The number of rows of kept sequences."""
        return len(self._parked)

    @property
    def capacity(self) -> int:
        """The number of tokens that each row has room for."""
        return self._cache.capacity

    def admit(self, requests: Sequence[Request], taken: Mapping[int, KeptSequence[ParkedRow]]) -> None:
        """Compute each prompt once and add a row for every sequence of its group.

        Of a request in `taken`, by its id, only the tokens after the kept ones are computed: in their row, or if that
        is not in this batch or the group has several sequences, in copies of it.
        """
        known = {number: [kept.routes] for number, kept in taken.items() if kept.routes is not None}
        self._prompt_routes = {
            **{request_id: self._prompt_routes[request_id] for request_id, _ in self._names},
            **{request.request_id: known.get(request.request_id, []) for request in requests},
        }
        own, copied, whole = list[Request](), list[Request](), list[Request]()
        rows, copies = dict[int, ParkedRow](), dict[int, KeysValues]()
        for request in requests:
            parked = taken[request.request_id].storage if request.request_id in taken else None
            if parked is None:
                whole.append(request)
            elif parked.rows is self._parked and request.group_size == 1:
                own.append(request)
                rows[request.request_id] = parked
            else:
                copied.append(request)
                copies[request.request_id] = parked.copy()
                parked.release()
        capacity = max(map(longest_of, requests))
        room = sum(request.group_size for request in (*copied, *whole))
        if own:
            own = self._go_on(own, rows, capacity, room)
        copied.sort(key=lambda request: len(request.prompt_ids) - len(copies[request.request_id]))
        num_front = len(self._names) + len(own)
        if len(self._cache.lengths) > num_front:
            self._parked.move_after(range(num_front))  # without rows that were given up
        num_old = len(self._cache.lengths)
        for part, most in ((copied, CONTINUED_TOKENS), (whole, PREFILL_TOKENS)):
            for admitted in _passes(part, most):
                room -= sum(request.group_size for request in admitted)
                self._admit_pass(admitted, capacity, room, copies)
        if num_old > num_front:
            self._parked.move_after([*range(num_front), *range(num_old, len(self._cache.lengths))])
        requests = [*own, *copied, *whole]
        self._names += [(request.request_id, i) for request in requests for i in range(request.group_size)]
        self._requests += [request for request in requests for _ in range(request.group_size)]
        device = self._counts.device
        limits = [request.sampling.max_new_tokens for request in requests for _ in range(request.group_size)]
        self._limits = torch.cat([self._limits, torch.tensor(limits, device=device)])
        width, old = int(self._limits.max()), len(self._counts)
        self._columns = {
            name: pad(column, (*[0, 0] * (column.ndim - 2), 0, width + 1 - column.shape[1], 0, len(limits)))
            for name, column in self._columns.items()
        }
        self._columns["uniforms"][old:, :width] = torch.from_numpy(_uniforms(requests, width)).to(device)
        self._counts = pad(self._counts, (0, len(limits)))
        self._starts = pad(self._starts, (0, len(limits)), value=len(self._versions))
        self._is_running = pad(self._is_running, (0, len(limits)), value=True)
        self.num_running += len(limits)

    def advance(self, version: int) -> list[Completion]:
        """Add one token to every running row; return the completions that end with it."""
        logits = self._next_logits()
        columns, position = self._columns, self._counts[:, None]
        tokens, log_probs = sample_tokens(logits, columns["uniforms"].gather(1, position).squeeze(1), self.sampling)
        if self.forward.is_exact and (self.sampling.top_k or self.sampling.top_p < 1):  # of all tokens
            log_probs, _ = exact_log_probs(logits, tokens, temperature=self.sampling.temperature or 1.0)
        self._require_finite(log_probs)
        columns["tokens"].scatter_(1, position, tokens[:, None])
        columns["log_probs"].scatter_(1, position, log_probs[:, None])
        self._versions.append(version)
        self._counts += self._is_running
        ended, stopped = self._counts >= self._limits, None
        if len(self._stop_ids):
            stopped = torch.isin(tokens, self._stop_ids)
        if self.sampling.stop_strings:
            by_text = self._reached_stop_strings()
            stopped = by_text if stopped is None else stopped | by_text
        if stopped is not None:
            ended |= stopped
        return self._finish((ended & self._is_running).nonzero().flatten(), stopped)

    def abort(self, request_id: int) -> list[Completion]:
        """End the running sequences of a request; return them with their tokens so far."""
        is_chosen = [name == request_id for name, _ in self._names]
        chosen = torch.tensor(is_chosen, dtype=torch.bool, device=self._counts.device)
        return self._finish((self._is_running & chosen).nonzero().flatten(), None, aborted=True)

    def retract(self) -> None:
        """Compute the keys and values of the running rows again with the present weights; tokens stay."""
        if self.num_running < len(self._names):
            self.remove_finished()
        self._fresh_from = 0
        capacity, device = self._cache.capacity, self._counts.device
        self._cache = KVCache(device)
        self._parked = ParkedRows(self._cache)
        computed = [  # all tokens but the last one, which the next step computes
            [*request.prompt_ids, *tokens[: count - 1]]
            for request, tokens, count in zip(
                self._requests, self._columns["tokens"].tolist(), self._counts.tolist(), strict=True
            )
        ]
        first = 0
        for count in split_by_tokens([len(tokens) for tokens in computed]):
            plan = PrefillPlan([len(tokens) for tokens in computed[first : first + count]])
            self._logits_after(computed[first : first + count], plan)
            first += count
            self._cache.append(plan, torch.arange(count, device=device), capacity, room=len(computed) - first)

    def use_new_weights(self) -> None:
        """Do not keep running rows, unless they are retracted: their keys and values are of other weights."""
        self._fresh_from = len(self._versions)

    def _go_on(
        self, requests: Sequence[Request], rows: Mapping[int, ParkedRow], capacity: int, room: int
    ) -> list[Request]:
        """Let requests go on in their parked rows, which follow the running ones then; return them in that order."""
        self.remove_finished(list(rows.values()))
        ordered = sorted(requests, key=lambda request: rows[request.request_id].row)
        first = len(self._names)
        for admitted in _passes(ordered, CONTINUED_TOKENS):
            lengths = [len(request.prompt_ids) for request in admitted]
            starts = [rows[request.request_id].length for request in admitted]
            self._cache.extend(first, lengths, capacity, room)
            source = torch.arange(len(admitted), device=self._counts.device)
            plan = ContinuedPlan(self._cache, first, source, lengths, starts)
            self._first_logits.append(self._logits_after([r.prompt_ids for r in admitted], plan, starts))
            self._note_routes(admitted, starts)
            first += len(admitted)
        for row in rows.values():
            row.release()
        return ordered

    def _admit_pass(
        self, requests: Sequence[Request], capacity: int, room: int, copies: Mapping[int, KeysValues]
    ) -> None:
        """Compute prompts in rows at the end; what is known is in `copies`, for all requests or for none."""
        device = self._counts.device
        group_sizes = torch.tensor([request.group_size for request in requests], device=device)
        source = torch.arange(len(requests), device=device).repeat_interleave(group_sizes)
        prompts = [request.prompt_ids for request in requests]
        lengths = [len(tokens) for tokens in prompts]
        known = [copies[request.request_id] for request in requests if request.request_id in copies]
        if known:
            starts, first = [len(each) for each in known], len(self._cache.lengths)
            self._cache.append_known(known, lengths, source, capacity, room)
            logits = self._logits_after(prompts, ContinuedPlan(self._cache, first, source, lengths, starts), starts)
        else:
            plan, starts = PrefillPlan(lengths), [0] * len(lengths)
            logits = self._logits_after(prompts, plan)
            self._cache.append(plan, source, capacity, room)
        self._first_logits.append(logits[source])
        self._note_routes(requests, starts)

    def _note_routes(self, requests: Sequence[Request], starts: Sequence[int]) -> None:
        """Note the routes of the last pass, of the tokens of prompts from `starts` on."""
        if self.forward.routes is None:
            return
        counts = [len(request.prompt_ids) - start for request, start in zip(requests, starts, strict=True)]
        for request, routes in zip(requests, self.forward.routes.split(counts), strict=True):
            self._prompt_routes[request.request_id].append(routes)

    def _logits_after(
        self, sequences: Sequence[Sequence[int]], plan: AttentionPlan, starts: Sequence[int] = ()
    ) -> Tensor:
        """Return the logits (sequences, vocabulary) after each sequence, of which the tokens from `starts` are new."""
        device = self._counts.device
        new = [(start, len(tokens)) for start, tokens in zip(starts or [0] * len(sequences), sequences, strict=True)]
        ids = [token for tokens, (start, _) in zip(sequences, new, strict=True) for token in tokens[start:]]
        return self.forward(
            torch.tensor(ids, device=device)[None],
            position_ids=torch.cat([torch.arange(start, length, device=device) for start, length in new])[None],
            attention_plan=plan,
            logits_to_keep=torch.tensor([length - start for start, length in new], device=device).cumsum(0) - 1,
        )[0]

    def _next_logits(self) -> Tensor:
        """Return the logits (rows, vocabulary) of the next token: from the prompt for new rows, else by one pass."""
        first, self._first_logits = self._first_logits, []
        num_old = len(self._names) - sum(map(len, first))
        if not num_old:
            return first[0] if len(first) == 1 else torch.cat(first)
        last = (self._counts[:num_old] - 1)[:, None]
        tokens = self._columns["tokens"][:num_old].gather(1, last).squeeze(1)
        logits = self.forward.decode(tokens, DecodePlan(self._cache, num_old))
        if self.forward.routes is not None:
            self._columns["routes"][torch.arange(num_old, device=last.device), last.squeeze(1)] = self.forward.routes
        self._cache.lengths[:num_old] += self._is_running[:num_old]
        return torch.cat([logits, *first]) if first else logits

    def _finish(self, ended: Tensor, stopped: Tensor | None, *, aborted: bool = False) -> list[Completion]:
        """End rows and return their completions; `stopped` (rows,) is True for rows that drew a stop token."""
        if not len(ended):
            return []
        starts, counts = self._starts[ended].tolist(), self._counts[ended].tolist()
        stops = [False] * len(counts) if stopped is None else stopped[ended].tolist()
        columns = [self._columns[name][ended].tolist() for name in ("tokens", "log_probs")]
        done = []
        for i, row in enumerate(ended.tolist()):
            (request_id, index), count = self._names[row], counts[i]
            reason: FinishReason = "abort" if aborted else "stop" if stops[i] else "length"
            tokens, log_probs = (column[i][:count] for column in columns)
            versions = self._versions[starts[i] : starts[i] + count]
            routes = None
            if "routes" in self._columns:
                of_tokens = self._columns["routes"][row, : max(0, count - 1)]
                routes = torch.cat([*self._prompt_routes[request_id], of_tokens])
            done.append(Completion(request_id, index, tokens, log_probs, versions, reason, routes))
            request = self._requests[row]
            can_be_kept = not self._cache.states  # a row's states go on until it is removed
            if request.keep and can_be_kept and not aborted and starts[i] >= self._fresh_from:
                computed = [*request.prompt_ids, *tokens[:-1]]
                parked = self._parked.add(row, len(computed))
                self._kept.add(computed, parked, parked.release, routes)
        self._is_running[ended] = False
        self.num_running -= len(done)
        has_parked = self._parked.num_below(len(self._names)) > 0
        if self.num_running < (COMPACT_PARKED_BELOW if has_parked else COMPACT_BELOW) * len(self._names):
            self.remove_finished()
        return done

    def remove_finished(self, next_rows: Sequence[ParkedRow] = ()) -> None:
        """Remove finished rows, so that running ones, then `next_rows`, then other parked ones follow each other.

        Rows from the end take the places of others, so that few rows move.
        """
        running = in_places(self._is_running.nonzero().flatten().tolist(), 0)
        self._parked.move_after([*running, *in_places([parked.row for parked in next_rows], len(running))])
        if running == list(range(len(self._names))):
            return
        rows = torch.tensor(running, dtype=torch.int64, device=self._counts.device)
        self._columns = {name: column[rows] for name, column in self._columns.items()}
        self._starts, self._counts, self._limits = (x[rows] for x in (self._starts, self._counts, self._limits))
        self._is_running = self._is_running[rows]
        self._names = [self._names[row] for row in running]
        self._requests = [self._requests[row] for row in running]

    def _reached_stop_strings(self) -> Tensor:
        """Return for each row whether its text ends with a stop string."""
        tokens, reached = self._columns["tokens"].tolist(), torch.zeros_like(self._is_running)
        counts = self._counts.tolist()
        for row in self._is_running.nonzero().flatten().tolist():
            reached[row] = self._stop_strings.end(tokens[row][: counts[row]], self.sampling.stop_strings)
        return reached

    def _require_finite(self, log_probs: Tensor) -> None:
        if math.isfinite(float(log_probs.sum())):
            return
        bad = self._is_running & ~log_probs.isfinite()
        if bool(bad.any()):
            raise not_finite(self._names[int(bad.nonzero()[0])][0])


def _uniforms(requests: Sequence[Request], width: int) -> np.ndarray:
    """Return the noise (sequences, width) of tokens, from the request's key, the index and the position."""
    parts = []
    for _, same_length in groupby(requests, lambda request: len(request.noise_key)):
        sequences = [(request, request.first_index + i) for request in same_length for i in range(request.group_size)]
        keys = zip(*(request.noise_key for request, _ in sequences), strict=True)
        columns = [np.array([number % 2**64 for number in column], dtype=np.uint64)[:, None] for column in keys]
        positions = np.array([request.resume_offset for request, _ in sequences])[:, None] + np.arange(width)
        parts.append(uniform(*columns, np.array([index for _, index in sequences])[:, None], positions))
    return np.concatenate(parts)


def _passes(requests: Sequence[Request], most: int) -> Iterator[Sequence[Request]]:
    """Yield consecutive requests whose prompts have at most `most` tokens together, or a single one."""
    first = 0
    for count in split_by_tokens([len(request.prompt_ids) for request in requests], most):
        yield requests[first : first + count]
        first += count


def split_by_tokens(lengths: Sequence[int], most: int = PREFILL_TOKENS) -> Iterator[int]:
    """Yield numbers of consecutive sequences that have at most `most` tokens together, or of a single one."""
    count = used = 0
    for length in lengths:
        if count and used + length > most:
            yield count
            count = used = 0
        count += 1
        used += length
    if count:
        yield count
