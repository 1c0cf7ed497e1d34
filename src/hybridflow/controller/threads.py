"""The threads of a worker process, from the declarations of its roles."""

from collections.abc import Mapping

from hybridflow.errors import DispatchError


def concurrent_calls_of(classes: Mapping[str, type]) -> int:
    """Return the `concurrent_calls` of a process with these roles. Raises DispatchError if they cannot share one."""
    declared = {name: getattr(cls, "concurrent_calls", 1) for name, cls in classes.items()}
    for name, calls in declared.items():
        if not isinstance(calls, int) or isinstance(calls, bool) or calls < 1:
            raise DispatchError(
                f"{classes[name].__name__}.concurrent_calls={calls!r} is invalid: expected an integer of 1 or more."
            )
        if calls > 1 and len(declared) > 1:
            raise DispatchError(
                f"{name!r} runs {calls} calls at the same time, so it cannot share a process with "
                f"{', '.join(repr(n) for n in declared if n != name)}, whose calls run one after another; give "
                f"{name!r} a separate pool."
            )
    return max(declared.values(), default=1)


def beside_of(classes: Mapping[str, type]) -> frozenset[tuple[str, str]]:
    """Return role and method of the calls that run in the second thread of a process with these roles."""
    return frozenset((name, method) for name, cls in classes.items() for method in getattr(cls, "beside", ()))
