"""Tools of an environment: public methods with types, their JSON schemas, and their arguments, checked.

A method with the attribute `json_schema` has this schema of its parameters, and checks its arguments itself.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.fields import FieldInfo

from hybridflow.environments.episodes.environment import METHODS, Environment
from hybridflow.environments.episodes.messages import ToolCall
from hybridflow.errors import EnvironmentConfigError, ToolError

MAX_SHOWN = 200
"""Characters of a value in an error that a model reads."""


@dataclass(frozen=True)
class Tool:
    """A method that a model may call: its name, its docstring, and a model, or the JSON schema, of its parameters."""

    name: str
    description: str
    parameters: type[BaseModel] | Mapping[str, Any]
    function: Callable[..., Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Tool":
        """Return the tool of a function with typed parameters. Raises EnvironmentConfigError for one without types."""
        name = function.__name__
        if (given := getattr(function, "json_schema", None)) is not None:
            return cls(name, function.__doc__ or "", given, function)
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name.startswith(("_", "model_")):
                raise EnvironmentConfigError(
                    f"tool '{name}': the name of a parameter cannot begin as '{parameter.name}' does; rename it."
                )
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise EnvironmentConfigError(f"tool '{name}': *{parameter.name} has no schema; name each parameter.")
            if parameter.annotation is parameter.empty:
                raise EnvironmentConfigError(
                    f"tool '{name}': parameter '{parameter.name}' has no type; write one, as in {parameter.name}: int."
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (_type_of(function, parameter.annotation, name), default)
        try:
            model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
            model.model_json_schema()
        except (PydanticSchemaGenerationError, PydanticUserError, NameError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise EnvironmentConfigError(f"tool '{name}': its parameters have no JSON schema: {reason}") from error
        return cls(name, inspect.cleandoc(function.__doc__ or ""), model, function)

    def schema(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        if isinstance(self.parameters, Mapping):
            parameters = dict(self.parameters)
        else:
            parameters = self.parameters.model_json_schema()
            for described in (parameters, *parameters.get("properties", {}).values()):
                described.pop("title", None)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def arguments(self, call: ToolCall) -> dict[str, Any]:
        """Return the checked arguments of a call. Raises ToolError, with a text for the model, if one is wrong."""
        given = self._typed(call.arguments) if call.is_text else call.arguments
        if isinstance(self.parameters, Mapping):
            return dict(given)
        try:
            checked = self.parameters.model_validate(given)
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}"
                for each in error.errors(include_url=False, include_context=False)
            ]
            raise ToolError(f"{self.name}: {'; '.join(problems)[: 4 * MAX_SHOWN]}") from error
        own = inspect.signature(self.function).parameters  # the function fills in its defaults, but no Field(default=3)
        chosen = [name for name, each in own.items() if isinstance(each.default, FieldInfo)]
        names = checked.model_fields_set.union(chosen)
        return {name: getattr(checked, name) for name in type(checked).model_fields if name in names}

    def _typed(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments that are texts with the types of JSON, where the parameter is not a text itself."""
        properties, typed = self.schema()["function"]["parameters"].get("properties", {}), {}
        for name, value in arguments.items():
            typed[name] = value
            if isinstance(value, str) and properties.get(name, {}).get("type") != "string":
                with suppress(ValueError, RecursionError):  # the check of the type says what is wrong
                    typed[name] = json.loads(value)
        return typed


def _type_of(function: Callable[..., Any], annotation: Any, tool: str) -> Any:
    """Return the type that an annotation names, if it is a text, as after `from __future__ import annotations`."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return evaluated(function, annotation)
    except Exception as error:  # the text is a program
        raise EnvironmentConfigError(
            f"tool '{tool}': the type {annotation!r} cannot be read: {type(error).__name__}: {error}"
        ) from error


def evaluated(function: Callable[..., Any], annotation: str) -> Any:
    """Return the value of an annotation of a function that is a text. Raises what its evaluation raises."""
    plain = inspect.unwrap(function)
    plain = getattr(plain, "__func__", plain)
    held = dict(zip(plain.__code__.co_freevars, (cell.cell_contents for cell in plain.__closure__ or ()), strict=True))
    return eval(annotation, {**plain.__globals__, **held})


def tools_of(instance: object) -> dict[str, Tool]:
    """Return the public methods of an object as tools by name, in the order of their definition.

    Those that every environment has are not tools.
    """
    besides = METHODS if isinstance(instance, Environment) else ()
    names: dict[str, None] = {}
    for each in reversed(type(instance).__mro__[:-1]):
        names |= dict.fromkeys(name for name, value in vars(each).items() if inspect.isfunction(value))
    chosen = [name for name in names if not name.startswith("_") and name not in besides]
    tools = [Tool.of(getattr(instance, name)) for name in chosen]
    return {tool.name: tool for tool in tools}


def tool_of(tools: Mapping[str, Tool], call: ToolCall) -> Tool:
    """Return the tool of a call. Raises ToolError, with a text for the model, if there is none of that name."""
    if call.name in tools:
        return tools[call.name]
    raise ToolError(f"no tool is named {call.name[:MAX_SHOWN]!r}; there are {', '.join(tools) or 'none'}")
