"""Reports of calls that do not finish: who waits for whom, and the stacks of the running workers and the controller."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from hybridflow.controller.ray.liveness.watch import observe
from hybridflow.controller.ray.processes import RayCall
from hybridflow.runtime.python_stacks import own_stacks


def chain_of(call: RayCall) -> list[tuple[str, RayCall]]:
    """Return the call and the calls that must finish before it, up to the running one, each after what it is for.

    [("waits for", score), ("which reads the result of", generate), ("which runs after", load)]
    """
    chain = [("waits for", call)]
    while not call.is_finished:
        if (before := call.predecessor()) is not None:
            chain.append(("which runs after", call := before))
        elif (awaited := call.awaited()) is not None:
            chain.append(("which reads the result of", call := awaited))
        else:
            break
    return chain


def running_call(call: RayCall) -> RayCall:
    """Return the running call that a call waits for: itself, an older one of its process, or one that it reads."""
    return chain_of(call)[-1][1]


def describe_chain(call: RayCall) -> str:
    """Return the chain as a sentence."""
    links = [f"{link} {each.where} on {each.worker.name}" for link, each in chain_of(call)]
    return f"The controller {', '.join(links)}, which runs."


MAX_REPORTS = 4
"""Maximum number of workers in a report."""

AGAIN_FACTOR = 10
"""A wait that stays without progress is reported again after this many times as long."""

logger = logging.getLogger(__name__)


def report_calls(calls: Sequence[RayCall]) -> str:
    """Return reports of the processes that run these calls, of at most `MAX_REPORTS`, and the controller's stacks."""
    lines, shown = [], calls[:MAX_REPORTS]
    with ThreadPoolExecutor(max_workers=MAX_REPORTS) as threads:
        homes = (call.worker.process.home for call in shown)
        for call, report in zip(shown, threads.map(observe, homes), strict=True):
            lines += [f"{call.worker.name}:", report]
    if len(calls) > MAX_REPORTS:
        lines.append(f"... and {len(calls) - MAX_REPORTS} more workers without a report.")
    return "\n".join([*lines, "The controller itself waits here:", own_stacks()])


class HangReports:
    """The warnings of one wait, after `after_s` seconds without progress; None: no warnings."""

    def __init__(self, after_s: float | None) -> None:
        self._after_s = self._next_s = after_s or float("inf")

    def check(self, pending: Sequence[RayCall], quiet_s: Callable[[RayCall], float]) -> None:
        """Log a warning if a running call has been without progress for long. `quiet_s`: the seconds of a call."""
        waiting_for: dict[RayCall, RayCall] = {}
        for call in pending:
            waiting_for.setdefault(running_call(call), call)
        longest_s = max(map(quiet_s, waiting_for), default=0.0)
        if longest_s < self._after_s:
            self._next_s = self._after_s
        elif longest_s >= self._next_s:
            self._next_s *= AGAIN_FACTOR
            try:
                running = sorted(waiting_for, key=quiet_s, reverse=True)
                logger.warning("%s", _report([waiting_for[call] for call in running], running, longest_s))
            except Exception as error:  # the run does not depend on its reports
                logger.warning("no report of a wait without progress could be made: %r", error)


def _report(awaited: Sequence[RayCall], running: Sequence[RayCall], longest_s: float) -> str:
    """Return the text for calls that the controller waits for, each with the running call that it waits for."""
    lines = [
        f"No progress for {longest_s:.0f} s in {running[0].where} on {running[0].worker.name}.",
        *map(describe_chain, awaited[:MAX_REPORTS]),
    ]
    if len(awaited) > MAX_REPORTS:
        lines.append(f"... and {len(awaited) - MAX_REPORTS} more calls.")
    return "\n".join([*lines, report_calls(running)])
