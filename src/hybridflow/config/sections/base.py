"""Base class of the sections and the types of their keys. Imports no torch."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

RoleName = Literal["actor_rollout", "rollout", "critic", "reference", "teacher", "reward", "actor"]

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Parameter = bool | int | float | str
NoneAsText = BeforeValidator(lambda value: None if value == "none" else value)  # TOML has no null


def _expect(is_valid: Callable[[Any], bool], expected: str) -> BeforeValidator:
    def valid(value: object) -> object:
        if not is_valid(value):
            raise ValueError(f"expected {expected}")
        return str(value) if isinstance(value, date) else value  # TOML has dates

    return BeforeValidator(valid)


def _is_date(value: object) -> bool:
    with suppress(ValueError):
        return str(date.fromisoformat(str(value))) == str(value)
    return value == "auto"


def _zero_or_usable(value: float) -> float:
    if 0 < value < LOWEST_TEMPERATURE:
        raise ValueError(f"logits divided by it overflow; use 0 (greedy), or at least {LOWEST_TEMPERATURE}")
    return value


LOWEST_TEMPERATURE = 1e-3
Temperature = Annotated[float, Field(ge=0), AfterValidator(_zero_or_usable)]
CountOrAuto = _expect(lambda x: x == "auto" or (isinstance(x, int) and x > 0), 'a positive integer or "auto"')
SwitchOrAuto = _expect(lambda x: x == "auto" or isinstance(x, bool), 'true, false or "auto"')
DateOrAuto = _expect(_is_date, 'a date as in 2026-11-28 or "auto"')


def named_or_user(names: Any) -> BeforeValidator:
    """Return a validator that accepts one of the names, or the user's own function."""
    known = ", ".join(map(repr, get_args(names)))
    return _expect(
        lambda x: x in get_args(names) or (isinstance(x, str) and ":" in x.strip(":")),
        f"one of {known}, or your own function as 'path.py:function' or 'module:function'",
    )


UserFunction = Annotated[str, Field(json_schema_extra={"shown": "'path.py:function' or 'module:function'"})]


class Section(BaseModel):
    """A frozen group of keys; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """Reject texts that no file name and no file of ours can hold."""
        for text in _texts_of(value):
            if "\0" in text:
                raise ValueError("a text cannot have a NUL character")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"character {error.start} is not Unicode text; check the terminal's encoding"
                ) from error
        return value


def _texts_of(value: Any) -> Iterator[str]:
    """Yield the texts in a value, also in tables and arrays."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts_of((*value, *value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _texts_of(item)
