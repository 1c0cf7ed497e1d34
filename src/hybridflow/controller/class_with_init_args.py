"""`ClassWithInitArgs`: a worker class and what its constructor will be given, on every rank."""

import inspect
from typing import Any

from hybridflow.errors import DispatchError


class ClassWithInitArgs:
    """`cls(*args, **kwargs)`, not called yet. Every rank is built with its own copy of the arguments.

    Raises DispatchError if `cls` is no class or its constructor does not take these arguments.
    """

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        if not isinstance(cls, type):
            raise DispatchError(f"ClassWithInitArgs needs a worker class, not an instance; got {cls!r}.")
        self.cls, self.args, self.kwargs = cls, args, kwargs
        constructor = inspect.signature(cls.__init__)
        try:
            bound = constructor.bind(None, *args, **kwargs)
        except TypeError as error:
            raise DispatchError(f"{cls.__name__}.__init__{constructor} does not accept this: {error}.") from error
        self._named_arguments = bound.arguments

    @property
    def config(self) -> Any:
        """The constructor's argument `config` (None where there is none): what `reads`, `writes` and `rows`
        functions are called with."""
        return self.kwargs.get("config", self._named_arguments.get("config"))

    def __repr__(self) -> str:
        return f"ClassWithInitArgs({self.cls.__name__})"


def require_init_args(cls: Any) -> ClassWithInitArgs:
    """What was given. Raises DispatchError for a class by itself, where a class with its arguments is needed."""
    if not isinstance(cls, ClassWithInitArgs):
        name = cls.__name__ if isinstance(cls, type) else "MyWorker"
        raise DispatchError(
            f"a worker group needs a class with the arguments of its constructor, ClassWithInitArgs({name}) or on Ray "
            f"RayClassWithInitArgs({name}); got {cls!r}."
        )
    return cls
