"""`ClassWithInitArgs`: a worker class and the arguments of its constructor, the same on every rank."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.errors import DispatchError


class ClassWithInitArgs:
    """A deferred `cls(*args, **kwargs)`; every rank is built with its own copy of the arguments.

    Raises DispatchError if `cls` is not a class or its constructor does not accept these arguments.
    """

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        if not isinstance(cls, type):
            raise DispatchError(f"ClassWithInitArgs needs a worker class, not an instance; got {cls!r}.")
        self.cls, self.args, self.kwargs = cls, args, kwargs
        constructor = inspect.signature(cls.__init__)
        try:
            bound = constructor.bind(None, *args, **kwargs)
        except TypeError as error:
            raise DispatchError(
                f"{cls.__name__}.__init__{constructor} does not accept the arguments of ClassWithInitArgs: {error}."
            ) from error
        self._named_arguments = bound.arguments

    @property
    def config(self) -> Any:
        """The argument `config` of the constructor, or None; functions in `reads`, `writes` and `rows` receive it."""
        return self.kwargs.get("config", self._named_arguments.get("config"))

    def __repr__(self) -> str:
        return f"ClassWithInitArgs({self.cls.__name__})"


def require_init_args(cls: Any) -> ClassWithInitArgs:
    """Return `cls` unchanged. Raises DispatchError if it is not a ClassWithInitArgs, e.g. a bare class."""
    if not isinstance(cls, ClassWithInitArgs):
        name = cls.__name__ if isinstance(cls, type) else "MyWorker"
        raise DispatchError(
            f"a worker group needs a class with its constructor arguments, got {cls!r}; use ClassWithInitArgs({name}), "
            f"or RayClassWithInitArgs({name}) on Ray."
        )
    return cls


@dataclass(frozen=True)
class ProcessThreads:
    """The calls that a process runs at the same time. `of_second`: role and method of the calls of a second thread."""

    concurrent_calls: int = 1
    of_second: frozenset[tuple[str, str]] = frozenset()


def threads_of(classes: Mapping[str, ClassWithInitArgs]) -> ProcessThreads:
    """Return the threads of a process with these roles. Raises DispatchError if they cannot share one."""
    by_role = {name: cls_with_init.cls for name, cls_with_init in classes.items()}
    declared = {name: getattr(cls, "concurrent_calls", 1) for name, cls in by_role.items()}
    for name, calls in declared.items():
        if not isinstance(calls, int) or isinstance(calls, bool) or calls < 1:
            raise DispatchError(
                f"{by_role[name].__name__}.concurrent_calls={calls!r} is invalid: expected an integer of 1 or more."
            )
        if calls > 1 and len(declared) > 1:
            raise DispatchError(
                f"{name!r} runs {calls} calls at the same time, so it cannot share a process with "
                f"{', '.join(repr(n) for n in declared if n != name)}, whose calls run one after another; give "
                f"{name!r} a separate pool."
            )
    of_second = {
        (name, method) for name, cls in by_role.items() for method in getattr(cls, "second_thread_methods", ())
    }
    return ProcessThreads(max(declared.values(), default=1), frozenset(of_second))
