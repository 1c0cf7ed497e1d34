"""A pytest plugin and a function: they record which process reaches which fault, and when each test and fixture runs.

`hit(n)` stands in the source beside fault n. It runs in every process of a test, also in those that only have the
standard library; it appends to the file RECORD, and never raises. `judge.py` joins hits and tests by process and time.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

RECORD = "@RECORD@"  # replaced where this file is installed

_contexts: list[str] = []  # fixtures and the test that run now; only in a process of pytest
_seen: dict[Any, float] = {}


def hit(number: int) -> None:
    """Record that this process reaches a fault: once per test or fixture, elsewhere at most once per second."""
    now, key = time.time(), (number, os.getpid(), _contexts[-1] if _contexts else None)
    if key in _seen and (key[2] or now - _seen[key] < 1.0):
        return
    _seen[key] = now
    _write({"hit": number, "pid": os.getpid(), "time": now})


def _write(record: dict[str, Any]) -> None:
    try:
        descriptor = os.open(RECORD, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(descriptor, (json.dumps(record) + "\n").encode())
        os.close(descriptor)
    except OSError:  # a program that may not write: its faults are judged by all tests of their package
        pass


try:
    import pytest
except ImportError:  # a process of the standard library only
    pass
else:

    def _during(name: str, record: dict[str, Any]) -> Iterator[None]:
        _contexts.append(name)
        start = time.time()
        try:
            return (yield)
        finally:
            _contexts.pop()
            _write({**record, "pid": os.getpid(), "start": start, "end": time.time()})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
        """Record when the test runs, and the fixtures that it uses."""
        names = [f"{one.baseid}::{name}" for name, ones in item._fixtureinfo.name2fixturedefs.items() for one in ones]  # type: ignore[attr-defined]
        return (yield from _during(item.nodeid, _test(item.nodeid) | {"fixtures": names}))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
        """Record when a fixture that several tests share is made."""
        if fixturedef.scope == "function":
            return (yield)
        name = f"{fixturedef.baseid}::{fixturedef.argname}"
        return (yield from _during(name, {"fixture": name}))

    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        """Record the outcome; with xdist the process that distributes the tests receives them as well."""
        if report.when == "call" or report.outcome != "passed":
            _write({"outcome": report.outcome, "of": _without_group(report.nodeid)})

    def _test(nodeid: str) -> dict[str, str]:
        return {"test": _without_group(nodeid), "venv": os.path.basename(sys.prefix)}

    def _without_group(nodeid: str) -> str:
        """Return the id that pytest accepts: xdist appends the name of a group."""
        return nodeid.rpartition("@")[0] if os.environ.get("PYTEST_XDIST_WORKER") else nodeid
