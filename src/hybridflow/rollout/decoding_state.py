"""The state of decoding rows in buffers of fixed address, and one step on it that never waits for the host.

tokens ──> forward (keys and values into pages) ──> logits ──> noise, sampling ──> emitted[step]
   ^                                                               │
   └────────── next tokens, lengths, which rows still run <────────┘
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridflow.models.forward import Forward
from hybridflow.models.kernels.exact import exact_log_probs
from hybridflow.models.kernels.triton_support import generation_kernels
from hybridflow.models.paged_kv_cache import PagedDecodePlan, PagedKVCache
from hybridflow.models.routes import ROUTES
from hybridflow.models.varlen import upload
from hybridflow.rollout.sampling import RowRules, SamplingKinds, draw_rows

NO_TOKEN = -1
"""The token that an idle row emits."""


SMALLEST_TABLE = 8
"""The smallest number of pages per row that a step has; larger ones are powers of two."""


@dataclass(frozen=True)
class StepShape:
    """The fixed shapes of a step: its first `rows` rows, with `pages` pages each, and the kinds of sampling."""

    rows: int
    pages: int
    kinds: SamplingKinds


def row_sizes(max_running_sequences: int) -> list[int]:
    """Return the numbers of rows that steps have: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... up to the largest."""
    powers = [1 << n for n in range(max_running_sequences.bit_length())]
    sizes = {*powers, *(3 * power // 2 for power in powers if power >= 16), max_running_sequences}
    return sorted(size for size in sizes if size <= max_running_sequences)


def table_width(pages: int) -> int:
    """Return the number of pages per row of a step whose rows have up to this number: a power of two."""
    return max(SMALLEST_TABLE, 1 << (pages - 1).bit_length())


class DecodingState:
    """Device buffers of up to `max_rows` rows, and of what they emit in up to `num_steps` steps.

    Rows by name, (max_rows, ...): the last `tokens`, of which keys and values are not computed yet; `lengths` before
    it; the `positions` of the next token in the response, and where the response `ends`; whether the row is `running`;
    the state of its `noise`; its sampling parameters, `stop_ids` (padded with NO_TOKEN) and page `tables`.
    """

    def __init__(
        self,
        device: torch.device,
        max_rows: int,
        num_steps: int,
        log_prob_dtype: torch.dtype,
        routes_shape: tuple[int, int] = (0, 0),
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(max_rows, *shape, dtype=dtype, device=device)

        self.rows = {name: zeros() for name in ("tokens", "lengths", "positions", "ends", "noise", "top_k")}
        self.rows |= {name: zeros(dtype=torch.float64) for name in ("temperatures", "top_p")}
        self.rows |= {"running": zeros(dtype=torch.bool), "stop_ids": zeros(0), "tables": zeros(1, dtype=torch.int32)}
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.emitted = torch.full((num_steps, max_rows), NO_TOKEN, device=device)
        self.log_probs = torch.zeros(num_steps, max_rows, dtype=log_prob_dtype, device=device)
        self.routes = torch.zeros(num_steps, max_rows, *routes_shape, dtype=ROUTES, device=device)

    @property
    def buffers(self) -> list[Tensor]:
        """All buffers that steps use."""
        return [*self.rows.values(), self.step, self.emitted, self.log_probs, self.routes]

    def reset(self) -> None:
        """Let no row run, and forget what was emitted."""
        self.rows["running"].fill_(False)
        self.emitted.fill_(NO_TOKEN)
        self.step.zero_()

    def widen(self, *, stop_ids: int, tables: int) -> bool:
        """Give rows at least these numbers of stop ids and pages; return whether buffers have moved."""
        moved = False
        for name, width in (("stop_ids", stop_ids), ("tables", tables)):
            if (old := self.rows[name]).shape[1] < width:
                self.rows[name], moved = pad(old, (0, width - old.shape[1]), value=_filling(name)), True
        return moved

    def write(self, places: Sequence[int], **values: Any) -> None:
        """Set named values of rows, one for each place; of `stop_ids` and `tables` a sequence for each place."""
        index = self._uploaded(places)
        for name, value in values.items():
            buffer = self.rows[name]
            if buffer.dim() == 2:
                value = padded_rows(value, buffer.shape[1], _filling(name))
            self.rows[name][index] = self._uploaded(value, buffer.dtype)

    def write_pages(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Set entries of the tables: (place, column, page) each."""
        place, column, page = self._uploaded(entries).T
        self.rows["tables"][place, column] = page.to(torch.int32)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows to other places; the old places stop running."""
        where = self._uploaded([sources, targets])
        for buffer in self.rows.values():
            buffer[where[1]] = buffer[where[0]]
        self.stop(sources)

    def _uploaded(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """Copy numbers to the device, which the host does not wait for."""
        return upload(torch.as_tensor(values, dtype=dtype).numpy(), self.step.device)

    def stop(self, places: Sequence[int]) -> None:
        """End rows from the host."""
        self.write(places, running=[False] * len(places))

    def take(self, num_steps: int, num_rows: int) -> "Emitted":
        """Return and clear what was emitted in the last steps; the host need not wait for the device yet."""
        taken = Emitted(*(x[:num_steps, :num_rows] for x in (self.emitted, self.log_probs, self.routes)))
        self.emitted.fill_(NO_TOKEN)
        self.step.zero_()
        return taken


class Emitted:
    """Tokens, log-probs (num_steps, num_rows) and routes (num_steps, num_rows, ...) on their way to the host."""

    def __init__(self, tokens: Tensor, log_probs: Tensor, routes: Tensor) -> None:
        emitted = [tokens, log_probs, *([routes] if routes.numel() else [])]
        self._copies = [x.to("cpu", non_blocking=True, copy=True) for x in emitted]
        self._arrived = torch.cuda.Event() if tokens.is_cuda else None
        if self._arrived:
            self._arrived.record()

    def read(self) -> tuple[np.ndarray, np.ndarray, Tensor | None]:
        """Wait until they are there, and return them."""
        if self._arrived:
            self._arrived.synchronize()
        tokens, log_probs, *routes = self._copies
        return tokens.numpy(), log_probs.numpy(), routes[0] if routes else None


def decode_step(forward: Forward, cache: PagedKVCache, state: DecodingState, shape: StepShape) -> None:
    """Add one token to every running row among the first ones. No value is read by the host."""
    rows = {name: buffer[: shape.rows] for name, buffer in state.rows.items()}
    running = rows["running"]
    plan = PagedDecodePlan(cache, rows["tables"][:, : shape.pages], rows["lengths"], running)
    with generation_kernels():
        logits = forward.decode(rows["tokens"], plan)
    rules = RowRules(rows["temperatures"], rows["top_k"], rows["top_p"])
    tokens, log_probs = draw_rows(logits, rows["noise"], rows["positions"], rules, shape.kinds)
    if forward.is_exact:
        log_probs, _ = exact_log_probs(logits, tokens, temperature=rules.temperatures)
    # Not by index_copy_, whose deterministic kernel on a GPU sorts the indices and copies the buffer twice.
    is_now = torch.arange(len(state.emitted), device=state.step.device)[:, None] == state.step
    emits = [(state.emitted, tokens.masked_fill(~running, NO_TOKEN)), (state.log_probs, log_probs)]
    if forward.routes is not None:
        emits.append((state.routes, forward.routes))
    for buffer, new in emits:
        emitted = buffer[:, : shape.rows]
        emitted.copy_(torch.where(is_now.view(-1, *[1] * new.ndim), new, emitted))
    state.step += 1
    rows["tokens"].copy_(torch.where(running, tokens, rows["tokens"]))
    rows["lengths"] += running
    rows["positions"] += running
    has_stopped = (tokens[:, None] == rows["stop_ids"]).any(1)
    running &= ~has_stopped & (rows["positions"] < rows["ends"])


def _filling(name: str) -> int:
    return NO_TOKEN if name == "stop_ids" else 0


def padded_rows(rows: Sequence[Sequence[int]], width: int, filling: int = 0) -> np.ndarray:
    """Return rows of different lengths, filled up on the right."""
    padded = np.full((len(rows), width), filling)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded
