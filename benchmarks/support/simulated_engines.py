"""Rollout engines whose decoding is only timed, so that schedules over many engines are compared in seconds.

A step takes STEP_MS (it reads the weights), SEQUENCE_MS for each running sequence (it multiplies) and TOKEN_MS for each
token with keys and values (it reads them): a roofline of a model of 8B parameters in bfloat16 (128 KiB of keys and
values per token) on a GPU with 4 TB/s and 400 TFLOP/s, not a measurement. A sequence is admitted if its tokens fit;
when the cache is full, the newest sequence waits again and keeps its tokens.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

STEP_MS, SEQUENCE_MS, TOKEN_MS = 4.0, 0.04, 3.3e-5
PREFILL_MS = 0.04
"""Milliseconds for each token of a prompt, or of a response that continues elsewhere."""

LARGEST_PHASE = 64
"""Steps between two looks at other engines."""


@dataclass
class Sequence_:
    """One response: tokens with keys and values so far, and tokens to generate."""

    held: int
    remaining: int


@dataclass
class SimulatedEngine:
    """An engine with `capacity` tokens of keys and values; `clock` is in milliseconds."""

    capacity: int
    max_running: int
    waiting: deque[Sequence_] = field(default_factory=deque)
    running: list[Sequence_] = field(default_factory=list)
    clock: float = 0.0

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def advance(self) -> None:
        """Run some steps: until a sequence ends, the cache is full, or LARGEST_PHASE."""
        held = sum(sequence.held for sequence in self.running)
        while (
            self.waiting
            and len(self.running) < self.max_running
            and (not self.running or held + self.waiting[0].held + len(self.running) < self.capacity)
        ):
            self.running.append(self.waiting.popleft())
            held += self.running[-1].held
            self.clock += PREFILL_MS * self.running[-1].held
        count = len(self.running)
        until_full = (self.capacity - held) // count
        if until_full < 1 and count > 1:
            self.waiting.appendleft(self.running.pop())
            return
        steps = max(1, min(LARGEST_PHASE, until_full, min(sequence.remaining for sequence in self.running)))
        self.clock += steps * (STEP_MS + SEQUENCE_MS * count + TOKEN_MS * (held + count * (steps - 1) / 2))
        for sequence in self.running:
            sequence.held += steps
            sequence.remaining -= steps
        self.running = [sequence for sequence in self.running if sequence.remaining > 0]


def finish_times(engines: Sequence[SimulatedEngine], *, moves_stragglers: bool = False) -> list[float]:
    """Run the engines until all are idle; return the time of each, in milliseconds.

    `moves_stragglers`: an idle engine takes half of the sequences of the engine with the most, waiting ones first, and
    computes their keys and values again.
    """
    while busy := [engine for engine in engines if engine.has_work()]:
        engine = min(busy, key=lambda engine: engine.clock)
        engine.advance()
        if moves_stragglers:
            for idle in (each for each in engines if not each.has_work()):
                _take_half(idle, max(engines, key=lambda each: len(each.waiting) + len(each.running)), engine.clock)
    return [engine.clock for engine in engines]


def _take_half(idle: SimulatedEngine, loaded: SimulatedEngine, now: float) -> None:
    left = len(loaded.waiting) + len(loaded.running)
    if left < 2:
        return
    idle.clock = max(idle.clock, now)
    for _ in range(left // 2):
        idle.waiting.append(loaded.waiting.pop() if loaded.waiting else loaded.running.pop())
