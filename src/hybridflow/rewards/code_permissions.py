"""What the program may do with attributes of objects that the statements of a test have passed to it."""

from __future__ import annotations

import sys
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FrameType,
    GeneratorType,
    MemberDescriptorType,
    ModuleType,
    TracebackType,
)

from code_objects import origin_of  # beside this file

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from typing import Any

_NAME_OF_STATEMENTS = "program"
_HIDDEN = (GeneratorType, CoroutineType, AsyncGeneratorType, FrameType, TracebackType, CodeType, ModuleType)
"""Types of the judge's objects whose attributes would lead to its state."""

_HIDDEN_OF_MOCKS = frozenset(
    ("configure_mock", "attach_mock", "reset_mock", "mock_add_spec", "mock_calls", "method_calls", "call_args_list")
)
"""Methods and lists of mocks by which the program would change what the test asks them."""


def permit_attribute(operation: str, owner: Any, name: Any) -> None:
    """Raise AttributeError unless the program may get, set or delete this attribute of a test's object.

    It may set data, but not what the test's class defines to check the program: methods, functions and properties
    without a setter.
    """
    is_of_test = type(owner).__module__ == _NAME_OF_STATEMENTS
    is_hidden = type(name) is not str or isinstance(owner, _HIDDEN) or name.startswith("__" if is_of_test else "_")
    mock = sys.modules.get("unittest.mock")
    is_mock = mock is not None and issubclass(type(owner), mock.NonCallableMock)
    if (is_hidden and name != "__name__") or (is_mock and name in _HIDDEN_OF_MOCKS):
        raise AttributeError(f"attribute {name!r:.100} of the test's object is not available to the program")
    if operation != "getattr" and (not is_of_test or is_mock or not _is_data(owner, name)):
        raise AttributeError(f"attribute {name!r:.100} of the test's object is read-only for the program")


def _is_data(owner: Any, name: str) -> bool:
    """Return whether an attribute is not defined, a property with a setter, or a value that is not callable."""
    defined = next((vars(each)[name] for each in type(owner).__mro__ if name in vars(each)), None)
    if isinstance(defined, property):
        return defined.fset is not None
    own = getattr(owner, "__dict__", {}).get(name)
    if isinstance(defined, MemberDescriptorType):
        defined, own = None, getattr(owner, name, None)
    is_function = callable(own) and origin_of(own) is None  # a reference has __call__, and is the program's anyway
    return not callable(defined) and not hasattr(type(defined), "__get__") and not is_function
