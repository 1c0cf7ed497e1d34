"""`ClassWithInitArgs`: a worker class and the arguments of its constructor, the same on every rank."""

import inspect
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
