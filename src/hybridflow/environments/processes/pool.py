"""Pools of processes of user code on an event loop in a thread. A start that was killed from outside is tried again.

Which process is asked, and what follows from its loss, is decided by the pools of rewards and of environments.
"""

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from hybridflow.config.environment_sources import scheme_of
from hybridflow.environments.processes.user_process import LostError, UserProcess
from hybridflow.errors import ConfigError, EnvironmentConfigError, HybridFlowError

START_TIMEOUT_S = 120.0
"""Seconds for starting a process and importing the user's files, or `timeout_s` of the pool if that is longer."""

MOST_FAILED_STARTS = 2
"""Number of times that a process which ended as it started is started again: it may have been killed from outside."""

END_S = 1.0
"""Seconds that tasks may take to clean up when a pool is closed."""

P = TypeVar("P", bound=UserProcess)


class ProcessPool(Generic[P]):
    """An event loop in a thread and processes on it, until `close`, the end of the pool or that of the interpreter.

    `settings` name the user's code: `what` it is, its `sources`, and its limits `memory_bytes` and `timeout_s`. A
    process says of the code what has the type `loaded`. What the loop keeps for longer than a start or a question must
    not refer to the pool, see `weakly`.
    """

    not_loaded: type[ConfigError] = EnvironmentConfigError
    """The error of code that cannot be loaded."""
    failed_start: type[HybridFlowError] = EnvironmentConfigError
    """The error of code that ends its process as it is loaded."""

    def __init__(self, name: str, settings: Mapping[str, Any], loaded: Any) -> None:
        self._settings, self._loaded = settings, TypeAdapter[Any](loaded)
        self.loop = asyncio.new_event_loop()
        self._processes: list[P] = []  # that were started and are not killed yet
        # A process ends with the thread that has started it.
        self._thread = threading.Thread(target=_serve, args=[self.loop], name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self.loop, self._thread, self._processes)

    @property
    def is_closed(self) -> bool:
        """Whether the pool was closed, or is about to be."""
        return not self._end.alive

    def close(self) -> None:
        """End all processes and the event loop."""
        self._end()

    async def _started(self, make: Callable[[], P]) -> tuple[P, Any]:
        """Return a new process, and what it says of the user's code. Raises `not_loaded` or `failed_start`."""
        processes, num_failed = self._processes, 0

        def remove(_: object) -> None:
            processes[:] = [process for process in processes if not process.is_killed]

        while True:
            process = make()
            processes.append(process)
            process.lost.add_done_callback(remove)
            process.set_time_limit(self._start_timeout_s)
            try:
                loaded = await process.answer(self._read_loaded, self._settings)
                if isinstance(loaded, ConfigError):
                    raise loaded
                process.set_time_limit(None)
                return process, loaded
            except LostError as lost:
                num_failed += 1
                if lost.reason != "exited" or num_failed > MOST_FAILED_STARTS:
                    raise self._import_error(lost) from lost
            except BaseException:
                process.lose("was not ready", "ended")
                raise

    def _read_loaded(self, message: Mapping[str, Any]) -> Any:
        if isinstance(message.get("not_loaded"), str):
            return self.not_loaded(message["not_loaded"])
        return self._loaded.validate_python(message.get("loaded"))

    @property
    def _start_timeout_s(self) -> float:
        return max(START_TIMEOUT_S, self._settings["timeout_s"] or 0.0)

    def _import_error(self, lost: LostError) -> HybridFlowError:
        problem = str(lost)
        if lost.reason == "late":
            problem = (
                f"took longer than {self._start_timeout_s:.0f} s, the limit for starting a process; move slow work "
                "from the import of the file into the function or class"
            )
        return self.failed_start(f"the import of {self._settings['what']} {problem}.")

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return what a coroutine returns on the loop; an interrupt of this thread cancels it."""
        result = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return result.result()
        except BaseException:
            result.cancel()
            raise


def resolved(source: str) -> str:
    """Return the name of a function or class with the whole path of its file."""
    path, _, name = source.rpartition(":")
    is_file = path.endswith(".py") and not scheme_of(source)
    return f"{Path(path).expanduser().resolve()}:{name}" if is_file else source


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method while its object exists, without keeping it alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if found := reference():
            found(*arguments)

    return call


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped, which may be after `_end` if user code blocks it, and close it."""
    try:
        loop.run_forever()
    finally:  # SystemExit of user code in this process ends it
        loop.close()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, processes: list[Any]) -> None:
    """End all, also where the garbage collector calls it: in any thread, which may hold locks that others wait for."""

    async def end() -> None:
        await asyncio.sleep(0)  # what was begun now can clean up
        for process in [*processes]:
            process.lose("was closed", "closed")
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=END_S)
        await asyncio.sleep(0)  # callbacks of lost processes run
        loop.stop()

    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(end(), loop)
    if threading.current_thread() is not thread:
        thread.join(2 * END_S)  # user code in this process may block it
    for process in [*processes]:
        process.kill()  # in this thread, since an interpreter that ends starts no others
    processes.clear()
